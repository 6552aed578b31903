"""hidet 0.6.1 finds the method of a functor for a node by comparing its type with up to a hundred others, each time.

The method depends on the two types only, so it is found once for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

from hidet_dist.compat.replacing import Substitutes

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


class _MethodNames:
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
        name: Any = dispatch(_MethodNames(), node)
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


SUBSTITUTES: Substitutes = ((BaseFunctor, {"visit": _visit}),)
