"""The data of a report, as plain values: what a page needs to draw a plan, without the graph or the machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hidet_dist.errors import PlanError, SpecError
from hidet_dist.files import parse_json, read_text, write_text
from hidet_dist.limits import MOST_PLAN_BYTES
from hidet_dist.report.decode import decode
from hidet_dist.spec.report import RunnerUp

FORMAT = 1
FILE = "report.json"
"""The name of a report's data in an artifact folder; that of one of several stages is in the stage's folder."""
SUFFIX = ".report.json"
"""What the name of a report's data ends in, which lies beside a plan file: that of ``plan.json`` is
``plan.report.json``."""

WEIGHT, INPUT, ACTIVATION = "weight", "input", "activation"
COMPUTE, COMMUNICATION = "compute", "communication"
CONVERT, REDUCE, DELIVER = "convert", "reduce", "deliver"


def report_file(stage: int, stages: int) -> str:
    """The path in an artifact folder of the report on a stage."""
    return FILE if stages == 1 else f"stage{stage}/{FILE}"


@dataclass(frozen=True)
class Tensor:
    """A tensor of the graph.

    Attributes
    ----------
    name: its name in the plan, such as ``w0``, ``x0`` or ``t5.0``.
    label: the user's name of it, empty if there is none.
    kind: ``weight``, ``input`` or ``activation``.
    shape, dtype, nbytes: of the whole tensor; ``written`` is the shape with the names of symbolic dims.
    spec: as it is stored, or made.
    shard_shape, shard_nbytes: of what a device holds, padding included.
    module: the path of the module that it belongs to.
    alternatives: the other specs of a weight, and what plans with them cost.
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
    """An operator of the graph; ``inputs`` and ``outputs`` are names of tensors, times are seconds.

    ``conversion_seconds`` are those of its inputs' conversions as far as this operator is the first to need them.
    """

    index: int
    kind: str
    label: str
    module: str
    spec: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    compute_seconds: float
    reduce_seconds: float
    conversion_seconds: float
    note: str = ""
    runner_up: RunnerUp | None = None


@dataclass(frozen=True)
class Saving:
    """The cheapest way known to do without a collective: another spec for an operator or a tensor.

    ``at_least_seconds`` is a lower bound of all plans with it, None if unknown; ``alone_seconds`` are those of the plan
    with this change and no other.
    """

    changed: str
    spec: str
    at_least_seconds: float | None
    alone_seconds: float


