"""hidet 0.6.1 walks the definition of each operator four times when it is built; one plain walk does here.

A task collects the symbols, the free variables and the inputs of its outputs, each with a functor of its own, which
also visits the types and layouts of tensors. The definitions of operators on tensors of fixed shapes have no symbols
and no free variables other than functions: a walk that meets nothing but known nodes finds all that there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hidet.ir import tools
from hidet.ir.compute import ArgReduceCompute, GridCompute, ReduceCompute, TensorInput, TensorNode
from hidet.ir.expr import BinaryExpr, Call, Cast, Constant, Expr, IfThenElse, SymbolVar, TensorElement, UnaryExpr, Var
from hidet.ir.layout import RowMajorLayout
from hidet.ir.type import DataType, FuncType

from hidet_dist.compat.replacing import Substitutes

hidet_collect = tools.collect
hidet_collect_free_vars = tools.collect_free_vars


class _UnknownInputsError(Exception):
    """Raised at a node that may contain symbols or free variables."""


class _Walk:
    """The inputs of a definition in the order of hidet's walk, and the variables of functions."""

    def __init__(self, outputs: Sequence[TensorNode]):
        self.inputs: list[TensorInput] = []
        self.functions: set[Var] = set()
        self._seen: set[int] = set()
        self._defined: set[int] = set()
        self._add_all(outputs)

    def _add(self, node: Any) -> None:
        kind: Any = type(node)
        if kind is Constant or kind is int or id(node) in self._seen:
            return
        self._seen.add(id(node))
        if kind is Var:
            if isinstance(node.type, FuncType):
                self.functions.add(node)
            elif id(node) not in self._defined or not isinstance(node.type, DataType):
                raise _UnknownInputsError
        elif isinstance(node, BinaryExpr):
            self._add(node.a)
            self._add(node.b)
        elif isinstance(node, UnaryExpr):
            self._add(node.a)
        elif kind is TensorElement:
            self._add(node.base)
            self._add_all(node.indices)
        elif kind is TensorInput:
            if type(node.ttype.layout) is not RowMajorLayout:
                raise _UnknownInputsError
            self._add_all(node.ttype.shape)
            self.inputs.append(node)
        elif kind is ReduceCompute:
            self._add_all(node.shape)
            self._add_body(node.axes, node.value)
        elif kind is ArgReduceCompute:
            self._add(node.extent)
            self._add_body([node.axis], node.value)
        elif kind is GridCompute and node.layout is None:
            self._add_all(node._shape)
            self._add_body(node.axes, node.value)
        elif kind is IfThenElse:
            self._add(node.cond)
            self._add(node.then_expr)
            self._add(node.else_expr)
        elif kind is Cast and isinstance(node.target_type, DataType):
            self._add(node.expr)
        elif kind is Call:
            self._add(node.func_var)
            self._add_all(node.args)
        else:
            raise _UnknownInputsError

    def _add_all(self, nodes: Sequence[Any]) -> None:
        for node in nodes:
            self._add(node)

    def _add_body(self, axes: Sequence[Var], value: Expr) -> None:
        self._defined.update(map(id, axes))
        self._add(value)
        self._defined.difference_update(map(id, axes))


_last: list[tuple[list[TensorNode], _Walk | None]] = []  # the last outputs: a task asks three times for the same


def _walk(node: Any) -> _Walk | None:
    """Walk the outputs of a task; None for anything else, and for definitions with unknown nodes."""
    if type(node) is not list or not all(isinstance(output, TensorNode) for output in node):
        return None
    if _last and len(_last[0][0]) == len(node) and all(map(_same, _last[0][0], node)):
        return _last[0][1]
    try:
        walk: _Walk | None = _Walk(node)
    except _UnknownInputsError:
        walk = None
    _last[:] = [(list(node), walk)]
    return walk


def _same(one: TensorNode, other: TensorNode) -> bool:
    return one is other


def _collect(node: Any, node_types: Any, stop_when_found: bool = False) -> list[Any]:
    """Collect the nodes of some types; replaces ``collect`` of ``hidet.ir.tools``."""
    if node_types is SymbolVar or node_types is TensorInput:
        walk = _walk(node)
        if walk is not None:
            return list(walk.inputs) if node_types is TensorInput else []
    return list(hidet_collect(node, node_types, stop_when_found))


def _collect_free_vars(node: Any) -> set[Var]:
    """Collect the variables that are not defined; replaces the function of ``hidet.ir.tools``."""
    walk = _walk(node)
    found: set[Var] = hidet_collect_free_vars(node) if walk is None else set(walk.functions)
    return found


SUBSTITUTES: Substitutes = ((tools, {"collect": _collect, "collect_free_vars": _collect_free_vars}),)
