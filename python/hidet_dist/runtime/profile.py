"""Profiles of calls, operator by operator: as values, as a table, and as a Chrome trace.

Traces are in Chrome's trace event format (JSON object format, complete events), which chrome://tracing and Perfetto
display; each rank is shown as a process. In a pipeline, a second row of a rank shows its steps on each micro-batch. A
step that receives includes the wait for the other stage (the bubble). Times are those of the host's monotonic clock, so
traces of ranks on one host share a time axis.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hidet_dist.checks import is_finite, is_whole, shown
from hidet_dist.errors import HidetDistError
from hidet_dist.files import parse_json, read_text, write_text
from hidet_dist.limits import MOST_DEVICES, MOST_PLAN_BYTES, MOST_SECONDS

if TYPE_CHECKING:
    from rich.table import Table

COMPUTE, COMMUNICATION = "compute", "communication"
PROCESS_BYTES = "process bytes"
"""The key of ``Profile.process_bytes`` among the arguments of a trace's event of the call."""
_STEPS_ROW = 1  # the row of a rank's steps in a trace; row 0 has its operators
_MICROSECONDS = 1e6  # per second; a trace gives times in microseconds


@dataclass(frozen=True)
class OperatorTime:
    """The execution of one operator in a call.

    Attributes
    ----------
    number: its position in the order of execution.
    name: the name of the operator and of its kernel.
    kernel: the number of its kernel; identical operators share one.
    output: dtypes and shapes of its outputs, as text.
    communication: its collective and group, as text; empty for an operator that only computes.
    begin_seconds: its begin, in seconds from the begin of the call.
    seconds: its duration; for a collective, including the wait for the other ranks.
    """

    number: int
    name: str
    kernel: int
    output: str
    communication: str
    begin_seconds: float
    seconds: float

    @property
    def kind(self) -> str:
        """``compute`` or ``communication``."""
        return COMMUNICATION if self.communication else COMPUTE


