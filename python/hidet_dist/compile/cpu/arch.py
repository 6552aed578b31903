"""Which instructions kernels for the CPU may use: the levels of x86-64, and the compiler's flags for them.

The levels are those of the System V ABI for x86-64, "micro-architecture levels", without the few instructions of theirs
that kernels have no use for, and virtual machines may hide. What a level has is told to the compiler feature by
feature, since it may name a processor that is newer than itself after an older one, and leave out what that one lacks.
"""

from __future__ import annotations

from dataclasses import dataclass

from hidet_dist.runtime.processor import features

NATIVE = "native"
BASELINE = "x86-64"

# By Linux's name in /proc/cpuinfo, each with the compiler's flag.
_SECOND = {
    "popcnt": "-mpopcnt",
    "pni": "-msse3",
    "ssse3": "-mssse3",
    "sse4_1": "-msse4.1",
    "sse4_2": "-msse4.2",
}
_THIRD = {
    "avx": "-mavx",
    "avx2": "-mavx2",
    "bmi1": "-mbmi",
    "bmi2": "-mbmi2",
    "f16c": "-mf16c",
    "fma": "-mfma",
    "abm": "-mlzcnt",
}
_FOURTH = {f"avx512{part}": f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl")}
_LEVELS = {
    "x86-64-v4": {**_SECOND, **_THIRD, **_FOURTH},
    "x86-64-v3": {**_SECOND, **_THIRD},
    "x86-64-v2": _SECOND,
    BASELINE: {},
}
ARCHS = (NATIVE, *_LEVELS)
"""What kernels can be compiled for: the best of the levels that the running processor has, or one of them."""


@dataclass(frozen=True)
class Arch:
    """A level: its name, the features that it needs, by Linux's names, and the compiler's flags for it."""

    name: str
    features: tuple[str, ...]
    flags: tuple[str, ...]


def runs_here(name: str) -> bool:
    """Whether code for one of ``ARCHS`` runs on this machine."""
    return features() >= set(arch_of(name).features)


def arch_of(name: str) -> Arch:
    """One of ``ARCHS``; what is native is found on the running machine."""
    if name == NATIVE:
        name = next(level for level, needed in _LEVELS.items() if features() >= set(needed))
    needed = _LEVELS[name]
    # Vectors as wide as they get: compilers take half of AVX-512's, as was best on its first processors. On later
    # ones, an EPYC of the Zen 5 generation, half takes GELU 0.52 ns an element instead of 0.26.
    width = ["-mprefer-vector-width=512"] if "avx512f" in needed else []
    return Arch(name, tuple(needed), ("-m64", "-march=x86-64", "-mtune=generic", *needed.values(), *width))
