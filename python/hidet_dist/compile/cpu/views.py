"""Strided views: which producers of a tensor only rename its memory, so that a kernel can read through them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hidet.graph import Operator, Tensor
from hidet.graph.ops.transform import (
    FlattenOp,
    PermuteDimsOp,
    RearrangeOp,
    ReshapeOp,
    SqueezeOp,
    StridedSliceOp,
    UnsqueezeOp,
)
from hidet.graph.ops.transpose2d import TransposeOp2D


@dataclass(frozen=True)
class View:
    """A tensor seen as ``source`` with strides and an offset, all in elements."""

    source: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def reshaped(self, shape: tuple[int, ...]) -> View | None:
        """The view in another shape, or None where that would need a copy."""
        try:
            seen = _meta(self).view(shape)
        except RuntimeError:
            return None
        return View(self.source, tuple(seen.shape), tuple(seen.stride()), int(seen.storage_offset()))


def view_of(tensor: Tensor) -> View:
    """The tensor as a view of the furthest tensor upstream that it only renames; at least of itself."""
    chain: list[Operator] = []
    source = tensor
    best = _view(source, [])
    while source.op is not None and len(source.op.inputs) == 1:
        chain.insert(0, source.op)
        source = source.op.inputs[0]
        found = _view(source, chain)
        if found is None:
            break
        best = found
    assert best is not None
    return best


def _meta(view: View) -> torch.Tensor:
    # Strides without memory: PyTorch's meta tensors follow views exactly and refuse what is none.
    return torch.empty(0, device="meta").as_strided(view.shape, view.strides, view.offset)


def _view(source: Tensor, chain: list[Operator]) -> View | None:
    seen: torch.Tensor | None = torch.empty([int(size) for size in source.shape], device="meta")
    for op in chain:
        seen = None if seen is None else _apply(op, seen)
    if seen is None:
        return None
    return View(source, tuple(seen.shape), tuple(seen.stride()), int(seen.storage_offset()))


def _apply(op: Operator, x: torch.Tensor) -> torch.Tensor | None:
    """What an operator makes of a strided tensor, or None where it is no view of it."""
    shape = [int(size) for size in op.outputs[0].shape]
    try:
        if isinstance(op, ReshapeOp | FlattenOp | SqueezeOp | UnsqueezeOp):
            return x.view(shape)
        if isinstance(op, PermuteDimsOp):
            return x.permute(tuple(op.attrs["axes"]))
        if isinstance(op, TransposeOp2D):
            return x.t()
        if isinstance(op, RearrangeOp):
            return x.permute([dim for dims in op.attrs["plan"] for dim in dims]).view(shape)
    except RuntimeError:
        return None
    if isinstance(op, StridedSliceOp) and all(int(stride) > 0 for stride in op.attrs["strides"]):
        for axis, start, end, stride in zip(
            op.attrs["axes"], op.attrs["starts"], op.attrs["ends"], op.attrs["strides"], strict=True
        ):
            x = x[(slice(None),) * axis + (slice(int(start), int(end), int(stride)),)]
        return x
    return None
