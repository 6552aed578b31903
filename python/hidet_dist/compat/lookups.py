"""hidet 0.6.1 spends much of the time of planning and building in three look-ups, which are quick from now on.

* The method of a functor that takes a node is found by comparing the node's type with up to a hundred others, for each
  node anew. It depends on the two types only, so it is found once for them.
* The hash of a tensor is computed by a function in Python, and is the tensor's address. Python's own hash is the same.
* Whether a value is immutable is asked for each pair of values that are compared, and imports two modules each time.

Immutable values are compared by equality, others by identity. NaN, which does not equal itself, is among the latter:
hidet's passes would take it for changed each time, and not end.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

from hidet.graph import Tensor
from hidet.graph.operator import Device
from hidet.ir.expr import Constant
from hidet.ir.functors import (
    BaseFunctor,
    ComputeFunctor,
    ExprFunctor,
    LayoutFunctor,
    MappingFunctor,
    ModuleFunctor,
    StmtFunctor,
    TypeFunctor,
)
from hidet.ir.functors.cute_functor import CuteFunctor
from hidet.ir.functors.stmt_functor import StmtRewriter
from hidet.ir.stmt import Stmt

_py: Any = importlib.import_module("hidet.utils.py")  # hidet.utils has other things of this name

hidet_visit = BaseFunctor.visit

_PYTHON_CONSTANTS = (str, bool, int, float, complex, type(None))
_FUNCTORS = (
    *(BaseFunctor, ComputeFunctor, CuteFunctor, ExprFunctor, LayoutFunctor),
    *(MappingFunctor, ModuleFunctor, StmtFunctor, TypeFunctor),
)
_BY_TYPE = frozenset(vars(functor)["visit_dispatch"] for functor in _FUNCTORS)
"""The functions of hidet that do nothing but call the method for the type of a node."""

_OF_STATEMENTS = vars(StmtRewriter)["visit_dispatch"]
"""The function of hidet that does more for statements, and leaves all other nodes to the functors after it."""

_methods: dict[type, dict[type, str | None]] = {}
_UNKNOWN = ""


class _Names:
    """Stands for a functor: each of its methods returns the method's name."""

    def __getattr__(self, name: str) -> Callable[[Any], str]:
        return lambda node: name


def _method(functor: type, node: Any) -> str | None:
    """Find the name of a functor's method for a node; None if more than the node's type may decide it."""
    for kind in functor.__mro__:
        dispatch = vars(kind).get("visit_dispatch")
        if dispatch is None or (dispatch is _OF_STATEMENTS and not isinstance(node, Stmt)):
            continue
        if dispatch not in _BY_TYPE:
            return None
        name: Any = dispatch(_Names(), node)
        if name is not NotImplemented:
            return str(name)
    return None


def _visit(self: Any, node: Any) -> Any:
    """Call the method for a node, once for each node; replaces ``BaseFunctor.visit``."""
    if isinstance(node, _PYTHON_CONSTANTS):
        return self.visit_PyConstant(node)
    known = self.memo
    functor, kind = type(self), type(node)
    key = id(node) if isinstance(node, list | dict) else node
    if known is not None and key in known:
        return known[key]
    methods = _methods.get(functor)
    if methods is None:
        methods = _methods[functor] = {}
    name = methods.get(kind, _UNKNOWN)
    if name == _UNKNOWN:
        name = methods[kind] = _method(functor, node)
    if name is None:
        return hidet_visit(self, node)
    result = getattr(self, name)(node)
    if known is not None:
        known[key] = result
    return result


def _is_immutable(value: Any) -> bool:
    """Whether a value is compared by equality; replaces the function of this name in ``hidet.utils.py``."""
    if isinstance(value, Constant):
        return not value.type.is_tensor() and bool(value.value == value.value)
    return isinstance(value, int | str | tuple | Device) or (isinstance(value, float) and not math.isnan(value))


def install() -> None:
    """Look up quickly from now on."""
    BaseFunctor.visit = _visit
    Tensor.__hash__ = object.__hash__
    _py._is_immutable = _is_immutable
