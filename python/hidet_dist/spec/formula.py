"""Formulas: extents that are computed from symbolic dims, as the text in which plans and manifests have them."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping

from hidet_dist.errors import SpecError

MOST_CHARACTERS = 1000
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def check_formula(text: str) -> frozenset[str]:
    """Return the names of symbolic dims in a formula such as ``(batch * seq) / 4``, where ``/`` divides without rest.

    Raises
    ------
    SpecError
        When the text is not a formula of names, integers and ``+ - * / // %``.
    """
    names: set[str] = set()
    waiting: list[ast.expr] = [_parsed(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            waiting += [node.left, node.right]
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif not (isinstance(node, ast.Constant) and type(node.value) is int):
            raise SpecError(f"The size {text!r} is not computed from symbolic dims by + - * / and % alone.")
    return frozenset(names)


def evaluate_formula(text: str, sizes: Mapping[str, int]) -> int:
    """Compute a formula that :func:`check_formula` admits, given the sizes of its symbolic dims.

    Raises
    ------
    SpecError
        When a size is missing, or the formula divides by 0 or less.
    """

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Name):
            if node.id not in sizes:
                raise SpecError(f"The size {text!r} depends on {node.id}, whose size is not known.")
            return sizes[node.id]
        if isinstance(node, ast.Constant):
            assert isinstance(node.value, int)
            return node.value
        assert isinstance(node, ast.BinOp)
        left, right = value(node.left), value(node.right)
        if isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod) and right <= 0:
            raise SpecError(f"The size {text!r} divides by {right}.")
        return _OPERATIONS[type(node.op)](left, right)

    check_formula(text)
    return value(_parsed(text))


@functools.lru_cache(maxsize=2**10)
def _parsed(text: str) -> ast.expr:
    if len(text) > MOST_CHARACTERS:
        raise SpecError(f"A size has at most {MOST_CHARACTERS} characters; one has {len(text)}.")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(f"The size {text!r} is not a formula: {error}.") from error
