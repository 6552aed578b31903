"""The least and the greatest sizes of symbolic dims for which a graph computes what its module does."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hidet.graph import FlowGraph, Operator
from hidet.graph.ops.transform import StridedSliceOp

from hidet_dist.frontends.pytorch.export import Exported
from hidet_dist.frontends.pytorch.size_conditions import examples_of, least_of
from hidet_dist.spec.extents import evaluate, extents_of
from hidet_dist.spec.symbols import INT32_MAX


def size_limits(
    graph: FlowGraph,
    found: Exported,
    names: Mapping[str, str] = MappingProxyType({}),
    declared: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, tuple[int, int]]:
    """Map the names of symbolic dims to the least and the greatest sizes for which a graph serves.

    PyTorch takes a symbolic size for 2 or more, and its programs for ones that serve 1 as well, unless a ``Dim``
    declares more, or the module's code needs it. The graph serves 1 only if it reads no other elements then than there
    are.

    Parameters
    ----------
    graph: FlowGraph
        The graph of the program.
    found: Exported
        The program, and the sizes to which the module's code narrows those of its symbols.
    names: mapping
        The user's names of PyTorch's symbols; others have their own.
    declared: mapping
        The least sizes that the user declares, by name.
    """
    sizes = {}
    for symbol, bounds in found.program.range_constraints.items():
        name = names.get(str(symbol), str(symbol))
        least, most = found.sizes.get(str(symbol), (1, INT32_MAX))
        sizes[name] = max(least, least_of(bounds), declared.get(name, 1)), int(min(most, bounds.upper))
    examples = {names.get(symbol, symbol): size for symbol, size in examples_of(found.program).items()}
    ones = {name for name, (least, _) in sizes.items() if least == 1}
    unserved = {name for name in ones if not _reads_within(graph, {**examples, name: 1})}
    if ones and not unserved and not _reads_within(graph, {**examples, **dict.fromkeys(ones, 1)}):
        unserved = ones
    return {name: (2 if name in unserved else least, most) for name, (least, most) in sizes.items()}


def _reads_within(graph: FlowGraph, sizes: Mapping[str, int]) -> bool:
    """Whether no operator of a graph has a negative extent, or slices beyond its operand, at these sizes of symbols."""
    for op in graph.nodes:
        with contextlib.suppress(ValueError):  # an extent that is no sum, product, quotient or remainder of symbols
            shapes = [[evaluate(extent, sizes) for extent in extents_of(x)] for x in (*op.inputs, *op.outputs)]
            if any(extent < 0 for shape in shapes for extent in shape):
                return False
            if isinstance(op, StridedSliceOp) and not _slices_within(op, shapes[0], shapes[-1], sizes):
                return False
    return True


def _slices_within(op: Operator, whole: Sequence[int], part: Sequence[int], sizes: Mapping[str, int]) -> bool:
    for axis, start, step in zip(*(op.attrs[key] for key in ("axes", "starts", "strides")), strict=True):
        first = evaluate(start, sizes)
        last = first + (part[axis] - 1) * evaluate(step, sizes)
        if part[axis] and not (0 <= first < whole[axis] and 0 <= last < whole[axis]):
            return False
    return True
