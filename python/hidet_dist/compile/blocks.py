"""Slices that are contiguous in memory: kernels read them in place, by the address at which they begin.

The keys of one layer in a cache of all layers, or its weights in a stack of them, are such blocks. A slice that is
fused into a kernel has its offset in the kernel's text, so that each layer would need a kernel of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import hidet
from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.opaque import OpaqueOperator
from hidet.graph.ops.transform import StridedSliceOp
from hidet.graph.ops.utils import input_like, tensor_input
from hidet.ir.builders import FunctionBuilder
from hidet.ir.expr import Var, is_constant
from hidet.ir.module import IRModule
from hidet.ir.type import void_p

from hidet_dist.compat.native_call import UnfusedTask
from hidet_dist.compile.states import UpdateInPlaceOp
from hidet_dist.rewriting import Uses, rewrite, uses_of
from hidet_dist.spec.extents import extents_of, same_extent


class BlockTask(UnfusedTask):
    """The task of a :class:`BlockOp`. Its kernel does nothing, and is the same for all blocks of these shapes."""

    def __init__(self, x: Any, shape: list[int]):
        super().__init__(
            "hidet_dist_block",
            [x],
            [tensor_input("y", x.type.dtype, shape)],
            attributes={"is_opaque": True},
            share_map={0: 0},
        )

    def implement_cuda(self, working_dir: str) -> IRModule:
        """Build the same launch function, which runs on the host."""
        return self.implement_cpu(working_dir)

    def implement_cpu(self, working_dir: str) -> IRModule:
        """Build a launch function that does nothing."""
        with FunctionBuilder("launch", kind="public") as builder:
            builder.extend_params([Var(tensor.name, void_p) for tensor in (*self.inputs, *self.outputs)])
        return IRModule(functions={"launch": builder.func})


class BlockOp(OpaqueOperator):
    """A block of the memory of ``x``, in place.

    Parameters
    ----------
    x: Tensor
        The tensor.
    start: int
        The first element of the block.
    shape: list of int
        The shape of the block.
    """

    def __init__(self, x: Tensor, start: int, shape: list[int]):
        task = BlockTask(input_like(x, "x"), shape)
        Operator.__init__(self, inputs=[x], attributes={"start": start, "shape": shape}, task=task)
        self.name = "Block"

    @property
    def start_bytes(self) -> int:
        """The bytes between the beginning of ``x`` and the block."""
        return int(self.attrs["start"]) * int(self.inputs[0].dtype.nbytes)

    def block_of(self, x: Tensor) -> Tensor:
        """Copy the block out of a value of ``x``. The kernel does not: a launcher passes the block's address on."""
        start, shape = self.attrs["start"], self.attrs["shape"]
        block = x.torch().flatten()[start : start + math.prod(shape)].reshape(shape)
        return hidet.from_torch(block.clone())

    def run_torch(self) -> list[Tensor]:
        """Copy the block out of a constant."""
        return [self.block_of(self.inputs[0])]


def blocks_in_place(graph: FlowGraph, alignment_bytes: int = 1) -> FlowGraph:
    """Replace slices by :class:`BlockOp`; return the graph itself if there is none to replace.

    A slice is replaced if its elements are a block of memory, its input is in memory anyway (an input of the graph, or
    a tensor with other readers), and it does not become an output of the graph. The block must begin at a multiple of
    ``alignment_bytes`` from the beginning of its input: kernels for GPUs read several elements at once.
    """
    uses = uses_of(graph)

    def make(node: Operator, replaced: Mapping[Tensor, Tensor]) -> Tensor | None:
        if not isinstance(node, StridedSliceOp):
            return None
        (x,), (y,) = node.inputs, node.outputs
        start, shape = _start(node), [int(extent) for extent in y.shape if is_constant(extent)]
        if start is None or len(shape) != len(y.shape) or start * int(x.dtype.nbytes) % alignment_bytes:
            return None
        if (x.op is not None and len(set(uses[x])) < 2) or _becomes_output(y, uses):
            return None
        if any(isinstance(user, UpdateInPlaceOp) for user in uses[x]):  # the block would change with the state
            return None
        return BlockOp(replaced.get(x, x), start, shape).outputs[0]

    return rewrite(graph, make)


def _start(node: StridedSliceOp) -> int | None:
    """Return the first element of a slice that is a block of memory and not the whole tensor; None for any other."""
    before, after = extents_of(node.inputs[0]), extents_of(node.outputs[0])
    starts = [0] * len(before)
    for axis, start, stride in zip(*(node.attrs[key] for key in ("axes", "starts", "strides")), strict=True):
        if not is_constant(start, stride) or int(stride) != 1:
            return None
        starts[axis] = int(start)
    cut = [dim for dim in range(len(before)) if starts[dim] or not same_extent(before[dim], after[dim])]
    if not cut or any(not same_extent(after[dim], 1) for dim in range(cut[-1])):
        return None
    element, stride = 0, 1
    for dim in reversed(range(len(before))):
        if starts[dim]:
            element += starts[dim] * stride
        extent = before[dim]
        if dim and not isinstance(extent, int):
            return None
        stride *= extent if isinstance(extent, int) else 1
    return element


def _becomes_output(x: Tensor, uses: Uses) -> bool:
    """Whether a tensor is an output of the graph, or shares its memory with one."""
    return any(
        user is None or (bool(user.share_map) and any(_becomes_output(y, uses) for y in user.outputs))
        for user in uses.get(x, ())
    )
