"""The instructions that kernels for the CPU may use: levels of x86-64, and the compiler's flags for them.

The compiler gets the features of a level (:data:`hidet_dist.runtime.processor.LEVELS`) one by one. A processor that is
newer than the compiler may be taken for an older one otherwise, without the features that only the newer one has.
"""

from __future__ import annotations

from dataclasses import dataclass

from hidet_dist.runtime.processor import LEVELS, best_level

NATIVE = "native"

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
"""The processors to compile for: ``native``, the best level of the running processor, or a level by name."""


@dataclass(frozen=True)
class Arch:
    """A level: its name, the features that it needs, by Linux's names, and the compiler's flags for it."""

    name: str
    features: tuple[str, ...]
    flags: tuple[str, ...]


def arch_of(name: str) -> Arch:
    """Return one of ``ARCHS`` by name; ``native`` is the best level of the running processor."""
    if name == NATIVE:
        name = best_level()
    needed = LEVELS[name]
    # The full width of AVX-512: compilers use half of it by default, which was best on the first processors. On a later
    # one, an EPYC of the Zen 5 generation, GELU takes 0.52 ns an element with half the width and 0.26 with all of it.
    width = ["-mprefer-vector-width=512"] if "avx512f" in needed else []
    flags = [_FLAGS[feature] for feature in needed]
    return Arch(name, needed, ("-m64", "-march=x86-64", "-mtune=generic", *flags, *width))
