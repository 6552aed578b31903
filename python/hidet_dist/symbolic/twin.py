"""Twins: a graph with symbolic dims, or one of its operators, with numbers in place of the symbols."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import hidet
from hidet.graph import Operator, Tensor
from hidet.ir.expr import Constant, Expr

from hidet_dist.errors import ConfigError
from hidet_dist.normalize import NormalGraph
from hidet_dist.rules.local import rebuild
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.extents import evaluate, evaluate_number, extents_of
from hidet_dist.spec.symbols import SymbolPlan
from hidet_dist.view import GraphView


def prime_sizes(view: GraphView, mesh: DeviceMesh) -> dict[str, int]:
    """Choose for each symbol a prime that divides no other extent of the graph, times its declared multiple."""
    others = {mesh.size, *(symbol.multiple_of for symbol in view.symbols)}
    others.update(extent for name in view.tensors for extent in view.extents(name) if isinstance(extent, int))
    primes = (n for n in itertools.count(3) if all(n % d for d in range(2, math.isqrt(n) + 1)))
    free = (prime for prime in primes if all(other % prime for other in others))
    return {symbol.name: symbol.multiple_of * next(free) for symbol in view.symbols}


def concrete(view: GraphView, sizes: Mapping[str, int]) -> NormalGraph:
    """Rebuild the graph, operator by operator, with numbers in place of its symbols.

    Raises
    ------
    ConfigError
        When an operator does not admit these sizes.
    """
    replaced: dict[Tensor, Tensor] = {}
    for name in view.inputs:
        replaced[view.tensors[name]] = _placeholder(view.tensors[name], sizes)
    for name in (*view.weights, *view.states):
        replaced[view.tensors[name]] = view.tensors[name]
    for number, op in enumerate(view.operators):
        try:
            outputs = _rebuilt(op, [replaced[x] for x in op.inputs], sizes)
        except ValueError as error:
            raise ConfigError(
                f"Operator {number}, {op.name}, does not take all sizes of the symbolic dims, such as "
                f"{', '.join(f'{name} = {size}' for name, size in sizes.items())}: {error}. Give dims that must be "
                "equal one name, or numbers."
            ) from error
        replaced.update(zip(op.outputs, outputs, strict=True))
    return NormalGraph([replaced[y] for y in view.graph.outputs], [replaced[x] for x in view.graph.inputs])


def at_sizes(op: Operator, symbols: Sequence[SymbolPlan]) -> Operator:
    """Make the twin of one operator at the expected sizes; return the operator itself if it has no symbolic dims.

    Raises
    ------
    ValueError
        When the operator does not admit these sizes.
    """
    if all(isinstance(extent, int) for x in (*op.inputs, *op.outputs) for extent in extents_of(x)):
        return op
    sizes = {symbol.name: symbol.size for symbol in symbols}
    return _rebuilt(op, [_placeholder(x, sizes) for x in op.inputs], sizes)[0].op


def _placeholder(x: Tensor, sizes: Mapping[str, int]) -> Tensor:
    return hidet.symbol([evaluate(extent, sizes) for extent in extents_of(x)], x.dtype, x.device)


def _rebuilt(op: Operator, inputs: Sequence[Tensor], sizes: Mapping[str, int]) -> list[Tensor]:
    shapes = [tuple(evaluate(extent, sizes) for extent in extents_of(y)) for y in op.outputs]
    stand_in = copy.copy(op)
    stand_in.attrs = _substituted(op.attrs, sizes)
    return rebuild(stand_in, inputs, shapes)


def _substituted(value: Any, sizes: Mapping[str, int]) -> Any:
    """Substitute numbers for the symbols in an attribute."""
    if isinstance(value, dict):
        return {key: _substituted(part, sizes) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_substituted(part, sizes) for part in value)
    if isinstance(value, Expr) and not isinstance(value, Constant):
        try:
            return evaluate_number(value, sizes)
        except ValueError:
            return value
    return value
