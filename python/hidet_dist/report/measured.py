"""Measured runs of a plan, read from Chrome traces of profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hidet_dist.checks import is_whole, shown
from hidet_dist.errors import PlanError
from hidet_dist.limits import MOST_BYTES
from hidet_dist.report.data import COMMUNICATION, COMPUTE
from hidet_dist.runtime.profile import PROCESS_BYTES, read_events

_MICROSECONDS = 1e6  # in a second: the unit of times in a trace
_MOST_NAME = 200


@dataclass(frozen=True)
class MeasuredSpan:
    """A measured kernel or collective: its stream and name, its communication (empty if there is none), its times."""

    stream: str
    name: str
    what: str
    begin_seconds: float
    seconds: float


@dataclass(frozen=True)
class Trace:
    """One call on one rank; times count from its first event.

    ``process_bytes`` is by how much the process had grown in memory since it began to load; None if it is not known.
    """

    rank: int
    seconds: float
    spans: tuple[MeasuredSpan, ...]
    process_bytes: int | None = None


def read_traces(paths: Sequence[str | Path]) -> list[Trace]:
    """Read files that ``Profile.save`` or ``merge_traces`` wrote; return one trace per rank, in order of the ranks.

    Raises
    ------
    PlanError
        When a file is not such a trace, or two traces are of the same rank.
    """
    by_rank: dict[int, Trace] = {}
    for path in paths:
        try:
            traces = _traces(read_events(path))
        except (OSError, ValueError) as error:
            raise PlanError(f"{path} is not a trace of a profile: {error}.") from error
        for trace in traces:
            if trace.rank in by_rank:
                raise PlanError(f"{path} has a second trace of rank {trace.rank}; give one of each rank.")
            by_rank[trace.rank] = trace
    return [by_rank[rank] for rank in sorted(by_rank)]


def _traces(events: list[dict[str, Any]]) -> list[Trace]:
    ranks: dict[int, list[MeasuredSpan]] = {}
    calls: dict[int, tuple[float, float]] = {}
    grown: dict[int, int] = {}
    for event in events:
        if event["ph"] != "X":
            continue
        rank, begin, lasts = (event[key] for key in ("pid", "ts", "dur"))
        begin, seconds = begin / _MICROSECONDS, lasts / _MICROSECONDS
        if event["cat"] == "call":
            calls[rank] = begin, seconds
            nbytes = (event.get("args") or {}).get(PROCESS_BYTES)
            if nbytes is not None:
                if not is_whole(nbytes, -MOST_BYTES, MOST_BYTES):
                    raise ValueError(f"rank {rank} grew by {shown(nbytes)} bytes")
                grown[rank] = nbytes
        elif event["cat"] in (COMPUTE, COMMUNICATION):
            what = (event.get("args") or {}).get("communicates", "")
            name = event["name"][:_MOST_NAME]
            ranks.setdefault(rank, []).append(MeasuredSpan(event["cat"], name, str(what)[:_MOST_NAME], begin, seconds))
    if not ranks:
        raise ValueError("it has no events of kernels")
    result = []
    for rank, spans in ranks.items():
        end = max(span.begin_seconds + span.seconds for span in spans)
        begin = min(span.begin_seconds for span in spans)
        begin, seconds = calls.get(rank, (begin, end - begin))
        ordered = sorted(spans, key=lambda span: span.begin_seconds)
        shifted = tuple(
            MeasuredSpan(span.stream, span.name, span.what, span.begin_seconds - begin, span.seconds)
            for span in ordered
        )
        result.append(Trace(rank, seconds, shifted, grown.get(rank)))
    return result
