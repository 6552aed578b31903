"""The instructions that kernels for the CPU may use: levels of x86-64, and the compiler's flags for them.

What a level (:data:`hidet_dist.runtime.processor.LEVELS`) has is told to the compiler feature by feature, since it may
name a processor that is newer than itself after an older one, and leave out what that one lacks.
"""

from __future__ import annotations

from dataclasses import dataclass

from hidet_dist.runtime.processor import LEVELS, features

NATIVE = "native"
BASELINE = "x86-64"

_FLAGS = {
    "popcnt": "-mpopcnt",
    "pni": "-msse3",
    "ssse3": "-mssse3",
    "sse4_1": "-msse4.1",
    "sse4_2": "-msse4.2",
    "avx": "-mavx",
    "avx2": "-mavx2",
    "bmi1": "-mbmi",
    "bmi2": "-mbmi2",
    "f16c": "-mf16c",
    "fma": "-mfma",
    "abm": "-mlzcnt",
    **{f"avx512{part}": f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl")},
}
ARCHS = (NATIVE, *LEVELS)
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
        name = next(level for level, needed in LEVELS.items() if features() >= set(needed))
    needed = LEVELS[name]
    # Vectors as wide as they get: compilers take half of AVX-512's, as was best on its first processors. On later
    # ones, an EPYC of the Zen 5 generation, half takes GELU 0.52 ns an element instead of 0.26.
    width = ["-mprefer-vector-width=512"] if "avx512f" in needed else []
    flags = [_FLAGS[feature] for feature in needed]
    return Arch(name, needed, ("-m64", "-march=x86-64", "-mtune=generic", *flags, *width))
