"""What is measured, and the form in which ranks write it down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hidet_dist.files import write_text

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

ROWS = 30000
"""Of the table that a kernel looks up: integers that it reads are below it."""


@dataclass(frozen=True)
class KernelCalls:
    """Kernels that are timed: the bytes and the dtype of each buffer, and which kernel gets which buffers, in order.

    A kernel is the file of its library.
    """

    title: str
    buffers: list[tuple[int, str]]
    calls: list[tuple[str, list[int]]]


@dataclass(frozen=True)
class CollectiveSample:
    """The time of one collective over the group of ``axes``; ``nbytes`` are those of the tensor whole in the group."""

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
    """Write kernels to be timed, whole or not at all."""
    write_text(path, json.dumps([asdict(probe) for probe in kernels]))


def load_kernels(path: Path) -> list[KernelCalls]:
    """What :func:`save_kernels` wrote."""
    return [KernelCalls(**probe) for probe in json.loads(path.read_text(encoding="utf-8"))]


def save_samples(path: Path, collectives: Sequence[CollectiveSample], probes: Sequence[ProbeSample]) -> None:
    """Write one rank's samples, whole or not at all."""
    body = {"collectives": [asdict(sample) for sample in collectives], "probes": [asdict(sample) for sample in probes]}
    write_text(path, json.dumps(body))


def load_slowest(paths: Sequence[Path]) -> tuple[list[CollectiveSample], list[ProbeSample]]:
    """The samples of all ranks, each with the time of the slowest: a program goes on when all are done."""
    bodies = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    collectives = [
        CollectiveSample(own[0]["kind"], tuple(own[0]["axes"]), own[0]["nbytes"], max(s["seconds"] for s in own))
        for own in zip(*(body["collectives"] for body in bodies), strict=True)
    ]
    probes = [
        ProbeSample(own[0]["name"], max(sample["seconds"] for sample in own))
        for own in zip(*(body["probes"] for body in bodies), strict=True)
    ]
    return collectives, probes
