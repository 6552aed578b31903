"""What instructions the host's processor has, and whether compiled code may use them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from hidet_dist.errors import ConfigError

_CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def features() -> frozenset[str]:
    """The features that processes can use, by Linux's names, such as ``avx512f``; empty where it tells none."""
    try:
        with _CPUINFO.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, values = line.partition(":")
                if name.strip() == "flags":
                    return frozenset(values.split())
    except OSError:
        pass
    return frozenset()


def check_features(arch: str | None, needed: Sequence[str]) -> None:
    """Refuse a processor that lacks features which code for ``arch`` was compiled to use.

    Raises
    ------
    ConfigError
        It names the features, and says what to do.
    """
    missing = [name for name in needed if name not in features()]
    if missing:
        raise ConfigError(
            f"The artifacts were built for {arch} processors, and this one lacks {', '.join(missing)}. Build them on "
            "this machine, or for older processors with optimization_config['arch'], such as 'x86-64-v2'."
        )
