"""The user's constraints on a pipeline: partly given stages, and pins and specs of the whole graph, per stage.

A pin or spec names mesh axes, and each stage has its own mesh. So pins and specs need given slices for all stages, and
are refused otherwise.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hidet
import numpy as np

from hidet_dist.checks import is_list, is_whole, shown
from hidet_dist.errors import ConfigError
from hidet_dist.limits import MOST_DEVICES
from hidet_dist.machine.slices import MeshSlice, check_slice, slice_sizes, slices_at
from hidet_dist.search.formulation.labels import tensor_labels
from hidet_dist.search.formulation.pins import OPERATOR, Pin, Pins
from hidet_dist.spec import DeviceMesh, TensorShardSpec
from hidet_dist.view import GraphView

Array = np.ndarray[Any, Any]

_LISTED = 12  # numbers of operators that a message lists
_STAGE_KEYS = ("ranks", "operators", "weights")
_ACTIVATION = re.compile(r"^t(\d+)\.(\d+)$")
_RESULT = re.compile(r"^y(\d+)$")


@dataclass(frozen=True)
class StageConstraint:
    """The user's constraints on one stage; None or empty for properties that are searched.

    Attributes
    ----------
    ranks: the first rank of its slice of the mesh, and the one behind the last.
    operators: the first of its operators, by number in the plan's table, and the one behind the last.
    weights: names of weights that it has, with ``*`` and ``?`` as in file names.
    including: numbers of operators that it has, among others.
    """

    ranks: tuple[int, int] | None = None
    operators: tuple[int, int] | None = None
    weights: tuple[str, ...] = ()
    including: tuple[int, ...] = ()


StageConstraints = int | tuple[StageConstraint, ...] | None
"""The user's ``stages``: None if everything is searched, the number of stages, or a constraint for each stage."""


def parse_stages(given: Any, what: str = "stages") -> StageConstraints:
    """Parse the user's ``stages``: None, a number, or a list of one mapping per stage. Raises ConfigError."""
    if given is None or (is_whole(given, 1) and given <= MOST_DEVICES):
        return None if given is None else int(given)
    if not is_list(given) or not given:
        raise ConfigError(
            f"{what} must be the number of stages, or a list with a dict for each stage, such as "
            f"[{{'ranks': [0, 4]}}, {{'ranks': [4, 8]}}]; got {shown(given)}."
        )
    stages = []
    for number, entry in enumerate(given):
        name_of = f"{what}[{number}]"
        if not isinstance(entry, Mapping):
            raise ConfigError(
                f"{name_of} must be a dict with any of the keys {', '.join(_STAGE_KEYS)}; got {shown(entry)}."
            )
        for key in entry:
            if key not in _STAGE_KEYS:
                raise ConfigError(f"Unknown key {shown(key)} in {name_of}; the keys are {', '.join(_STAGE_KEYS)}.")
        weights = entry.get("weights", ())
        weights = (weights,) if isinstance(weights, str) else weights
        if not is_list(weights) and not isinstance(weights, tuple):
            raise ConfigError(f"{name_of}['weights'] must be a list of names; got {shown(weights)}.")
        for name in weights:
            if not isinstance(name, str):
                raise ConfigError(f"{name_of}['weights'] must be a list of names; got {shown(name)} among them.")
        ranks, operators = (_range(entry, key, name_of) for key in ("ranks", "operators"))
        stages.append(StageConstraint(ranks, operators, tuple(weights)))
    return tuple(stages)


def _range(entry: Mapping[str, Any], key: str, what: str) -> tuple[int, int] | None:
    value = entry.get(key)
    if value is None:
        return None
    if not is_list(value) or len(value) != 2 or not all(is_whole(v, 0) for v in value) or value[0] >= value[1]:
        raise ConfigError(f"{what}[{key!r}] must be a first number and the one behind the last; got {shown(value)}.")
    return int(value[0]), int(value[1])


