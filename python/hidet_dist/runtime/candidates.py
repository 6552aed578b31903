"""The choice of a candidate for each kernel: timed once on the device, and remembered beside the artifacts.

A kernel that was built with a search space has several candidates, which compute the same. Which is fastest depends on
the device, so it is found where the program runs, when it is first loaded there. What was found is written into the
artifact folder, or, where that cannot be written to, into the user's cache: one file for each kind of device and each
build of the artifacts, so that neither another device nor another build ever takes it for its own.

Candidates may round differently, so all ranks must run the same ones, or what is replicated would differ between them:
all time all of them, what a candidate takes is the longest that it takes on any, and one rank's memory counts.

A candidate of a product may call cuBLAS. Where a rank has none, or another version than the others, no rank runs it.
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
from hidet_dist.files import write_text

FORMAT = 2
FOLDER = "choices"

Timer = Callable[[int, int], float]
"""Seconds that a candidate of a kernel takes (numbers of both); infinity, or an exception, for one that cannot run."""


def user_cache() -> Path:
    """The folder for choices when the artifact folder is read-only, in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hidet_dist"


@dataclass(frozen=True)
class Choices:
    """The choices for one build of artifacts on one kind of device.

    Attributes
    ----------
    folder: the artifact folder.
    artifact: what tells this build from others: the manifest's checksum.
    device: the device's name, as its driver tells it.
    candidates: how many candidates each kernel has.
    usable: how many of them, the first ones, can be run at all; all of them by default.
    cublas: the version of cuBLAS that they call, or 0.
    reason: why not all can be run.
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
                raise self._none(kernel)

    @property
    def is_needed(self) -> bool:
        """Whether a kernel has several candidates."""
        return any(count > 1 for count in self.usable)

    def get(self, time: Timer) -> tuple[int, ...]:
        """Choose the candidate of each kernel: the remembered one, or the fastest by times taken now and remembered.

        Raises
        ------
        HidetDistError
            When no candidate of a kernel runs.
        """
        known = self.remembered()
        if known is None:
            times = self.times(time)
            known = self.fastest(times)
            self.remember(known, times)
        return known

    def remembered(self) -> tuple[int, ...] | None:
        """Read the earlier choice; None if there is none, or its file does not fit for any reason."""
        for path in self._paths():
            try:
                body = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if isinstance(body, dict) and self._key().items() <= body.items() and self._fit(body.get("chosen")):
                return tuple(body["chosen"])
        return None

    def times(self, time: Timer) -> list[float]:
        """Time all candidates of the kernels that have several usable ones; return seconds, kernel after kernel."""
        return [_seconds(time, kernel, candidate) for kernel, candidate in self._timed()]

    def fastest(self, times: Sequence[float]) -> tuple[int, ...]:
        """Select the fastest candidate of each kernel, the first of equals, by the results of :meth:`times`.

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
                raise self._none(kernel)
        return tuple(best[kernel][1] if kernel in best else 0 for kernel in range(len(self.candidates)))

    def remember(self, chosen: Sequence[int], times: Sequence[float]) -> None:
        """Save a choice, with the times that it was made by."""
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

    def _none(self, kernel: int) -> HidetDistError:
        why = f" ({self.reason})" if self.reason else ""
        return HidetDistError(
            f"None of the {self.candidates[kernel]} candidates of kernel {kernel} of {self.folder} runs on "
            f"{self.device}{why}. Build the artifacts for this device, or with optimization_config['space'] = 0 and "
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
    """Time a candidate. Infinity for one that cannot run, or whose time is not a positive number."""
    try:
        seconds = float(time(kernel, candidate))
    except (HidetDistError, OSError, RuntimeError, ValueError):
        return math.inf
    return seconds if seconds > 0 else math.inf