@dataclass(frozen=True)
class PipelineStep:
    """A step of a rank of a pipeline in a call.

    Attributes
    ----------
    name: ``receive``, ``run`` or ``send`` for a step on one micro-batch, or ``results`` for the wait for the results of
        other stages, at the end of a call.
    micro_batch: the number of the micro-batch; None for ``results``.
    begin_seconds: from the beginning of the call.
    seconds: its duration. For ``receive`` that includes the wait for the other stage.
    nbytes: bytes received or sent, by the other rank.
    """

    name: str
    micro_batch: int | None
    begin_seconds: float
    seconds: float
    nbytes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """One call of a partition on one rank.

    Attributes
    ----------
    rank, world_size: the rank, and the number of ranks.
    begin_seconds: the begin of the call on the host's monotonic clock (``time.perf_counter``).
    call_seconds: the duration of the whole call, from checking the inputs to the finished outputs.
    operators: the operators, in the order of execution.
    stage: the number of the rank's stage in a pipeline; None without a pipeline.
    steps: the steps of the rank in a pipeline, in their order.
    process_bytes: by how much the process has grown in memory since the partition was about to be loaded: its weights
        and workspace, kernels, and what libraries allocate; None on a system that does not tell.
    """

    rank: int
    world_size: int
    begin_seconds: float
    call_seconds: float
    operators: tuple[OperatorTime, ...]
    stage: int | None = None
    steps: tuple[PipelineStep, ...] = ()
    process_bytes: int | None = None

    @property
    def compute_seconds(self) -> float:
        """Seconds of all operators that only compute."""
        return sum(operator.seconds for operator in self.operators if operator.kind == COMPUTE)

    @property
    def communication_seconds(self) -> float:
        """Seconds of all collectives, waiting included."""
        return sum(operator.seconds for operator in self.operators if operator.kind == COMMUNICATION)

    @property
    def busy_share(self) -> float:
        """The fraction of the call in which the rank computed. The rest is communication, waiting and overhead."""
        return self.compute_seconds / self.call_seconds

    @property
    def overhead_seconds(self) -> float:
        """Seconds of the call outside its operators: checking inputs, allocating outputs, launching kernels."""
        return self.call_seconds - self.compute_seconds - self.communication_seconds

    def table(self) -> Table:
        """Make a table for ``rich.print``: seconds by kernel, the longest first."""
        from rich.table import Table

        title = f"Rank {self.rank} of {self.world_size}: {1e3 * self.call_seconds:.3f} ms"
        table = Table("operator", "writes", "communicates", title=title)
        for heading in ("count", "ms", "fraction"):
            table.add_column(heading, justify="right")
        groups: dict[tuple[int, str], list[OperatorTime]] = {}
        for operator in self.operators:
            groups.setdefault((operator.kernel, operator.communication), []).append(operator)

        def row(name: str, output: str, communication: str, count: str, seconds: float) -> None:
            table.add_row(
                name, output, communication, count, f"{1e3 * seconds:.3f}", f"{seconds / self.call_seconds:.1%}"
            )

        for same in sorted(groups.values(), key=lambda same: -sum(one.seconds for one in same)):
            first = same[0]
            row(first.name, first.output, first.communication, str(len(same)), sum(one.seconds for one in same))
        table.add_section()
        counts = [sum(operator.kind == kind for operator in self.operators) for kind in (COMPUTE, COMMUNICATION)]
        row("all compute", "", "", str(counts[0]), self.compute_seconds)
        row("all communication", "", "", str(counts[1]), self.communication_seconds)
        row("overhead", "", "", "", self.overhead_seconds)
        if self.process_bytes is not None:
            table.caption = f"The process has grown by {self.process_bytes:,} bytes since it began to load."
        return table

    def chrome_trace(self) -> dict[str, Any]:
        """Return a Chrome trace of the call as a dict that ``json`` can write. Times are in microseconds."""
        begin = self.begin_seconds * _MICROSECONDS

        def event(
            name: str, category: str, start: float, seconds: float, details: dict[str, Any], row: int = 0
        ) -> dict[str, Any]:
            return {
                "name": name,
                "cat": category,
                "ph": "X",
                "pid": self.rank,
                "tid": row,
                "ts": begin + start * _MICROSECONDS,
                "dur": seconds * _MICROSECONDS,
                "args": details,
            }

        def label(name: str, value: dict[str, Any], row: int = 0) -> dict[str, Any]:
            return {"name": name, "ph": "M", "pid": self.rank, "tid": row, "args": value}

        stage = "" if self.stage is None else f", stage {self.stage}"
        memory = {} if self.process_bytes is None else {PROCESS_BYTES: self.process_bytes}
        events = [
            label("process_name", {"name": f"rank {self.rank} of {self.world_size}{stage}"}),
            label("process_sort_index", {"sort_index": self.rank}),
            label("thread_name", {"name": "kernels"}),
            event("call", "call", 0.0, self.call_seconds, memory),
        ]
        for operator in self.operators:
            details = {"number": operator.number, "kernel": operator.kernel, "writes": operator.output}
            if operator.communication:
                details["communicates"] = operator.communication
            events.append(event(operator.name, operator.kind, operator.begin_seconds, operator.seconds, details))
        if self.steps:
            events.append(label("thread_name", {"name": "micro-batches"}, _STEPS_ROW))
        for step in self.steps:
            name = step.name if step.micro_batch is None else f"{step.name} {step.micro_batch}"
            bytes_of = {f"bytes, rank {rank}": nbytes for rank, nbytes in step.nbytes.items()}
            events.append(event(name, "pipeline", step.begin_seconds, step.seconds, bytes_of, _STEPS_ROW))
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Write the Chrome trace to a file, completely or not at all."""
        write_text(Path(path), json.dumps(self.chrome_trace()) + "\n")


def merge_traces(traces: Iterable[str | Path | Profile], path: str | Path | None = None) -> dict[str, Any]:
    """Merge the traces of several ranks into one, with times counted from the earliest event.

    Parameters
    ----------
    traces: iterable of path or Profile
        Profiles, or files that :meth:`Profile.save` wrote.
    path: str or Path, optional
        The file to write the merged trace to, as JSON.

    Raises
    ------
    HidetDistError
        When no traces are given, a file is not such a trace, or two traces are of one rank.
    """
    parts = [(str(trace), _events(trace)) for trace in traces]
    if not parts:
        raise HidetDistError("merge_traces got no traces: give one of each rank.")
    ranks: dict[int, str] = {}
    for name, events in parts:
        for rank in {event["pid"] for event in events}:
            if rank in ranks:
                raise HidetDistError(f"{ranks[rank]} and {name} are both traces of rank {rank}: give one of each rank.")
            ranks[rank] = name
    first = min((event["ts"] for _, events in parts for event in events if "ts" in event), default=0.0)
    merged = [
        {**event, "ts": event["ts"] - first} if "ts" in event else event for _, events in parts for event in events
    ]
    trace = {"traceEvents": merged, "displayTimeUnit": "ms"}
    if path is not None:
        write_text(Path(path), json.dumps(trace) + "\n")
    return trace


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Read the events of a trace that ``Profile.save`` or :func:`merge_traces` wrote.

    Raises
    ------
    OSError
        When it cannot be read.
    ValueError
        When it is not such a trace; the message says what is wrong with which event.
    """
    try:
        data = parse_json(read_text(path, MOST_PLAN_BYTES))
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(events, list):
        raise ValueError("it is not an object with a list 'traceEvents'")
    for number, event in enumerate(events):
        if not isinstance(event, dict):
            raise ValueError(f"event {number} is {shown(event)}, not an object")
        is_span = event.get("ph") == "X"
        for key, (what, is_right) in {**_FIELDS, **(_FIELDS_OF_SPANS if is_span else {})}.items():
            if not is_right(event.get(key)):
                given = f"has the {key} {shown(event[key])}" if key in event else f"has no {key}"
                raise ValueError(f"event {number} {given}, which must be {what}")
    return events


def _is_time(value: Any) -> bool:
    return is_finite(value) and abs(value) <= MOST_SECONDS * _MICROSECONDS


_Field = tuple[str, Callable[[Any], bool]]
_FIELDS: Mapping[str, _Field] = {
    "ph": ("text", lambda value: isinstance(value, str)),
    "pid": (f"a rank from 0 to {MOST_DEVICES}", lambda value: is_whole(value, 0, MOST_DEVICES)),
    "ts": ("a number of microseconds", lambda value: value is None or _is_time(value)),
    "args": ("an object", lambda value: value is None or isinstance(value, dict)),
}
_FIELDS_OF_SPANS: Mapping[str, _Field] = {
    "ts": ("a number of microseconds", _is_time),
    "dur": ("a number of microseconds from 0 on", lambda value: _is_time(value) and value >= 0),
    "name": ("text", lambda value: isinstance(value, str)),
    "cat": ("text", lambda value: isinstance(value, str)),
}


def _events(trace: str | Path | Profile) -> Sequence[dict[str, Any]]:
    if isinstance(trace, Profile):
        events: Sequence[dict[str, Any]] = trace.chrome_trace()["traceEvents"]
        return events
    try:
        return read_events(trace)
    except (OSError, ValueError) as error:
        raise HidetDistError(f"{trace} is not a trace of a rank: {error}.") from error