def check_parts(stages: Sequence[StageConstraint], mesh: DeviceMesh) -> list[MeshSlice | None]:
    """Return the given slice of each stage, or None for a stage whose slice is searched.

    Raises
    ------
    ConfigError
        When ranks are not a slice of the mesh, or contradict other stages; it names the stages.
    """
    parts: list[MeshSlice | None] = []
    taken, last = 0, -1  # the ranks before ``taken`` belong to stages up to ``last``
    for number, stage in enumerate(stages):
        if stage.ranks is None:
            parts.append(None)
            continue
        part = MeshSlice(*stage.ranks)
        try:
            check_slice(mesh, part)
        except ConfigError as error:
            raise ConfigError(f"stages[{number}]['ranks']: {error}") from error
        if part.start < taken:
            raise ConfigError(
                f"stages[{number}]['ranks'] = {list(stage.ranks)} contradicts stages[{last}]['ranks'] = "
                f"{list(stages[last].ranks or ())}: stages take the ranks in order, each its own."
            )
        between = number - last - 1
        if (part.start > taken and not between) or part.start - taken < between:
            raise ConfigError(
                f"stages[{number}]['ranks'] = {list(stage.ranks)} leaves the ranks {taken} to {part.start - 1} to "
                f"{between} stages before it: each stage needs a rank, and each rank a stage."
            )
        parts.append(part)
        taken, last = part.stop, number
    left, searched = mesh.size - taken, len(stages) - last - 1
    if (left and not searched) or left < searched:
        raise ConfigError(
            f"The stages leave the ranks {taken} to {mesh.size - 1} of the mesh {mesh} to {searched} stages: each "
            "stage needs a rank, and each rank a stage."
        )
    return parts


def check_slices(stages: int | Sequence[StageConstraint], mesh: DeviceMesh) -> None:
    """Raise ConfigError unless the mesh can be divided into slices, one for each stage, in order.

    ``stages`` are their number, or constraints that :func:`check_parts` accepts.
    """
    parts = [None] * stages if isinstance(stages, int) else check_parts(stages, mesh)
    ends = {0}  # the ranks behind the stages so far
    for number, part in enumerate(parts):
        after = {one.stop for end in ends for one in slices_at(mesh, end) if part in (None, one)}
        if not after or (number == len(parts) - 1 and mesh.size not in after):
            what = f"stages = {stages}" if isinstance(stages, int) else f"stages[{number}]"
            raise ConfigError(
                f"{what}: the mesh {mesh} cannot be divided into {len(parts)} slices of all its ranks, one for each "
                f"stage, as given: slices have {', '.join(map(str, slice_sizes(mesh)))} ranks, and begin at a multiple "
                "of their size."
            )
        ends = after


def cuts_at(begins: Sequence[int]) -> str:
    """Describe the operators before which a graph can be cut; ``begins`` ends with the number of its operators."""
    return f"cut before the operators {_listed(begins[1:-1])}, where one tensor crosses"


def check_runs(stages: int | Sequence[StageConstraint], runs: Sequence[Array | None], begins: Sequence[int]) -> None:
    """Check that stages can take all operators of a graph in order.

    Parameters
    ----------
    stages: int or sequence of StageConstraint
        The stages, or their number.
    runs: sequence of array or None
        For each stage bool[units, units + 1]: whether it may have the units from one to before another. None for any.
    begins: sequence of int
        The first operator of each unit, and the number of operators.

    Raises
    ------
    ConfigError
        Naming the stage that contradicts those before it, or the operators that no stage can have.
    """
    most = len(begins) - 1
    if len(runs) > most:
        cuts = f"it can be {cuts_at(begins)}" if most > 1 else "no cut has one tensor that crosses"
        raise ConfigError(f"{len(runs)} stages: the graph can be cut into at most {most}; {cuts}.")
    ends = np.zeros(most + 1, dtype=bool)  # the units before which the stages so far may end
    ends[0] = True
    for number, allowed in enumerate(runs):
        after = np.zeros_like(ends)
        if allowed is None:
            after[int(ends.argmax()) + 1 :] = True
        else:
            after |= allowed[ends[:-1]].any(axis=0)
        if not after.any():
            assert not isinstance(stages, int)
            before = _listed([begin for begin, end in zip(begins, ends, strict=True) if end])
            raise ConfigError(
                f"{_described(stages, number)} contradicts what is given of the stages before it, which must end "
                f"before operator {before}: stages have the operators in order, each operator in one stage."
            )
        ends = after
    if not ends[-1]:
        assert not isinstance(stages, int)
        last = _listed([begin for begin, end in zip(begins, ends, strict=True) if end])
        raise ConfigError(
            f"{_described(stages, len(stages) - 1)} leaves operators to no stage: it must end before operator {last}, "
            f"and the graph has the operators 0 to {begins[-1] - 1}."
        )


def _described(stages: Sequence[StageConstraint], number: int) -> str:
    stage = stages[number]
    name = f"stages[{number}]"
    if stage.operators is not None:
        return f"{name}['operators'] = {list(stage.operators)}"
    return f"{name}['weights'] = {list(stage.weights)}" if stage.weights else name


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:_LISTED])) + (", ..." if len(numbers) > _LISTED else "")


