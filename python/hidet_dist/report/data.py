"""The data of a report as plain values, from which a page draws a plan without the graph or the machine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, get_type_hints

from hidet_dist.codec import OMITTED, Signed, decode, encode_with_format, of_format
from hidet_dist.errors import PlanError, SpecError
from hidet_dist.files import parse_json, read_text, write_text
from hidet_dist.limits import MOST_PLAN_BYTES
from hidet_dist.spec.report import Holding, RunnerUp, SearchCourse

FORMAT = 1
FILE = "report.json"
"""The file of a report's data in an artifact folder; with several stages, it is in each stage's folder."""
SUFFIX = ".report.json"
"""The suffix of a report's data beside a plan file: the report of ``plan.json`` is ``plan.report.json``."""

WEIGHT, INPUT, STATE, ACTIVATION = "weight", "input", "state", "activation"
COMPUTE, COMMUNICATION = "compute", "communication"
CONVERT, REDUCE, DELIVER = "convert", "reduce", "deliver"


def report_beside(plan: Path, stage: int, stages: int) -> Path:
    """Return the path of the report on a stage beside a plan file; with several stages its number is in the name."""
    number = "" if stages == 1 else f".stage{stage}"
    return plan.with_name(plan.name.removesuffix(".json") + number + SUFFIX)


def report_file(stage: int, stages: int) -> str:
    """Return the path in an artifact folder of the report on a stage."""
    return FILE if stages == 1 else f"stage{stage}/{FILE}"


@dataclass(frozen=True)
class Column:
    """The annotation of a field that is a column of the page's table of its class.

    Attributes
    ----------
    title: the heading.
    form: how values are shown, one of the forms in ``page/tables.js``: ``text``, ``code``, ``count``, ``bytes`` or
        ``time``.
    """

    title: str
    form: str


@dataclass(frozen=True)
class Tensor:
    """A tensor of the graph.

    Attributes
    ----------
    name: the name in the plan, such as ``w0``, ``x0`` or ``t5.0``.
    label: the user's name; empty if there is none.
    kind: ``weight``, ``input`` or ``activation``.
    shape, dtype, nbytes: the shape, dtype and bytes of the whole tensor.
    written: the shape with the names of symbolic dims.
    spec: the spec in which the tensor is stored or computed.
    shard_shape, shard_nbytes: the shape and bytes of a shard, padding included.
    module: the path of the module that the tensor belongs to.
    alternatives: the other specs of a weight, with the costs of plans that use them.
    """

    name: str
    label: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    spec: str
    shard_shape: tuple[int, ...]
    shard_nbytes: int
    module: str = ""
    written: tuple[int | str, ...] = ()
    alternatives: tuple[RunnerUp, ...] = ()


@dataclass(frozen=True)
class Operator:
    """An operator of the graph; ``inputs`` and ``outputs`` are names of tensors.

    ``conversion_seconds`` is the time of the conversions of which this operator is the first consumer.
    """

    index: int
    kind: str
    label: str
    module: Annotated[str, Column("module", "text")]
    spec: Annotated[str, Column("spec", "code")]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    compute_seconds: Annotated[float, Column("kernel", "time")]
    reduce_seconds: float
    conversion_seconds: float
    note: str = ""
    runner_up: RunnerUp | None = None


