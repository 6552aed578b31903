"""Plans: stages, each with a sharding spec for every operator, weight, input and output of its graph."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hidet_dist.codec import LARGEST, OMITTED, UNWRITTEN, Key, decode, encode_with_format, of_format
from hidet_dist.errors import PlanError, SpecError
from hidet_dist.files import json_text, parse_json, write_text
from hidet_dist.files import read_text as read_file
from hidet_dist.limits import MOST_PLAN_BYTES
from hidet_dist.spec.collectives import COLLECTIVES
from hidet_dist.spec.mesh import DeviceMesh
from hidet_dist.spec.operator import OpShardSpec
from hidet_dist.spec.overlap import OverlapPlan
from hidet_dist.spec.parts import check_parts
from hidet_dist.spec.pipeline import Pipeline, StageTensor, StageTensors
from hidet_dist.spec.report import SearchReport
from hidet_dist.spec.rows import microseconds, stage_rows
from hidet_dist.spec.storage import WeightStorage
from hidet_dist.spec.symbols import INT32_MAX, SymbolPlan
from hidet_dist.spec.tensor import TensorShardSpec

if TYPE_CHECKING:
    from rich.table import Table

    from hidet_dist.spec.explanation import Explanation

FORMAT = 2


@dataclass(frozen=True)
class TensorPlan:
    """A weight, input, output or state of the graph: its shape (elements), dtype name, bytes in all, and spec.

    ``label`` is the user's name, empty if there is none. ``written`` is the symbolic shape of a tensor with symbolic
    dims, empty for a fixed shape; ``shape`` and ``nbytes`` are for the sizes planned for. ``storage`` is how ranks hold
    a weight if not in its own dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    spec: TensorShardSpec
    label: str = ""
    written: Annotated[tuple[int | str, ...], OMITTED] = ()
    storage: Annotated[WeightStorage | None, OMITTED] = None

    def local_nbytes(self, mesh: DeviceMesh, coordinate: Sequence[int] | None = None) -> int:
        """Return the bytes that the shard at ``coordinate`` takes, by default the largest one, including padding."""
        if self.storage is not None:
            return self.storage.nbytes(self.spec.local_shape(self.shape, mesh, coordinate))
        elements = math.prod(self.shape)
        return self.spec.local_nbytes(self.shape, self.nbytes // elements, mesh, coordinate) if elements else 0

    def check(self, mesh: DeviceMesh) -> None:
        """Check specs and sizes against the mesh. Raises SpecError if they fit no graph."""
        self.spec.validate(self.shape, mesh, padded=True)
        if self.written and len(self.written) != len(self.shape):
            raise SpecError(f"{self.name} has {len(self.shape)} dims; {len(self.written)} are written.")
        elements = math.prod(self.shape)
        if elements > LARGEST or (self.nbytes % elements if elements else self.nbytes):
            raise SpecError(f"A tensor of the shape {list(self.shape)} cannot have {self.nbytes} bytes.")
        if self.storage is not None:
            self.local_nbytes(mesh)  # refuses a shape without matrices


@dataclass(frozen=True)
class ConversionPlan:
    """The conversion of a tensor from the spec in which it is produced to a required spec.

    ``steps`` are written as :class:`hidet_dist.reshard.Step` prints them; ``seconds`` is their predicted time.
    """

    tensor: str
    source: TensorShardSpec
    target: TensorShardSpec
    steps: tuple[str, ...]
    seconds: float

    def check(self, mesh: DeviceMesh) -> None:
        """Check specs and sizes against the mesh. Raises SpecError if they fit no graph."""
        for spec in (self.source, self.target):
            spec.check_axes(mesh)
        if self.source.ndim != self.target.ndim:
            raise SpecError(
                f"{self.tensor} cannot be converted from {self.source} to {self.target}: their dims differ."
            )


@dataclass(frozen=True)
class OperatorPlan:
    """The sharding of one operator of the graph.

    ``conversions`` are those first required by this operator; a conversion that an earlier operator requires is listed
    only there. ``note`` is the reason why an operator without a rule is replicated, and how one is costed whose class
    has no traits (:mod:`hidet_dist.traits`). ``label`` is a name derived from the user's name of the weight that it
    reads. Times are in seconds.
    """

    index: int
    operator: str
    spec: OpShardSpec
    compute_seconds: float
    reduce_seconds: float
    conversions: Annotated[tuple[ConversionPlan, ...], Key("connections")] = ()
    note: str = ""
    label: str = ""

    @property
    def communication(self) -> tuple[str, ...]:
        """The conversion steps and the dispatch before the operator and the reduce functions after it, as text."""
        steps = [step for conversion in self.conversions for step in conversion.steps]
        steps += () if self.spec.dispatch is None else self.spec.dispatch.steps
        return (*steps, *(str(fn) for fns in self.spec.reduce_fns for fn in fns))

    @property
    def conversion_seconds(self) -> float:
        """Predicted time of the conversions that are listed here."""
        return sum(conversion.seconds for conversion in self.conversions)

    @property
    def communication_seconds(self) -> float:
        """Predicted time of the conversions and the reduce functions."""
        return self.conversion_seconds + self.reduce_seconds

    @property
    def seconds(self) -> float:
        """Predicted time of the operator with its communication."""
        return self.compute_seconds + self.reduce_seconds + self.conversion_seconds

    def check(self, mesh: DeviceMesh) -> None:
        """Check specs and sizes against the mesh. Raises SpecError if they fit no graph."""
        for spec in (*self.spec.in_specs, *self.spec.out_specs):
            spec.check_axes(mesh)
        if self.spec.dispatch is not None and max(self.spec.dispatch.mesh_axes) >= mesh.ndim:
            raise SpecError(f"{self.spec.dispatch} is over an axis that the mesh {mesh} does not have.")
        for spec, fns in zip(self.spec.out_specs, self.spec.reduce_fns, strict=True):
            for fn in fns:
                if max(fn.mesh_axes) >= mesh.ndim:
                    raise SpecError(f"{fn} reduces over an axis that the mesh {mesh} does not have.")
                if fn.dim is not None and fn.dim >= spec.ndim:
                    raise SpecError(f"{fn} splits a dim that the output {spec} does not have.")
                check_parts(fn.parts, mesh, str(fn))
        for conversion in self.conversions:
            conversion.check(mesh)


@dataclass(frozen=True)
class StagePlan:
    """The plan of one stage on its mesh.

    Attributes
    ----------
    mesh: the mesh of the stage's ranks.
    fingerprint: the fingerprint of the stage's graph.
    operators, weights, inputs, outputs: the specs, in the graph's order.
    output_conversions: the conversions of graph outputs.
    symbols: the symbolic dims of the graph.
    overlap: the schedule of overlapped communication; None for machines without overlap.
    report: the report of the search that made the plan. It is not part of the plan: neither compared nor written.
    states: the specs of the graph's states, each of its old and of its new value.
    """

    mesh: DeviceMesh
    fingerprint: str
    operators: tuple[OperatorPlan, ...]
    weights: tuple[TensorPlan, ...]
    inputs: tuple[TensorPlan, ...]
    outputs: tuple[TensorPlan, ...]
    output_conversions: Annotated[tuple[ConversionPlan, ...], Key("output_connections")] = ()
    symbols: Annotated[tuple[SymbolPlan, ...], OMITTED] = ()
    overlap: Annotated[OverlapPlan | None, OMITTED] = None
    report: Annotated[SearchReport | None, UNWRITTEN] = field(default=None, compare=False, repr=False)
    states: Annotated[tuple[TensorPlan, ...], OMITTED] = ()

    @property
    def stored(self) -> tuple[TensorPlan, ...]:
        """The tensors that nothing computes: weights, inputs and states."""
        return (*self.weights, *self.inputs, *self.states)

    @property
    def has_equal_shards(self) -> bool:
        """Whether all ranks hold shards of one shape of every tensor."""
        specs = {tensor.spec for tensor in (*self.stored, *self.outputs)}
        specs.update(spec for op in self.operators for spec in (*op.spec.in_specs, *op.spec.out_specs))
        return all(spec.has_equal_shards(self.mesh) for spec in specs)

    @property
    def seconds(self) -> float:
        """Predicted seconds of one run of the stage, one operator or collective after the other."""
        return math.fsum([*(o.seconds for o in self.operators), *(c.seconds for c in self.output_conversions)])

    @property
    def makespan_seconds(self) -> float:
        """Predicted seconds of one run of the stage, with overlap if the machine supports it."""
        return self.seconds if self.overlap is None else self.overlap.seconds

    @property
    def weight_bytes_per_device(self) -> int:
        """Bytes of weights that each device holds, at most."""
        return sum(weight.local_nbytes(self.mesh) for weight in self.weights)

    def weight_bytes_of(self, rank: int) -> int:
        """Return the bytes of weights that a rank of the stage holds."""
        coordinate = self.mesh.coordinate(rank)
        return sum(weight.local_nbytes(self.mesh, coordinate) for weight in self.weights)

    @property
    def state_bytes_per_device(self) -> int:
        """Bytes of states that each device holds, at most."""
        return sum(state.local_nbytes(self.mesh) for state in self.states)

    def communications(self) -> tuple[str, ...]:
        """All conversion steps and reduce functions of the stage, in execution order, as text."""
        steps = [text for operator in self.operators for text in operator.communication]
        return (*steps, *(step for conversion in self.output_conversions for step in conversion.steps))

    def tensors(self) -> StageTensors:
        """The properties of the stage's inputs and outputs for the check of a pipeline."""

        def seen(tensor: TensorPlan) -> StageTensor:
            parts = [self.mesh.group_size(axes) for axes in tensor.spec.mesh_axes_per_dim]
            split = tuple(dim for dim, number in enumerate(parts) if number > 1)
            return StageTensor(tensor.dtype, tensor.written or tensor.shape, not split, split)

        return StageTensors(self.mesh.size, tuple(map(seen, self.inputs)), tuple(map(seen, self.outputs)))

    def collectives(self) -> dict[str, int]:
        """Count the communication operators of each kind that one run executes; slices are local, and left out."""
        kinds = Counter(text.partition("(")[0] for text in self.communications())
        return {kind: count for kind, count in sorted(kinds.items()) if COLLECTIVES[kind].communicates}

    def names(self) -> list[str]:
        """List the names of the stage's operators and tensors, as :meth:`edit` takes them."""
        return list(self._parts())

    def _parts(self) -> dict[str, tuple[str, int]]:
        """Map the name of each part of the stage that can be edited to its field and position."""
        operators = {f"op:{op.index}": ("operators", n) for n, op in enumerate(self.operators)}
        parts = {f"y{n}": ("outputs", n) for n in range(len(self.outputs))}
        for kind in ("outputs", "states", "inputs", "weights"):
            tensors: tuple[TensorPlan, ...] = getattr(self, kind)
            parts.update({tensor.label: (kind, n) for n, tensor in enumerate(tensors) if tensor.label})
            if kind != "outputs":  # an output's name denotes the tensor in the spec in which its operator produces it
                parts.update({tensor.name: (kind, n) for n, tensor in enumerate(tensors)})
        return {**operators, **parts, **operators}  # operators come first, and labels cannot replace them

    def edit(self, changes: Mapping[str, Any]) -> StagePlan:
        """Replace specs by name, as :meth:`Plan.edit` does. Raises PlanError."""
        parts = self._parts()
        edited: dict[str, list[Any]] = {
            kind: list(getattr(self, kind)) for kind in ("operators", "outputs", "states", "inputs", "weights")
        }
        for name, value in changes.items():
            if name not in parts:
                raise PlanError(f"The plan has no {name!r}; it has {', '.join([*parts][:8])}, ...")
            kind, number = parts[name]
            expected = OpShardSpec if kind == "operators" else TensorShardSpec
            try:
                spec = expected.parse(value) if isinstance(value, str) else value
            except SpecError as error:
                raise PlanError(f"The new spec of {name}: {error}") from error
            if not isinstance(spec, expected):
                raise PlanError(f"The new spec of {name} must be a {expected.__name__} or its text; got {value!r}.")
            edited[kind][number] = replace(edited[kind][number], spec=spec)
        operators, weights, inputs, outputs, states = (
            tuple(edited[kind]) for kind in ("operators", "weights", "inputs", "outputs", "states")
        )
        return replace(
            self,
            operators=operators,
            weights=weights,
            inputs=inputs,
            outputs=outputs,
            states=states,
            overlap=None,
            report=None,
        )

    def check(self) -> None:
        """Check the specs of the stage against the mesh and the shapes, and the sizes.

        Raises
        ------
        PlanError
            When the stage fits no graph; the message names the part of the plan.
        """
        parts: list[tuple[str, OperatorPlan | TensorPlan | ConversionPlan]] = [
            *((f"operator {op.index}", op) for op in self.operators),
            *((tensor.name, tensor) for tensor in (*self.weights, *self.inputs, *self.outputs, *self.states)),
            *(("a graph output", conversion) for conversion in self.output_conversions),
        ]
        for what, part in parts:
            try:
                part.check(self.mesh)
            except SpecError as error:
                where = f"spec of {what}" if isinstance(part, TensorPlan) else what
                raise PlanError(f"The plan's {where} does not fit: {error}") from error
        for symbol in self.symbols:
            least, most = symbol.least, symbol.greatest
            fits = 1 <= symbol.multiple_of <= symbol.size <= most <= INT32_MAX and least <= most
            if symbol.size % symbol.multiple_of or not fits:
                raise PlanError(
                    f"The plan has the symbolic dim {symbol.name} of size {symbol.size}, which must be a multiple of "
                    f"{symbol.multiple_of} and at most {most}, and that at most {INT32_MAX} and at least {least}."
                )


@dataclass(frozen=True)
class Plan:
    """A list of stages on disjoint ranks.

    A plan of one stage covers a whole graph. Several stages form a pipeline.

    Attributes
    ----------
    stages: the plan of each stage.
    pipeline: the description of how the stages form one graph; None for one stage on the whole batch.
    """

    stages: tuple[StagePlan, ...]
    pipeline: Annotated[Pipeline | None, OMITTED] = None

    @property
    def seconds(self) -> float:
        """Predicted seconds of one run, one operator or collective after the other: the objective of the search.

        For a pipeline this is :meth:`Pipeline.call_seconds`.
        """
        return self._call_seconds([stage.seconds for stage in self.stages])

    @property
    def makespan_seconds(self) -> float:
        """Predicted seconds of one run, with overlap if the machine supports it."""
        return self._call_seconds([stage.makespan_seconds for stage in self.stages])

    @property
    def interval_seconds(self) -> float:
        """Predicted seconds between two consecutive runs; for a pipeline, between two micro-batches."""
        seconds = [stage.makespan_seconds for stage in self.stages]
        if self.pipeline is None:
            return self._call_seconds(seconds)
        return self.pipeline.micro_batches * self.pipeline.interval_seconds(seconds)

    def _call_seconds(self, seconds: list[float]) -> float:
        return math.fsum(seconds) if self.pipeline is None else self.pipeline.call_seconds(seconds)

    @property
    def param_specs(self) -> dict[str, TensorShardSpec]:
        """The spec of each weight, by the user's name, or else the plan's name: usable as pins for another graph.

        In a plan of several stages, a weight without a user's name is called ``1:w0``, with the number of its stage.
        """
        return {
            weight.label or self._qualified(number, weight.name): weight.spec
            for number, stage in enumerate(self.stages)
            for weight in stage.weights
        }

    def edit(self, changes: Mapping[str, Any]) -> Plan:
        """Replace specs; ``recost`` then derives the conversions and costs of the edited plan.

        Parameters
        ----------
        changes: mapping
            Specs, or their text, by name: ``op:7`` is an operator, ``w0`` (or the user's name) a weight, ``s0`` (or its
            name) a state, ``x0`` a graph input, ``y0`` a graph output. If several stages have a name, ``1:op:7`` is the
            one of stage 1.

        Raises
        ------
        PlanError
            For a name that no stage or several stages have, or a value of the wrong kind.
        """
        named: dict[str, list[tuple[int, str]]] = {}
        for number, stage in enumerate(self.stages):
            for name in stage.names():
                named.setdefault(name, []).append((number, name))
                if len(self.stages) > 1:
                    named.setdefault(f"{number}:{name}", []).append((number, name))
        changes_of: list[dict[str, Any]] = [{} for _ in self.stages]
        for name, value in changes.items():
            holders = named.get(name, [])
            if not holders:
                raise PlanError(f"The plan has no {name!r}; it has {', '.join([*named][:8])}, ...")
            if len(holders) > 1:
                stages = ", ".join(str(number) for number, _ in holders)
                raise PlanError(f"The stages {stages} have {name!r}; write {holders[0][0]}:{name} for the first one's.")
            number, own_name = holders[0]
            changes_of[number][own_name] = value
        changed = tuple(
            s.edit(stage_changes) if stage_changes else s
            for s, stage_changes in zip(self.stages, changes_of, strict=True)
        )
        pipeline = None if self.pipeline is None else replace(self.pipeline, search=None)
        return replace(self, stages=changed, pipeline=pipeline)

    def check_pipeline(self) -> None:
        """Check the pipeline. Raises PlanError if it contradicts itself or the stages, or several stages have none."""
        if self.pipeline is None:
            if len(self.stages) != 1:
                raise PlanError(
                    f"The plan has {len(self.stages)} stages and no pipeline that joins them. Give the stages in "
                    "optimization_config['stages'] instead, which makes one."
                )
            return
        for number, stage in enumerate(self.stages):
            if stage.symbols != self.stages[0].symbols:
                raise PlanError(
                    f"Stage {number} of the plan's pipeline has other symbolic dims than stage 0; all must be the same."
                )
        try:
            self.pipeline.check([stage.tensors() for stage in self.stages])
        except SpecError as error:
            raise PlanError(f"The plan's pipeline does not fit: {error}") from error

    def _qualified(self, number: int, name: str) -> str:
        """Return the name of a part of stage ``number`` in the whole plan."""
        return name if len(self.stages) == 1 else f"{number}:{name}"

    def explain(self) -> Explanation:
        """Explain each stage: the costs of its parts and, with a report of the search, the reasons of its choices.

        Raises
        ------
        PlanError
            When a part of the plan fits no graph, or a report belongs to another plan.
        """
        from hidet_dist.spec.explanation import Explanation

        return Explanation(self)

    def collectives(self) -> dict[str, int]:
        """Count the communication operators of each kind that one run executes; slices are local, and left out."""
        kinds = Counter[str]()
        for stage in self.stages:
            kinds.update(stage.collectives())
        return dict(sorted(kinds.items()))

    def table(self) -> Table:
        """Make a table for ``rich.print``, stage by stage: operators, specs, communication, predicted times, notes."""
        from rich.table import Table
        from rich.text import Text

        # As text, not markup: rich reads "[gpu=2]" as a style.
        table = Table(title=Text(f"Plan on {', '.join(str(stage.mesh) for stage in self.stages)}"))
        for column in ("#", "operator", "inputs", "outputs", "communication"):
            table.add_column(column, overflow="fold")  # narrow terminals wrap cells instead of cutting them
        table.add_column("cost [µs]", justify="right")
        for number, stage in enumerate(self.stages):
            if self.pipeline is not None:
                table.add_row(*self._stage_row(self.pipeline, number))
            for row in stage_rows(stage):
                table.add_row(
                    self._qualified(number, row.number) if row.number else "",
                    row.title,
                    row.in_specs,
                    row.out_specs,
                    "; ".join(row.communication),
                    microseconds(row.seconds),
                )
            for boundary in self.boundaries_from(number):
                table.add_row("", *boundary)
            table.add_section()
        return table

    def _stage_row(self, pipeline: Pipeline, number: int) -> tuple[str, ...]:
        """Describe a stage of a pipeline: its ranks, its mesh, its idle fraction (the bubble), and its busy µs."""
        periods = pipeline.period_seconds([stage.makespan_seconds for stage in self.stages])
        ranks = pipeline.stages[number].ranks
        idle = 1 - periods[number] / max(periods) if max(periods) else 0.0
        return (
            "",
            f"stage {number}",
            f"{'ranks' if len(ranks) > 1 else 'rank'} {'-'.join(map(str, dict.fromkeys((ranks[0], ranks[-1]))))}",
            str(self.stages[number].mesh),
            f"a micro-batch, idle {idle:.0%}",
            microseconds(periods[number]),
        )

    def boundaries_from(self, stage: int) -> list[tuple[str, str, str, str, str]]:
        """Describe the tensors that a stage of a pipeline sends: receivers, specs, bytes and microseconds."""
        if self.pipeline is None:
            return []
        rows = []
        for boundary in self.pipeline.boundaries:
            if boundary.source.stage != stage:
                continue
            readers = ", ".join(f"stage {reader.stage}" for reader in boundary.readers)
            arriving = [self.stages[reader.stage].inputs[reader.number].spec for reader in boundary.readers]
            rows.append(
                (
                    f"{boundary.tensor} to {readers}",
                    str(self.stages[stage].outputs[boundary.source.number].spec),
                    ", ".join(map(str, arriving)),
                    f"{boundary.nbytes} bytes",
                    microseconds(boundary.seconds),
                )
            )
        return rows

    def to_json(self) -> str:
        """Convert to JSON text; equal plans have equal text."""
        return json_text(encode_with_format(self, FORMAT), 4) + "\n"  # an operator a line

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Parse the text that :meth:`to_json` returns. Raises PlanError for any other text."""
        try:
            data = parse_json(text)
        except (TypeError, ValueError) as error:
            raise PlanError(f"Not a plan: {error}") from error
        try:
            fields = of_format(data, FORMAT)
        except SpecError as error:
            raise PlanError(f"Not a plan: {error}. Make it again with this version of hidet_dist.") from error
        try:
            plan = decode(cls, fields, "the plan")
        except (TypeError, ValueError) as error:
            raise PlanError(f"Not a plan: {error}") from error
        if not plan.stages:
            raise PlanError("Not a plan: it has no stage.")
        for stage in plan.stages:
            stage.check()
        plan.check_pipeline()
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file, atomically."""
        write_text(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that :meth:`save` wrote.

        Raises
        ------
        PlanError
            When the file is missing, is not a plan, or has more than ``MOST_PLAN_BYTES`` (:mod:`hidet_dist.limits`).
        """
        try:
            text = read_file(path, MOST_PLAN_BYTES)
        except (OSError, TypeError, ValueError) as error:
            raise PlanError(f"Cannot read the plan {path}: {error}") from error
        return cls.from_json(text)
