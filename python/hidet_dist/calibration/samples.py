"""Samples (measured times), and the JSON files in which ranks exchange them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hidet_dist.files import parse_json, write_text

ROWS = 30000
"""The rows of the table of the lookup probe."""


PASS_BYTES = tuple(2**exponent for exponent in range(20, 28))
"""The bytes read and written by the passes over memory in which a cache is looked for: 1 to 128 MiB."""


def pass_name(nbytes: int) -> str:
    """Return the name of the sample of a pass."""
    return f"pass {nbytes}"


@dataclass(frozen=True)
class KernelCalls:
    """A sequence of kernel calls to time: the bytes and dtype of each buffer, and the buffers of each call.

    A kernel is identified by the file of its library.
    """

    title: str
    buffers: list[tuple[int, str]]
    calls: list[tuple[str, list[int]]]


@dataclass(frozen=True)
class CollectiveSample:
    """The time of one collective over the mesh axes ``axes`` on a tensor of ``nbytes`` bytes per group."""

    kind: str
    axes: tuple[int, ...]
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class ProbeSample:
    """The time of one run of a probe program."""

    name: str
    seconds: float


def save_kernels(path: Path, kernels: Sequence[KernelCalls]) -> None:
    """Write kernels to be timed to a file, atomically."""
    write_text(path, json.dumps([asdict(probe) for probe in kernels]))


def load_kernels(path: Path) -> list[KernelCalls]:
    """Read the kernels that :func:`save_kernels` wrote."""
    return [KernelCalls(**probe) for probe in parse_json(path.read_text(encoding="utf-8"))]


def dump_samples(collectives: Sequence[CollectiveSample], probes: Sequence[ProbeSample]) -> str:
    """Convert one rank's samples to JSON."""
    return json.dumps(
        {"collectives": [asdict(sample) for sample in collectives], "probes": [asdict(sample) for sample in probes]}
    )


def load_slowest(paths: Sequence[Path]) -> tuple[list[CollectiveSample], list[ProbeSample]]:
    """Merge the samples of all ranks; each has the slowest rank's time, since a program waits for all ranks."""
    bodies = [parse_json(path.read_text(encoding="utf-8")) for path in paths]
    collectives = [
        CollectiveSample(same[0]["kind"], tuple(same[0]["axes"]), same[0]["nbytes"], max(s["seconds"] for s in same))
        for same in zip(*(body["collectives"] for body in bodies), strict=True)
    ]
    probes = [
        ProbeSample(same[0]["name"], max(sample["seconds"] for sample in same))
        for same in zip(*(body["probes"] for body in bodies), strict=True)
    ]
    return collectives, probes
