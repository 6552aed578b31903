"""The choice of a candidate for each kernel: timed once on the device, and remembered beside the artifacts.

A kernel that was built with a search space has several candidates, which compute the same function. The fastest one
depends on the device, so candidates are timed where the program runs, when it is first loaded there. The choice is
written into the artifact folder or, where that is read-only, into the user's cache. There is one file per kind of
device and build of the artifacts, so a choice is never used on another device or for another build.

Candidates may round differently. All ranks must therefore run the same ones, or replicated tensors would differ between
ranks. So every rank times all candidates, a candidate's time is its longest on any rank, and a remembered choice is
read on one rank.

A candidate of a matrix product may call cuBLAS. Where a rank has no cuBLAS, or versions differ, no rank runs it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hidet_dist.errors import HidetDistError
from hidet_dist.files import parse_json, write_text

FORMAT = 2
FOLDER = "choices"

Timer = Callable[[int, int], float]
"""Given the number of a kernel and of a candidate, returns its seconds; infinity, or an exception, if it cannot run."""


def user_cache() -> Path:
    """Return the folder for choices when the artifact folder is read-only, in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hidet_dist"


@dataclass(frozen=True)
class Choices:
    """The choices for one build of artifacts on one kind of device.

    Attributes
    ----------
    folder: the artifact folder.
    artifact: the identity of the build: the manifest's checksum.
    device: the device's name, as its driver reports it.
    candidates: the number of candidates of each kernel.
    usable: the number of them that can run on this device, always the first ones; all by default.
    cublas: the version of cuBLAS that they call, or 0.
    reason: why not all of them can run, for error messages.
    """

    folder: Path
    artifact: str
    device: str
    candidates: tuple[int, ...]
    usable: tuple[int, ...] = ()
    cublas: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        if not self.usable:
            object.__setattr__(self, "usable", self.candidates)
        for kernel, usable in enumerate(self.usable):
            if usable == 0:
                raise self._no_candidate(kernel)

    @property
    def is_needed(self) -> bool:
        """True if a kernel has several candidates."""
        return any(count > 1 for count in self.usable)

    def get(self, time: Timer) -> tuple[int, ...]:
        """Choose the candidate of each kernel: the remembered one, or the fastest by times taken now and remembered.

        Raises
        ------
        HidetDistError
            When no candidate of a kernel runs.
        """
        chosen = self.remembered()
        if chosen is None:
            times = self.times(time)
            chosen = self.fastest(times)
            self.remember(chosen, times)
        return chosen

    def remembered(self) -> tuple[int, ...] | None:
        """Read the remembered choice; None if there is none, or its file is unreadable or does not fit."""
        for path in self._paths():
            try:
                body = parse_json(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if isinstance(body, dict) and self._key().items() <= body.items() and self._fit(body.get("chosen")):
                return tuple(body["chosen"])
        return None

    def times(self, time: Timer) -> list[float]:
        """Time all usable candidates of kernels that have several; return their seconds, kernel after kernel."""
        return [_seconds(time, kernel, candidate) for kernel, candidate in self._timed()]

    def fastest(self, times: Sequence[float]) -> tuple[int, ...]:
        """Select the fastest candidate of each kernel by the results of :meth:`times`; the first of equally fast ones.

        Raises
        ------
        HidetDistError
            When no candidate of a kernel runs.
        """
        best: dict[int, tuple[float, int]] = {}
        for (kernel, candidate), seconds in zip(self._timed(), times, strict=True):
            best[kernel] = min(best.get(kernel, (math.inf, candidate)), (seconds, candidate))
        for kernel, (seconds, _) in best.items():
            if math.isinf(seconds):
                raise self._no_candidate(kernel)
        return tuple(best[kernel][1] if kernel in best else 0 for kernel in range(len(self.candidates)))

    def remember(self, chosen: Sequence[int], times: Sequence[float]) -> None:
        """Save a choice with the times behind it. Does nothing where neither folder can be written to."""
        seconds: dict[str, list[float | None]] = {}
        for (kernel, _), candidate_seconds in zip(self._timed(), times, strict=True):
            seconds.setdefault(str(kernel), []).append(None if math.isinf(candidate_seconds) else candidate_seconds)
        text = json.dumps({**self._key(), "chosen": list(chosen), "seconds": seconds}, indent=1) + "\n"
        for path in self._paths():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, text)
            except OSError:
                continue
            return

    def _timed(self) -> list[tuple[int, int]]:
        return [
            (kernel, candidate) for kernel, count in enumerate(self.usable) if count > 1 for candidate in range(count)
        ]

    def _no_candidate(self, kernel: int) -> HidetDistError:
        why = f" ({self.reason})" if self.reason else ""
        return HidetDistError(
            f"None of the {self.candidates[kernel]} candidates of kernel {kernel} of {self.folder} runs on "
            f"{self.device}{why}. Build the artifacts for this device, or with the target's option 'space' = 0 and "
            "without 'cublas'."
        )

    def _key(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "artifact": self.artifact,
            "device": self.device,
            "candidates": list(self.candidates),
            "usable": list(self.usable),
            "cublas": self.cublas,
        }

    def _paths(self) -> list[Path]:
        name = hashlib.sha256(json.dumps(self._key()).encode()).hexdigest()[:32] + ".json"
        return [self.folder / FOLDER / name, user_cache() / FOLDER / name]

    def _fit(self, chosen: Any) -> bool:
        return (
            isinstance(chosen, list)
            and len(chosen) == len(self.usable)
            and all(
                type(candidate) is int and 0 <= candidate < count
                for candidate, count in zip(chosen, self.usable, strict=True)
            )
        )


def _seconds(time: Timer, kernel: int, candidate: int) -> float:
    """Time a candidate. Returns infinity for one that cannot run, or whose time is not a positive number."""
    try:
        seconds = float(time(kernel, candidate))
    except (HidetDistError, OSError, RuntimeError, ValueError):
        return math.inf
    return seconds if seconds > 0 else math.inf
