"""Softmax and norms as one kernel each: a row is read once, kept in registers, reduced in float32 and written once.

Rows are along the last dim. A row is computed by a warp, or by several to keep the elements per thread few. hidet fuses
masks, scales and casts into a kernel as its prologue, and scales, biases and casts as its epilogue. Each element is
read and written only once, so fusion computes nothing twice.
"""

from collections.abc import Callable, Sequence
from typing import Any, no_type_check

import hidet
from hidet.graph import Operator, Tensor
from hidet.graph.ops.normalize.norm import NormalizeTask
from hidet.graph.ops.softmax import SoftmaxTask
from hidet.graph.ops.utils import Task, TensorNode, compute, input_like, reduce
from hidet.ir import primitives
from hidet.ir.builders import StmtBuilder
from hidet.ir.dtypes import float32
from hidet.ir.expr import Expr, Var
from hidet.ir.module import IRModule
from hidet.ir.stmt import AssignStmt, Stmt
from hidet.utils import prod

from hidet_dist.partitioning.once import MadeOnce

_WARP = 32
_MOST_WARPS = 32  # warps of a block
_PER_THREAD = 8  # preferred elements of a row per thread
_LEAST_WARPS = 4  # warps of a block, so that the blocks that a multiprocessor can hold fill it


class _RowThreads:
    """The distribution of a tensor's rows among threads."""

    def __init__(self, shape: Sequence[Any]):
        self.length = int(shape[-1])
        self.outer = list(shape[:-1])
        self.rows = prod(self.outer) if self.outer else 1
        self.warps = 1
        while self.warps < _MOST_WARPS and self.length > self.warps * _WARP * _PER_THREAD:
            self.warps *= 2
        self.threads = self.warps * _WARP  # threads of a row
        self.per_thread = -(-self.length // self.threads)
        self.rows_of_block = max(1, _LEAST_WARPS // self.warps) if self.warps == 1 else 1
        self.block = self.threads * self.rows_of_block
        self.grid = (self.rows + self.rows_of_block - 1) // self.rows_of_block

    def place(self, row: Expr, column: Expr) -> list[Expr]:
        """The indices of an element of a row."""
        from hidet.lang import spatial

        return [*(spatial(*self.outer).map(row) if self.outer else ()), column]

    def reduced(self, value: Var, both: Callable[[Expr, Expr], Expr], shared: Expr, slot: int) -> Stmt:
        """Reduce ``value`` over all threads of a row in a fixed order, and give each of them the result.

        ``shared[slot]`` is memory for one number per warp, which a kernel uses only once.
        """
        from hidet.ir.expr import tensor_element
        from hidet.ir.stmt import BufferStoreStmt
        from hidet.lang.cuda import shfl_xor_sync, syncthreads, threadIdx

        builder = StmtBuilder()
        for lanes in (16, 8, 4, 2, 1):
            builder += AssignStmt(value, both(value, shfl_xor_sync(0xFFFFFFFF, value, lanes)))
        if self.warps > 1:
            with builder.if_then(threadIdx.x % _WARP == 0):
                builder += BufferStoreStmt(shared, [slot, threadIdx.x // _WARP], value)
            builder += syncthreads()
            builder += AssignStmt(value, tensor_element(shared, [slot, 0]))
            for warp in range(1, self.warps):
                builder += AssignStmt(value, both(value, tensor_element(shared, [slot, warp])))
        return builder.finish()


def _sum(a: Expr, b: Expr) -> Expr:
    return a + b


class RowSoftmaxTask(SoftmaxTask, metaclass=MadeOnce):
    """hidet's definition of softmax along the last dim of a float32 tensor."""

    def __init__(self, x: TensorNode):
        super().__init__(x, len(x.shape) - 1)
        self.name = "row_softmax"

    def implement_cuda(self, working_dir: str) -> IRModule:
        """A block computes whole rows."""
        from hidet.lang import attrs, grid, register_tensor, shared_tensor
        from hidet.lang.cuda import blockIdx, threadIdx

        shape = list(self.inputs[0].shape)
        rows = _RowThreads(shape)
        count, length, per_thread, threads = rows.rows, rows.length, rows.per_thread, rows.threads

        with hidet.script_module() as module:

            @no_type_check
            @hidet.script
            def row_softmax(x: float32[shape], y: float32[shape]):
                attrs.func_kind = "cuda_kernel"
                attrs.cuda.block_dim = rows.block
                attrs.cuda.grid_dim = rows.grid
                shared = shared_tensor("float32", shape=[2, rows.warps])
                values = register_tensor("float32", shape=[per_thread])
                row = blockIdx.x * rows.rows_of_block + threadIdx.x // threads
                first = threadIdx.x % threads
                if row < count:
                    most = float32.min_value
                    for k in grid(per_thread, "u+"):
                        if k * threads + first < length:
                            values[k] = x[rows.place(row, k * threads + first)]
                            most = primitives.max(most, values[k])
                    rows.reduced(most, primitives.max, shared, 0)
                    total = float32.zero
                    for k in grid(per_thread, "u+"):
                        if k * threads + first < length:
                            values[k] = primitives.exp(values[k] - most)
                            total += values[k]
                    rows.reduced(total, _sum, shared, 1)
                    for k in grid(per_thread, "u+"):
                        if k * threads + first < length:
                            y.write(rows.place(row, k * threads + first), values[k] / total)

        return module.ir_module()


class RowNormTask(NormalizeTask, metaclass=MadeOnce):
    """hidet's definition of a norm along the last dim: ``(x - mean) / sqrt(variance + epsilon)``, of float32."""

    def __init__(self, x: TensorNode, epsilon: float):
        super().__init__(x, [len(x.shape) - 1], epsilon, "float32")
        self.epsilon = epsilon
        self.name = "row_norm"

    def allow_prologue(self) -> bool:
        """Each element is read once."""
        return True

    def implement_cuda(self, working_dir: str) -> IRModule:
        """Build the kernel: a block computes whole rows, first the mean, then the variance."""
        return _norm(list(self.inputs[0].shape), self.epsilon, centred=True)


class RowRmsNormTask(Task, metaclass=MadeOnce):
    """The rows of a float32 tensor over their root mean square: ``x / sqrt(mean(x * x) + epsilon)``."""

    def __init__(self, x: TensorNode, epsilon: float):
        length = x.shape[-1]
        mean = compute(
            "mean_square",
            shape=x.shape[:-1],
            fcompute=lambda *at: reduce([length], lambda k: x[(*at, k)] * x[(*at, k)], "avg"),
        )
        y = compute("y", shape=x.shape, fcompute=lambda *at: x[at] * primitives.rsqrt(mean[at[:-1]] + float32(epsilon)))
        super().__init__("row_rms_norm", inputs=[x], outputs=[y], attributes={"epsilon": epsilon})
        self.epsilon = epsilon

    def implement_cuda(self, working_dir: str) -> IRModule:
        """A block computes whole rows."""
        return _norm(list(self.inputs[0].shape), self.epsilon, centred=False)


def _norm(shape: list[Any], epsilon: float, centred: bool) -> IRModule:
    from hidet.lang import attrs, grid, register_tensor, shared_tensor
    from hidet.lang.cuda import blockIdx, threadIdx

    rows = _RowThreads(shape)
    count, length, per_thread, threads = rows.rows, rows.length, rows.per_thread, rows.threads

    with hidet.script_module() as module:

        @no_type_check
        @hidet.script
        def row_norm(x: float32[shape], y: float32[shape]):
            attrs.func_kind = "cuda_kernel"
            attrs.cuda.block_dim = rows.block
            attrs.cuda.grid_dim = rows.grid
            shared = shared_tensor("float32", shape=[2, rows.warps])
            values = register_tensor("float32", shape=[per_thread])
            row = blockIdx.x * rows.rows_of_block + threadIdx.x // threads
            first = threadIdx.x % threads
            if row < count:
                total = float32.zero
                for k in grid(per_thread, "u+"):
                    if k * threads + first < length:
                        values[k] = x[rows.place(row, k * threads + first)]
                        if centred:
                            total += values[k]
                if centred:
                    rows.reduced(total, _sum, shared, 0)
                    for k in grid(per_thread, "u+"):
                        values[k] = values[k] - total / float32(length)
                squares = float32.zero
                for k in grid(per_thread, "u+"):
                    if k * threads + first < length:
                        squares += values[k] * values[k]
                rows.reduced(squares, _sum, shared, 1)
                factor = primitives.rsqrt(squares / float32(length) + float32(epsilon))
                for k in grid(per_thread, "u+"):
                    if k * threads + first < length:
                        y.write(rows.place(row, k * threads + first), values[k] * factor)

    return module.ir_module()


class RowSoftmaxOp(Operator):
    """Softmax along the last dim of a float32 tensor."""

    def __init__(self, x: Tensor):
        super().__init__(inputs=[x], attributes={}, task=RowSoftmaxTask(input_like(x, "x")))


class RowNormOp(Operator):
    """A norm along the last dim of a float32 tensor."""

    def __init__(self, x: Tensor, epsilon: float):
        task = RowNormTask(input_like(x, "x"), epsilon)
        super().__init__(inputs=[x], attributes={"epsilon": epsilon}, task=task)


class RowRmsNormOp(Operator):
    """The rows of a float32 tensor over their root mean square."""

    def __init__(self, x: Tensor, epsilon: float):
        task = RowRmsNormTask(input_like(x, "x"), epsilon)
        super().__init__(inputs=[x], attributes={"epsilon": epsilon}, task=task)
