"""The instruction set features of the host's processor, and the check that it has those that compiled code needs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from hidet_dist.checks import shown
from hidet_dist.errors import ArtifactError, ConfigError

_SECOND = ("popcnt", "pni", "ssse3", "sse4_1", "sse4_2")
_THIRD = (*_SECOND, "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm")
_FOURTH = (*_THIRD, *(f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl")))

LEVELS: dict[str, tuple[str, ...]] = {
    "x86-64-v4": _FOURTH,
    "x86-64-v3": _THIRD,
    "x86-64-v2": _SECOND,
    "x86-64": (),
}
"""The levels of x86-64, the highest first, and the features of each that compiled code uses, by Linux's names.

They are the micro-architecture levels of the System V ABI for x86-64, without the few features that kernels do not use
and that virtual machines may hide.
"""

_CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def features() -> frozenset[str]:
    """Return the features that processes can use, by Linux's names such as ``avx512f``; empty if Linux lists none."""
    try:
        with _CPUINFO.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, values = line.partition(":")
                if name.strip() == "flags":
                    return frozenset(values.split())
    except OSError:
        pass
    return frozenset()


def best_level() -> str:
    """Return the name of the highest level whose features processes can use."""
    return next(level for level, needed in LEVELS.items() if features() >= set(needed))


def check_features(arch: str, needed: Sequence[str]) -> None:
    """Check that the processor has the features that code for ``arch`` was compiled to use.

    Raises
    ------
    ArtifactError
        When ``needed`` differs from the features of ``arch``, a level of x86-64; code for GPUs needs none.
    ConfigError
        When the processor lacks features; the message names them.
    """
    if tuple(needed) != LEVELS.get(arch, ()):
        raise ArtifactError(
            f"The manifest's cpu_features are {shown(needed)}; those of its arch, {arch}, are "
            f"{', '.join(LEVELS.get(arch, ())) or 'none'}. Build the artifacts again."
        )
    missing = [name for name in needed if name not in features()]
    if missing:
        raise ConfigError(
            f"The artifacts were built for {arch} processors, and this one lacks {', '.join(missing)}. Build them on "
            "this machine, or for older processors with optimization_config['arch'], such as 'x86-64-v2'."
        )