def operators_of_weights(
    stages: Sequence[StageConstraint], view: GraphView, names: Mapping[str, hidet.Tensor]
) -> list[dict[int, str]]:
    """Map, for each stage, the operators that it must have to the given name of the weight.

    Raises ConfigError when the graph has no such weight, or two stages must have the same operator.
    """
    labels = tensor_labels(view, names)
    names_of: dict[str, list[str]] = {name: [name] for name in view.weights}
    for name, label in labels.items():
        if name in names_of:
            names_of[name].append(label)
    readers: dict[str, list[int]] = {}
    for name, use in view.uses():
        if name in names_of and use.operator is not None:
            readers.setdefault(name, []).append(use.operator)
    result: list[dict[int, str]] = []
    taken: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        required: dict[int, str] = dict.fromkeys(stage.including, "")
        for pattern in stage.weights:
            matching = [
                name
                for name, synonyms in names_of.items()
                if any(fnmatch.fnmatchcase(synonym, pattern) for synonym in synonyms)
            ]
            if not matching:
                known = [synonyms[-1] for synonyms in names_of.values()]
                raise ConfigError(
                    f"stages[{number}]['weights'] names {pattern!r}; the graph has no such weight. It has "
                    f"{', '.join(known[:8])}{', ...' if len(known) > 8 else ''}."
                )
            for name in matching:
                for operator in readers.get(name, ()):
                    other = taken.setdefault(operator, (number, pattern))
                    if other[0] != number:
                        raise ConfigError(
                            f"stages[{other[0]}]['weights'] {other[1]!r} and stages[{number}]['weights'] {pattern!r} "
                            f"contradict each other: operator {operator} reads weights of both."
                        )
                    required[operator] = pattern
        result.append(required)
    return result


@dataclass(frozen=True)
class PartOptions:
    """The pins and specs of a part of a graph, for the mesh of its stage."""

    pins: Pins
    parsed: tuple[Pin, ...]
    input_specs: list[TensorShardSpec | None] | None
    output_specs: list[TensorShardSpec | None] | None


@dataclass(frozen=True)
class GraphOptions:
    """The user's pins, names and specs of a whole graph."""

    pins: tuple[Pin, ...] = ()
    names: Mapping[str, hidet.Tensor] | None = None
    input_specs: Sequence[TensorShardSpec | None] | None = None
    output_specs: Sequence[TensorShardSpec | None] | None = None

    def of_part(
        self,
        view: GraphView,
        part_tensors: Mapping[str, str],
        part_view: GraphView,
        operators: Sequence[int],
        mesh: DeviceMesh,
    ) -> PartOptions:
        """Translate to a part of the graph; ``part_tensors`` maps names of tensors to those in the part."""
        labels = {label: name for name, label in tensor_labels(view, dict(self.names or {})).items()}
        pins: list[Pin] = []
        for pin in self.pins:
            name = self._translated(pin.name, view, labels, part_tensors, operators, part_view)
            if name is not None:
                pins.append(replace(pin, name=name))
        inputs = self._specs_of(self.input_specs, view.inputs, part_tensors, part_view.inputs)
        outputs = self._specs_of(self.output_specs, view.outputs, part_tensors, part_view.outputs)
        return PartOptions(Pins(part_view, mesh, pins), tuple(pins), inputs, outputs)

    @staticmethod
    def _specs_of(
        specs: Sequence[TensorShardSpec | None] | None,
        names: Sequence[str],
        part_tensors: Mapping[str, str],
        part_names: Sequence[str],
    ) -> list[TensorShardSpec | None] | None:
        """Translate the specs of the graph's inputs or outputs, called ``names``, to those of the part."""
        if specs is None:
            return None
        spec_of = {part_tensors[name]: spec for name, spec in zip(names, specs, strict=True) if name in part_tensors}
        return [spec_of.get(name) for name in part_names]

    @staticmethod
    def _translated(
        name: str,
        view: GraphView,
        labels: Mapping[str, str],
        part_tensors: Mapping[str, str],
        operators: Sequence[int],
        part_view: GraphView,
    ) -> str | None:
        """Return the name in the part of what a pin of the graph names; None if that is not in the part."""
        if name.startswith(OPERATOR):
            number = Pins(view, DeviceMesh((1,)), ()).operator_number(name)
            return f"{OPERATOR}{operators.index(number)}" if number in operators else None
        result = _RESULT.match(name)
        if result is not None and name not in labels:
            output = part_tensors.get(view.outputs[int(result.group(1))])
            return f"y{part_view.outputs.index(output)}" if output in part_view.outputs else None
        tensor = labels.get(name, name)
        if tensor not in view.tensors:
            raise ConfigError(f"The graph has nothing called {name!r} whose spec could be pinned.")
        activation = _ACTIVATION.match(tensor)
        if activation is not None:
            number = int(activation.group(1))
            return f"t{operators.index(number)}.{activation.group(2)}" if number in operators else None
        return part_tensors.get(tensor)