@dataclass(frozen=True)
class Communication:
    """A collective of the plan, in execution order.

    Attributes
    ----------
    operator: where it is; None for a graph output.
    tensor: what is communicated.
    module: the path of the module that it belongs to.
    purpose: ``reduce`` for an operator's partial result, ``convert`` for what an operator reads, ``deliver`` for a
        graph output.
    kind, step: the kind of collective, and the whole step as text.
    source, target: the specs before and after the step.
    devices: of each group.
    nbytes: of the tensor that is whole within its group.
    seconds: predicted, with the copies around it; ``hidden_seconds`` of them run beside computation.
    why: the reason for it, as sentences.
    without: the next best: what a plan without it would cost. None if there is no such plan, or nothing is known.
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
    without: Saving | None = None


@dataclass(frozen=True)
class Holding:
    """Bytes that a device holds from program point ``begin`` to ``end`` (included), and what they are of a tensor.

    ``what`` is ``weight``, ``input``, ``output``, ``activation``, ``converted`` or ``buffer``.
    """

    tensor: str
    what: str
    begin: int
    end: int
    nbytes: int


@dataclass(frozen=True)
class Memory:
    """The memory of a device: its budget, the bytes at each program point, and what they are made of.

    Operator i has ``points_per_operator`` points from ``i * points_per_operator``: its inputs are converted, it runs,
    its partial results are reduced. The last point is for the graph outputs.
    """

    budget_bytes: int
    points_per_operator: int
    held_bytes: tuple[int, ...]
    holdings: tuple[Holding, ...]

    @property
    def peak(self) -> int:
        """The first point at which most is held."""
        return self.held_bytes.index(max(self.held_bytes))


@dataclass(frozen=True)
class Span:
    """A kernel, copy or collective on the predicted timeline: its operator (None for graph outputs) and times.

    ``stream`` is ``compute`` or ``communication``; ``what`` names a collective's or a copy's tensor, else is empty.
    """

    stream: str
    operator: int | None
    what: str
    begin_seconds: float
    seconds: float


@dataclass(frozen=True)
class Incumbent:
    """The best plan known at a point of the search, and the bound then; elapsed seconds where they are known."""

    seconds: float
    bound_seconds: float
    elapsed_seconds: float | None = None


@dataclass(frozen=True)
class Search:
    """How the search came to the plan; see :class:`hidet_dist.spec.report.SearchReport`."""

    mode: str
    bound_seconds: float
    gap: float
    time_limit_reached: bool
    incumbents: tuple[Incumbent, ...]


@dataclass(frozen=True)
class Variant:
    """Layers that are planned alike, but not as most of their family, and how they differ from those."""

    members: tuple[int, ...]
    differences: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """Modules that differ in a number only, such as ``layers.0`` to ``layers.31``.

    Attributes
    ----------
    prefix: what stands before the number, such as ``layers``.
    members: the numbers.
    usual: the members that are planned alike, the largest such group.
    variants: the others.
    """

    prefix: str
    members: tuple[int, ...]
    usual: tuple[int, ...]
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class Machine:
    """The machine that costs are predicted for; a link for each mesh axis."""

    device: str
    memory_bytes: int
    link_bytes_per_second: tuple[float, ...]
    link_latency_seconds: tuple[float, ...]
    overlaps_communication: bool


@dataclass(frozen=True)
class Report:
    """Everything that a report shows.

    Attributes
    ----------
    title: what is planned.
    mesh_shape, mesh_axes: devices along each mesh axis, and its name.
    fingerprint: of the graph.
    seconds: predicted for one run, one operator or collective after the other; ``makespan_seconds`` with communication
        beside computation.
    overlapped_bytes: what a device holds at most where communication runs beside computation; None where it does not.
    collectives: how many there are of each kind.
    search: None where the plan was not searched.
    origin: the options that ``hidet-dist plan`` was given, by name; empty where the plan was made otherwise.
    """

    title: str
    mesh_shape: tuple[int, ...]
    mesh_axes: tuple[str, ...]
    machine: Machine
    fingerprint: str
    seconds: float
    makespan_seconds: float
    overlapped_bytes: int | None
    outputs: tuple[str, ...]
    collectives: dict[str, int]
    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    communications: tuple[Communication, ...]
    memory: Memory
    timeline: tuple[Span, ...]
    families: tuple[Family, ...]
    search: Search | None = None
    origin: dict[str, str] = field(default_factory=dict)

    def to_data(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {"format": FORMAT, **asdict(self)}

    def to_json(self) -> str:
        """The report as JSON text, the same for the same report."""
        return json.dumps(self.to_data(), separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that :meth:`to_json` wrote. Raises PlanError for anything else."""
        try:
            data = parse_json(text)
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise SpecError(f"it is not of format {FORMAT}; make it again with this version of hidet_dist")
            report = decode(cls, data, "the report")
        except (SpecError, ValueError) as error:
            raise PlanError(f"Not the data of a report: {error}") from error
        report.check()
        return report

    def check(self) -> None:
        """Refuse data whose parts contradict each other. Raises PlanError."""
        points = self.memory.points_per_operator * len(self.operators) + 1
        tensors = {tensor.name for tensor in self.tensors}
        numbers = [operator.index for operator in self.operators]
        places = [one.operator for one in self.communications] + [one.operator for one in self.timeline]
        named = [name for operator in self.operators for name in (*operator.inputs, *operator.outputs)]
        named += [one.tensor for one in self.communications] + [one.tensor for one in self.memory.holdings]
        if (
            not self.mesh_shape
            or min(self.mesh_shape) < 1
            or len(self.mesh_axes) != len(self.mesh_shape)
            or numbers != list(range(len(numbers)))
            or len(self.memory.held_bytes) != points
            or not all(0 <= one.begin <= one.end < points for one in self.memory.holdings)
            or not all(place is None or 0 <= place < len(numbers) for place in places)
            or not tensors.issuperset((*named, *self.outputs))
        ):
            raise PlanError("The data of the report contradicts itself; make it again from the plan and its model.")

    def save(self, path: str | Path) -> None:
        """Write the report to a JSON file, whole or not at all."""
        write_text(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path, stage: int = 0) -> Report:
        """Read the report of an artifact folder, of a plan file with a report beside it, or of its own file.

        ``stage`` is the number of the stage, where an artifact folder has several.

        Raises
        ------
        PlanError
            When there is none, or it is malformed.
        """
        given = Path(path)
        place = given
        if given.is_dir():
            place = next((own for own in (given / report_file(stage, 2), given / FILE) if own.is_file()), given / FILE)
        if place.name != FILE and not place.name.endswith(SUFFIX):
            place = place.with_name(place.name.removesuffix(".json") + SUFFIX)
        try:
            text = read_text(place, MOST_PLAN_BYTES)
        except FileNotFoundError as error:
            raise PlanError(
                f"There is no report of {given}: {place} is missing. `hidet-dist plan --out` writes a plan with it, "
                "`hidet-dist build` artifacts."
            ) from error
        except (OSError, ValueError) as error:
            raise PlanError(f"Cannot read the report {place}: {error}") from error
        return cls.from_json(text)
