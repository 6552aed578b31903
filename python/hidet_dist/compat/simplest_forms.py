"""hidet 0.6.1 simplifies the definition of every operator that is built; forms that are simple already are remembered.

A definition is simplified twice: by :class:`Simplifier` until nothing changes, and by the rules of
:class:`RuleBasedSimplifier`, which match some fifty patterns with each part of it. Nearly all definitions come out as
they went in, and those of one kind of operator, on whatever shapes, have the same form: the same nodes, constants and
types, and the same places at which one node is used again. What the simplifiers do depends on nothing else.

Extents of symbolic dims consist of constants and symbols alone. Their simple forms are remembered, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from hidet.ir import tools
from hidet.ir.compute import ArgReduceCompute, GridCompute, ReduceCompute, TensorInput
from hidet.ir.dtypes import default_int_dtype
from hidet.ir.expr import BinaryExpr, Call, Cast, Constant, Expr, IfThenElse, SymbolVar, TensorElement, UnaryExpr, Var
from hidet.ir.type import DataType, FuncType

from hidet_dist.compat.replacing import Substitutes

hidet_simplify = tools.simplify

_MOST_FORMS = 65536  # after which they are forgotten, to bound the memory that they take

_simplest: set[Hashable] = set()
_simplified: dict[Hashable, Any] = {}  # of closed forms


class _UnknownDependencyError(Exception):
    """Raised at a node of which it is not known what simplifying it depends on."""


class _ExpressionForm:
    """The form of an expression: its nodes in the order of a walk; a node that was seen before by its number.

    It is closed if its nodes are arithmetic of constants and symbols. Expressions of one closed form are equal.
    """

    def __init__(self, skips_tensors: bool = False):
        self.skips_tensors = skips_tensors
        self.closed = True
        self.parts: list[Hashable] = [skips_tensors]
        self.numbers: dict[int, int] = {}

    def add(self, node: Expr) -> None:
        number = self.numbers.get(id(node))
        if number is not None:
            self.parts.append(number)
            return
        self.numbers[id(node)] = len(self.numbers)
        kind: Any = type(node)
        self.parts.append(kind)
        if kind is Constant:
            self._add_type(node.type)
            self.parts.append(node.value)
        elif isinstance(node, BinaryExpr):
            self.add(node.a)
            self.add(node.b)
        elif isinstance(node, UnaryExpr):
            self.add(node.a)
        elif kind is SymbolVar and SymbolVar.name2symbol.get(node.name) is node:
            self.parts.append(node.name)
        else:
            self.closed = False
            self._add_open(kind, node)

    def _add_open(self, kind: Any, node: Any) -> None:
        if kind is Var:
            self._add_type(node.type)
        elif kind is TensorElement:
            self.add(node.base)
            self._add_all(node.indices)
        elif kind is TensorInput:
            if not self.skips_tensors:
                raise _UnknownDependencyError
        elif kind is ReduceCompute:
            self._add_all(node.shape)
            self._add_all(node.axes)
            self.add(node.value)
            self._add_type(node.accumulate_dtype)
        elif kind is ArgReduceCompute:
            self.add(node.extent)
            self.add(node.axis)
            self.add(node.value)
            self._add_type(node.index_dtype)
        elif kind is GridCompute and node.layout is None:
            self._add_all(node._shape)
            self._add_all(node.axes)
            self.add(node.value)
        elif kind is IfThenElse:
            self.add(node.cond)
            self.add(node.then_expr)
            self.add(node.else_expr)
        elif kind is Cast:
            self.add(node.expr)
            self._add_type(node.target_type)
        elif kind is Call:
            self.parts.append(node.func_var.name)
            self._add_type(node.func_var.type)
            self._add_all(node.args)
        else:
            raise _UnknownDependencyError

    def _add_all(self, nodes: Sequence[Expr]) -> None:
        self.parts.append(len(nodes))
        for node in nodes:
            self.add(node)

    def _add_type(self, of_node: Any) -> None:
        if not isinstance(of_node, DataType | FuncType):  # others are compared by value nowhere
            raise _UnknownDependencyError
        self.parts.append(of_node)


def _form_of(node: Any, skip_node_types: Sequence[type[Expr]] | None) -> tuple[Hashable | None, bool]:
    """Make a key that is equal only for expressions of the same form, None if there is none; and is it closed?"""
    if skip_node_types and list(skip_node_types) != [TensorInput]:
        return None, False
    form = _ExpressionForm(bool(skip_node_types))
    try:
        form.add(node)
        return tuple(form.parts), form.closed
    except _UnknownDependencyError:
        return None, False


def closed_form_of(extents: Sequence[int | Expr]) -> Hashable | None:
    """Make a key that is equal only for equal extents; None where one is more than numbers and symbols."""
    form = _ExpressionForm()
    try:
        for extent in extents:
            if type(extent) is int:
                form.parts.append((extent,))  # a number is that of a node
            else:
                form.add(extent)
    except _UnknownDependencyError:
        return None
    return tuple(form.parts) if form.closed else None


def _simplify(
    node: Any,
    *,
    instantiate_symbols: bool = False,
    repeat_limit: int = 10,
    enable_rules: bool = False,
    skip_node_types: Sequence[type[Expr]] | None = None,
) -> Any:
    """Simplify an expression unless its form is known to be simple; replaces ``simplify`` of ``hidet.ir.tools``."""
    kind = type(node)
    if kind is int or kind is float:
        return node
    if not enable_rules and (kind is Constant or (kind is Var and isinstance(node.type, DataType))):
        return node
    form, closed = None, False
    if enable_rules and not instantiate_symbols and isinstance(node, Expr):
        if kind is Constant and node.type is default_int_dtype:
            return int(node)
        form, closed = _form_of(node, skip_node_types)
        if form is not None and form in _simplest:
            return node
        if closed and form in _simplified:
            return _simplified[form]
    simplified = hidet_simplify(
        node,
        instantiate_symbols=instantiate_symbols,
        repeat_limit=repeat_limit,
        enable_rules=enable_rules,
        skip_node_types=skip_node_types,
    )
    if form is not None and simplified is node:
        if len(_simplest) >= _MOST_FORMS:
            _simplest.clear()
        _simplest.add(form)
    elif closed:
        if len(_simplified) >= _MOST_FORMS:
            _simplified.clear()
        _simplified[form] = simplified
    return simplified


SUBSTITUTES: Substitutes = ((tools, {"simplify": _simplify}),)
