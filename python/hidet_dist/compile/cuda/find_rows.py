"""Replacement of softmax and norms in a program by the kernels of :mod:`hidet_dist.compile.cuda.rows`.

On a GPU, hidet computes a softmax by three kernels and a root-mean-square norm by two, with intermediate results in
memory. Its layer norm is one kernel, but only reads float32 from memory.
"""

from __future__ import annotations

from hidet.graph import FlowGraph, Operator, Tensor, ops

from hidet_dist.compile.cuda.rows import RowNormOp, RowRmsNormOp, RowSoftmaxOp
from hidet_dist.patterns.rows import NORM, RMS_NORM, SOFTMAX, rows_of
from hidet_dist.rewriting import Build, Repeated, Uses, replace_operators

_KERNELS: dict[str, type[Operator]] = {SOFTMAX: RowSoftmaxOp, NORM: RowNormOp, RMS_NORM: RowRmsNormOp}


def rows_in_one_kernel(graph: FlowGraph) -> FlowGraph:
    """Return an equivalent graph with softmax and norms along the last dim as one operator each."""
    repeated = Repeated()

    def replaced(op: Operator, uses: Uses) -> tuple[list[Tensor], Build] | None:
        match = rows_of(op, uses)
        if match is None:
            return None
        kind, epsilon, dtype = _KERNELS[match.kind], match.epsilon, op.outputs[0].dtype

        def built(x: Tensor) -> list[Tensor]:
            wide = ops.cast(x, "float32")
            fused = kind(wide) if epsilon is None else kind(wide, epsilon)
            return [ops.cast(fused.outputs[0], dtype)]

        def build(inputs: list[Tensor]) -> Tensor:
            return repeated((kind, epsilon, dtype.name), inputs, lambda: built(*inputs))[0]

        return [match.x], build

    return replace_operators(graph, replaced)
