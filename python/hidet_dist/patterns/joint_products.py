"""Products of one left operand, such as queries, keys and values: a GPU computes them by one launch.

A product of few rows has fewer tiles than a GPU has multiprocessors. It takes as long as one tile, since tiles are
computed at the same time, and so do several products in one launch, as long as their tiles are not more than the
multiprocessors. Nothing is lost where products are independent. Where an operator behind one reads the result of
another, as in ``silu(x @ w) * (x @ v)``, it is fused with neither, which costs a pass over both results. This pays
if there are fewer *waves* of tiles: a wave is as many as there are multiprocessors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.transforms.fuse_operator import NOT_FUSIBLE

from hidet_dist.rewriting import Uses, longest_paths, only_user
from hidet_dist.traits import traits_of

TILE = 128
"""The rows and columns of a tile of hidet's products: those of its first candidate on tensor cores
(``principal_tiled_mma`` in its ``matmul_f16_cute_experimental``), and in float32 (the defaults of
``BatchMatmulTask.schedule_simt``)."""

Shape = Callable[[Tensor], Sequence[int]]


def tiles_of(product: Operator, shape: Shape) -> int:
    """Count the tiles of a product's result."""
    *outer, rows, columns = shape(product.outputs[0])
    weights = len(product.inputs[1].shape) == 2  # so the outer dims are rows, too
    matrices, rows = (1, math.prod([*outer, rows])) if weights else (math.prod(outer), rows)
    return matrices * -(-rows // TILE) * -(-columns // TILE)


def saves_waves(products: Sequence[Operator], shape: Shape, multiprocessors: int) -> bool:
    """Whether the tiles of products together take fewer waves than those of one product after the other."""
    tiles = [tiles_of(product, shape) for product in products]
    together = -(-sum(tiles) // multiprocessors)
    return together < sum(-(-count // multiprocessors) for count in tiles)


def of_one_operand(nodes: Sequence[Operator]) -> list[list[Operator]]:
    """List the products of matrices that have a left operand in common, by operand, each with its products."""
    groups: dict[tuple[Tensor, str], list[Operator]] = {}
    for op in nodes:
        if isinstance(op, MatmulOp) and len(op.inputs[0].shape) > 1 and len(op.inputs[1].shape) > 1:
            groups.setdefault((in_memory(op.inputs[0]), op.outputs[0].dtype.name), []).append(op)
    return [group for group in groups.values() if len(group) > 1]


def in_memory(x: Tensor) -> Tensor:
    """Find the tensor whose memory ``x`` renames; ``x`` itself if it renames none."""
    while x.op is not None and x.op.task.share_map and traits_of(x.op).renames:  # a block of memory is another tensor
        x = x.op.inputs[x.op.task.share_map[x.op.outputs.index(x)]]
    return x


def kept_in_memory(graph: FlowGraph, uses: Uses, shape: Shape, multiprocessors: int) -> list[Tensor]:
    """List the tensors at which fusion must end, so that products of one operand do not wait for each other.

    Parameters
    ----------
    graph: FlowGraph
        The graph, its operators not fused.
    uses: Uses
        The consumers of each tensor.
    shape: callable
        Returns the shape of a tensor, as numbers.
    multiprocessors: int
        Those of the GPU.
    """
    before = {op: [x.op for x in op.inputs if x.op is not None] for op in graph.nodes}
    depth = longest_paths(before, dict.fromkeys(graph.nodes, 1))
    kept: list[Tensor] = []
    for group in of_one_operand(graph.nodes):
        results = {product.outputs[0] for product in group}
        ends = [_end(y, results - {y}, depth, uses) for y in (product.outputs[0] for product in group)]
        found = [end for end in ends if end is not None]
        if found and saves_waves(group, shape, multiprocessors):
            kept += found
    return kept


def _end(y: Tensor, others: set[Tensor], depth: Mapping[Operator, int], uses: Uses) -> Tensor | None:
    """Find the tensor whose reader would be fused with a product although it needs the result of another one.

    None if there is no such reader.
    """
    level, x = depth[y.op], y
    while (user := only_user(x, uses)) is not None:
        position = next(number for number, one in enumerate(user.inputs) if one is x)
        if isinstance(user, NOT_FUSIBLE) or user.task.inputs[position] not in user.task.inverse_map:
            return None
        waiting, seen = [one for one in user.inputs if one is not x], set[Tensor]()
        while waiting:
            read = waiting.pop()
            if read in others:
                return x
            if read not in seen and read.op is not None and depth[read.op] > level:
                waiting += read.op.inputs
            seen.add(read)
        x = user.outputs[0]
    return None
