"""Which candidate of each kernel runs: timed once on the device that runs them, and remembered beside the artifacts.

A kernel that was built with a search space has several candidates, which compute the same. Which is fastest depends on
the device, so it is found where the program runs, when it is first loaded there. What was found is written into the
artifact folder, or, where that cannot be written to, into the user's cache: one file for each kind of device and each
build of the artifacts, so that neither another device nor another build ever takes it for its own.

Candidates may round differently, so all ranks must run the same ones, or what is replicated would differ between them:
one rank chooses, and the others are told.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hidet_dist.errors import HidetDistError
from hidet_dist.files import write_text

FORMAT = 1
FOLDER = "choices"

Timer = Callable[[int, int], float]
"""Seconds that a candidate of a kernel takes (numbers of both); infinity, or an exception, for one that cannot run."""


def user_cache() -> Path:
    """Where choices go when the artifact folder is read-only: ``$XDG_CACHE_HOME/hidet_dist``, or in ``~/.cache``."""
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
    """

    folder: Path
    artifact: str
    device: str
    candidates: tuple[int, ...]

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to choose."""
        return any(count > 1 for count in self.candidates)

    def get(self, time: Timer) -> tuple[int, ...]:
        """The candidate of each kernel: as remembered, or else as timed now and remembered from now on.

        Raises
        ------
        HidetDistError
            When no candidate of a kernel runs.
        """
        return self.remembered() or self.choose(time)

    def remembered(self) -> tuple[int, ...] | None:
        """What was chosen before, or None: a file that does not fit, for whatever reason, is as good as none."""
        for path in self._paths():
            try:
                body = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if isinstance(body, dict) and self._key().items() <= body.items() and self._fit(body.get("chosen")):
                return tuple(body["chosen"])
        return None

    def choose(self, time: Timer) -> tuple[int, ...]:
        """Time the candidates of all kernels that have several, and remember the fastest of each; the first of equals.

        Raises
        ------
        HidetDistError
            When no candidate of a kernel runs.
        """
        chosen, seconds = [], {}
        for kernel, count in enumerate(self.candidates):
            best = 0
            if count > 1:
                times = [_seconds(time, kernel, candidate) for candidate in range(count)]
                best = min(range(count), key=times.__getitem__)
                if math.isinf(times[best]):
                    raise HidetDistError(
                        f"None of the {count} candidates of kernel {kernel} of {self.folder} runs on {self.device}. "
                        "Build the artifacts for this device, or with optimization_config['space'] = 0."
                    )
                seconds[str(kernel)] = [None if math.isinf(own) else own for own in times]
            chosen.append(best)
        self._remember(chosen, seconds)
        return tuple(chosen)

    def accompany(self, time: Timer) -> None:
        """Time what :meth:`choose` times, in its order, for the sake of a rank that chooses: collectives take all."""
        for kernel, count in enumerate(self.candidates):
            for candidate in range(count if count > 1 else 0):
                _seconds(time, kernel, candidate)

    def _remember(self, chosen: Sequence[int], seconds: Mapping[str, Any]) -> None:
        text = json.dumps({**self._key(), "chosen": chosen, "seconds": seconds}, indent=1) + "\n"
        for path in self._paths():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, text)
            except OSError:
                continue
            return

    def _key(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "artifact": self.artifact,
            "device": self.device,
            "candidates": list(self.candidates),
        }

    def _paths(self) -> list[Path]:
        name = hashlib.sha256(json.dumps(self._key()).encode()).hexdigest()[:32] + ".json"
        return [self.folder / FOLDER / name, user_cache() / FOLDER / name]

    def _fit(self, chosen: Any) -> bool:
        return (
            isinstance(chosen, list)
            and len(chosen) == len(self.candidates)
            and all(type(own) is int and 0 <= own < count for own, count in zip(chosen, self.candidates, strict=True))
        )


def _seconds(time: Timer, kernel: int, candidate: int) -> float:
    """As timed; infinity for a candidate that cannot run, or takes no time that makes sense."""
    try:
        seconds = float(time(kernel, candidate))
    except (HidetDistError, OSError, RuntimeError, ValueError):
        return math.inf
    return seconds if seconds > 0 else math.inf