def columns_of(kind: type) -> list[tuple[str, str, str]]:
    """List the fields of a class that are columns of its table: name, heading and form."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        (name, mark.title, mark.form)
        for name, hint in hints.items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, Column)
    ]


@dataclass(frozen=True)
class AvoidingChange:
    """The cheapest known spec of an operator or a tensor that avoids a collective.

    ``changed`` names the operator or the tensor. ``at_least_seconds`` is a lower bound of the time of all plans with
    the spec; None if unknown. ``alone_seconds`` is the time of the plan with only this change.
    """

    changed: str
    spec: str
    at_least_seconds: Signed | None
    alone_seconds: Signed


@dataclass(frozen=True)
class Communication:
    """A collective of the plan, in execution order.

    Attributes
    ----------
    operator: the number of the operator that needs it; None for a graph output.
    tensor: the communicated tensor.
    module: the path of the module that the operator belongs to.
    purpose: ``reduce`` for an operator's partial result, ``convert`` for an operator's input, ``deliver`` for a
        graph output.
    kind, step: the kind of collective, and the whole step as text.
    source, target: the specs before and after the step.
    devices: the number of devices in each group.
    nbytes: the bytes of the tensor that a group holds together.
    seconds: the predicted time, including packing and unpacking.
    hidden_seconds: the part of the time that overlaps with computation.
    why: the reason for the collective, in sentences.
    without: the cheapest known change that avoids the collective; None if there is none, or none is known.
    """

    operator: int | None
    tensor: str
    module: str
    purpose: str
    kind: str
    step: str
    source: str
    target: str
    devices: int
    nbytes: int
    seconds: float
    hidden_seconds: float
    why: str
    without: AvoidingChange | None = None


@dataclass(frozen=True)
class RankMemory:
    """The most bytes that the device of a rank holds, and its budget."""

    peak_bytes: int
    budget_bytes: int


@dataclass(frozen=True)
class MemoryUse:
    """The memory of a device: its budget, the bytes at each program point, and the tensors that it holds.

    Where parts are unequal, it is the device at the coordinate ``device``, which has the least room left, and ``ranks``
    has the peak and the budget of each rank's device, in bytes. Otherwise both are empty.

    Operator i has ``points_per_operator`` program points, the first one at ``i * points_per_operator``: the conversion
    of its inputs, its run, and the reduction of its partial results. At the last point graph outputs are delivered.
    """

    budget_bytes: int
    points_per_operator: int
    held_bytes: tuple[int, ...]
    holdings: tuple[Holding, ...]
    device: Annotated[tuple[int, ...], OMITTED] = ()
    ranks: Annotated[tuple[RankMemory, ...], OMITTED] = ()

    @property
    def peak(self) -> int:
        """The first program point at which the memory peaks."""
        return self.held_bytes.index(max(self.held_bytes))

    def peak_bytes_of(self, rank: int) -> int:
        """Return the most bytes that the device of a rank holds."""
        return self.ranks[rank].peak_bytes if self.ranks else self.held_bytes[self.peak]

    def budget_of(self, rank: int) -> int:
        """Return the budget of the device of a rank, in bytes."""
        return self.ranks[rank].budget_bytes if self.ranks else self.budget_bytes


@dataclass(frozen=True)
class Span:
    """A kernel, copy or collective on the predicted timeline: its operator (None for graph outputs) and times.

    ``stream`` is ``compute`` or ``communication``; ``what`` describes a collective or a copy, and is empty for kernels.
    """

    stream: str
    operator: int | None
    what: str
    begin_seconds: float
    seconds: float


@dataclass(frozen=True)
class Variant:
    """Layers with equal plans that differ from those of most layers of their family, and the differences."""

    members: tuple[int, ...]
    differences: tuple[str, ...]


@dataclass(frozen=True)
class LayerFamily:
    """Modules whose paths differ only in a number, such as ``layers.0`` to ``layers.31``.

    Attributes
    ----------
    prefix: the path before the number, such as ``layers``.
    members: the numbers of all layers.
    usual: the largest group of layers with equal plans.
    variants: the other layers.
    """

    prefix: str
    members: tuple[int, ...]
    usual: tuple[int, ...]
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class MachineFigures:
    """The machine for which costs are predicted; links are listed by mesh axis."""

    device: str
    memory_bytes: int
    link_bytes_per_second: tuple[float, ...]
    link_latency_seconds: tuple[float, ...]
    overlaps_communication: bool


@dataclass(frozen=True)
class Report:
    """The data of a report.

    Attributes
    ----------
    title: the name of the model.
    mesh_shape, mesh_axes: the size and the name of each mesh axis.
    fingerprint: the fingerprint of the graph.
    seconds: the predicted time of a run without overlap.
    makespan_seconds: the predicted time of a run with overlap.
    overlapped_bytes: the peak memory of a device with overlap; None without overlap.
    outputs: the names of the graph outputs.
    collectives: the number of collectives of each kind.
    search: the course of the search; None if the plan was not searched.
    origin: the options of ``hidet-dist plan``, by name; empty for plans made in another way.
    mesh_shares: the shares of uneven mesh axes (:class:`hidet_dist.spec.DeviceMesh`); empty for an even mesh. With
        shares, shapes and bytes of shards are those of the largest ones.
    """

    title: str
    mesh_shape: tuple[int, ...]
    mesh_axes: tuple[str, ...]
    machine: MachineFigures
    fingerprint: str
    seconds: float
    makespan_seconds: float
    overlapped_bytes: int | None
    outputs: tuple[str, ...]
    collectives: dict[str, int]
    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    communications: tuple[Communication, ...]
    memory: MemoryUse
    timeline: tuple[Span, ...]
    families: tuple[LayerFamily, ...]
    search: SearchCourse | None = None
    origin: dict[str, str] = field(default_factory=dict)
    mesh_shares: Annotated[tuple[tuple[int, ...], ...], OMITTED] = ()

    def to_json(self) -> str:
        """Convert to JSON text; equal reports have equal text. Those of an even mesh have no shares."""
        return json.dumps(encode_with_format(self, FORMAT), separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Parse the text of :meth:`to_json`. Raises PlanError for anything else."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise PlanError(f"The data of the report is malformed: {error}") from error
        try:
            fields = of_format(data, FORMAT)
        except SpecError as error:
            raise PlanError(f"Not a report: {error}. Write it again with this version of hidet_dist.") from error
        try:
            report = decode(cls, fields, "the report")
        except SpecError as error:
            raise PlanError(f"The data of the report is malformed: {error}") from error
        report.check()
        return report

    def check(self) -> None:
        """Refuse data whose parts contradict each other. Raises PlanError."""
        points = self.memory.points_per_operator * len(self.operators) + 1
        tensors = {tensor.name for tensor in self.tensors}
        numbers = [operator.index for operator in self.operators]
        places = [part.operator for part in self.communications] + [part.operator for part in self.timeline]
        named = [name for operator in self.operators for name in (*operator.inputs, *operator.outputs)]
        named += [part.tensor for part in self.communications] + [part.tensor for part in self.memory.holdings]
        if (
            not self._has_mesh()
            or numbers != list(range(len(numbers)))
            or len(self.memory.held_bytes) != points
            or not all(0 <= part.begin <= part.end < points for part in self.memory.holdings)
            or not all(place is None or 0 <= place < len(numbers) for place in places)
            or not tensors.issuperset((*named, *self.outputs))
        ):
            raise PlanError("The data of the report contradicts itself; write it again from the plan and its model.")

    def _has_mesh(self) -> bool:
        """Tell whether the fields of the mesh fit each other."""
        axes = len(self.mesh_shape)
        return (
            axes > 0
            and min(self.mesh_shape) >= 1
            and len(self.mesh_axes) == axes
            and len(self.mesh_shares) in (0, axes)
        )

    def save(self, path: str | Path) -> None:
        """Write the report to a JSON file, atomically."""
        write_text(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path, stage: int = 0) -> Report:
        """Read the report of an artifact folder, of a plan file with a report beside it, or of a report file.

        ``stage`` is the number of the stage, if the artifacts or the plan have several.

        Raises
        ------
        PlanError
            When there is no report of that stage, or it is malformed.
        """
        requested = Path(path)
        file = requested
        if requested.is_dir():
            file = requested / report_file(stage, 2)
            if stage == 0 and not file.is_file():
                file = requested / FILE
        if file.name != FILE and not file.name.endswith(SUFFIX):
            file = report_beside(requested, stage, 2)
            if stage == 0 and not file.is_file():
                file = report_beside(requested, stage, 1)
        try:
            text = read_text(file, MOST_PLAN_BYTES)
        except FileNotFoundError as error:
            raise PlanError(
                f"There is no report of {requested}: {file} is missing. `hidet-dist plan --out` writes a plan with its "
                "report, `hidet-dist build` artifacts with theirs."
            ) from error
        except (OSError, ValueError) as error:
            raise PlanError(f"Cannot read the report {file}: {error}") from error
        return cls.from_json(text)
