"""Attention as one kernel: ``softmax(q k^T * scale + bias) v``, whose scores never reach memory.

Scores are computed tile by tile, together with their maximum, the sum of their exponentials and the weighted sum of the
values, all in float32 (Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1). There is a kernel for half precision
(:mod:`hidet_dist.compile.cuda.attention_half`), and one for float32 (:mod:`hidet_dist.compile.cuda.attention_float32`).

Keys and values may have fewer heads than queries; each of their heads then serves several heads of queries (grouped
queries, Ainslie et al. 2023). The bias is read element by element, so that hidet can fuse its computation as a
prologue, and so are queries that are rotated there. Other operands are copied from memory 16 bytes at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hidet.graph import Operator, Tensor
from hidet.graph.ops.utils import Task, TensorNode, compute, input_like, reduce
from hidet.ir import primitives
from hidet.ir.dtypes import float32
from hidet.ir.expr import Expr, cast
from hidet.ir.module import IRModule
from hidet.ir.utils import broadcast_indices

from hidet_dist.compile.cuda.attention_float32 import float32_kernel
from hidet_dist.compile.cuda.attention_half import half_kernel
from hidet_dist.partitioning.once import MadeOnce


class AttentionTask(Task, metaclass=MadeOnce):
    """The definition. q: ``[..., queries, size]``; k, v: ``[..., keys, size]``; bias: ``[..., queries, keys]``.

    The outer dims of k and v divide those of q; the bias broadcasts to ``q k^T``. Queries that are ``copied`` are read
    from memory; hidet must not fuse their computation.
    """

    def __init__(self, q: TensorNode, k: TensorNode, v: TensorNode, bias: TensorNode, scale: float, copied: bool):
        outer, (queries, size), keys = list(q.shape[:-2]), q.shape[-2:], k.shape[-2]
        dtype = q.type.dtype

        def score(*at: Any) -> Any:
            *stack, row, column = at
            held = _held(stack, outer, k.shape[:-2])
            products = reduce(
                [size], lambda d: cast(q[(*stack, row, d)], float32) * cast(k[(*held, column, d)], float32), "sum"
            )
            return products * float32(scale) + bias[_broadcast(at, bias.shape, [*outer, queries, keys])]

        scores = compute("scores", shape=[*outer, queries, keys], fcompute=score)
        most = compute(
            "most", shape=[*outer, queries], fcompute=lambda *at: reduce([keys], lambda j: scores[(*at, j)], "max")
        )
        powers = compute(
            "powers", shape=[*outer, queries, keys], fcompute=lambda *at: primitives.exp(scores[at] - most[at[:-1]])
        )
        total = compute(
            "total", shape=[*outer, queries], fcompute=lambda *at: reduce([keys], lambda j: powers[(*at, j)], "sum")
        )

        def mixed(*at: Any) -> Any:
            *stack, row, d = at
            held = _held(stack, outer, v.shape[:-2])
            weighted = reduce([keys], lambda j: powers[(*stack, row, j)] * cast(v[(*held, j, d)], float32), "sum")
            return cast(weighted / total[(*stack, row)], dtype)

        output = compute("o", shape=[*outer, queries, size], fcompute=mixed)
        attributes = {"scale": scale, "copied": copied}
        super().__init__("attention", inputs=[q, k, v, bias], outputs=[output], attributes=attributes)
        self.scale, self.copied = scale, copied

    def implement_cuda(self, working_dir: str) -> IRModule:
        """Build the kernel of the dtype."""
        shapes = [list(map(int, x.shape)) for x in self.inputs]
        dtype = self.inputs[0].type.dtype
        if dtype == float32:
            return float32_kernel(shapes, self.scale, self.copied, *self._places())
        return half_kernel(shapes, dtype, self.scale, self.copied, *self._places())

    def _places(self) -> tuple[Callable[..., list[Any]], Callable[..., list[Any]]]:
        """Make functions that compute the indices of an element of q, k, v or o, and of the bias."""
        q_shape, k_shape, _, bias_shape = (list(map(int, x.shape)) for x in self.inputs)
        *outer, queries, _ = q_shape

        def place(outer_indices: Sequence[Any], head: Sequence[Any], row: Any, column: Any) -> list[Any]:
            return [*_held(head, outer, outer_indices), row, column]

        def bias_place(head: Sequence[Any], row: Any, column: Any) -> list[Any]:
            return _broadcast([*head, row, column], bias_shape, [*outer, queries, k_shape[-2]])

        return place, bias_place


def _held(indices: Sequence[Any], outer: Sequence[Any], key_shape: Sequence[Any]) -> list[Any]:
    """Map the outer indices of a query to those of its keys and values."""
    return [
        i if int(n) == int(m) else i // (int(n) // int(m)) for i, n, m in zip(indices, outer, key_shape, strict=True)
    ]


def _broadcast(indices: Sequence[Any], source: Sequence[Any], shape: Sequence[Any]) -> list[Expr]:
    result: list[Expr] = broadcast_indices(list(indices), list(source), list(shape))
    return result


class AttentionOp(Operator):
    """``softmax(q k^T * scale + bias) v``; shapes are those of :class:`AttentionTask`, the bias is float32.

    hidet must not fuse the computation of k and v, and of q if it is ``copied``: a barrier before them prevents it.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, copied: bool):
        nodes = [input_like(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"), (bias, "bias"))]
        task = AttentionTask(nodes[0], nodes[1], nodes[2], nodes[3], scale, copied)
        super().__init__(inputs=[q, k, v, bias], attributes={"scale": scale, "copied": copied}, task=task)
