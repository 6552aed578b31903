"""The machine that figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = ("hidet", "torch", "transformers", "scipy-openblas32", "numpy")


def describe() -> dict[str, Any]:
    """Processor, memory, software, and how busy the machine was before the run."""
    return {
        "processor": _first("/proc/cpuinfo", "model name") or platform.processor(),
        "caches": _caches(),
        "cores": os.cpu_count(),
        "memory": _first("/proc/meminfo", "MemTotal"),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "load_before": [round(load, 2) for load in os.getloadavg()],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first(file: str, key: str) -> str | None:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


def _caches() -> dict[str, str]:
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / name).read_text(encoding="utf-8").strip() for name in ("level", "type", "size"))
        found[f"L{level} {kind.lower()}"] = size
    return found
