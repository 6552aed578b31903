"""hidet 0.6.1 compares NaN by equality, and hashes tensors in Python; values are compared and hashed otherwise here.

Values that are immutable are compared by equality, others by identity. NaN, which does not equal itself, is among the
latter: hidet's passes would take it for changed each time, and not end. Whether a value is immutable is asked for each
pair of values, and hidet's function imports two modules each time.

The hash of a tensor is its address, which a function in Python returns. Python's own hash is as good. Tensors are keys
of dicts that outlive a build, so that their hash must be the same in the whole process.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

from hidet.graph import Tensor
from hidet.graph.operator import Device
from hidet.ir.expr import Constant

_py: Any = importlib.import_module("hidet.utils.py")  # hidet.utils has other things of this name


def _is_immutable(value: Any) -> bool:
    """Whether a value is compared by equality; replaces the function of this name in ``hidet.utils.py``."""
    if isinstance(value, Constant):
        return not value.type.is_tensor() and bool(value.value == value.value)
    return isinstance(value, int | str | tuple | Device) or (isinstance(value, float) and not math.isnan(value))


def install() -> None:
    """Compare and hash so from now on."""
    Tensor.__hash__ = object.__hash__
    _py._is_immutable = _is_immutable
