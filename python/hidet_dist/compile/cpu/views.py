"""Strided views of tensors: a kernel reads the source of a view directly, without the operators in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hidet.graph import Operator, Tensor
from hidet.graph.ops.transform import (
    PermuteDimsOp,
    RearrangeOp,
    StridedSliceOp,
)
from hidet.graph.ops.transpose2d import TransposeOp2D
from hidet.utils import prod

from hidet_dist.spec.extents import Extent, extents_of, same_extent
from hidet_dist.traits import Moves, traits_of


@dataclass(frozen=True)
class View:
    """A tensor as ``source`` with strides and an offset, in elements; with symbolic dims these are expressions."""

    source: Tensor
    shape: tuple[Extent, ...]
    strides: tuple[Extent, ...]
    offset: Extent

    @property
    def is_fixed(self) -> bool:
        """Whether the shape, the strides and the offset are numbers."""
        return all(isinstance(value, int) for value in (*self.shape, *self.strides, self.offset))

    def reshaped(self, shape: tuple[Extent, ...]) -> View | None:
        """Reshape the view; None if that needs a copy for some sizes."""
        if not self.is_fixed or not all(isinstance(size, int) for size in shape):
            return _reshaped(self, shape)
        try:
            seen = _meta(self).view(shape)
        except RuntimeError:
            return None
        return View(self.source, tuple(seen.shape), tuple(seen.stride()), int(seen.storage_offset()))


def view_of(tensor: Tensor, keeps: Callable[[Operator], bool] = lambda _: False) -> View:
    """View a tensor as the furthest tensor upstream whose elements it only rearranges; at least as itself.

    Operators for which ``keeps`` holds are passed through: each element of their output is computed from the element
    of their input at the same index.
    """
    chain: list[Operator] = []
    source = tensor
    best = _view(source, [], keeps)
    while source.op is not None and len(source.op.inputs) == 1:
        chain.insert(0, source.op)
        source = source.op.inputs[0]
        view = _view(source, chain, keeps)
        if view is None:
            break
        best = view
    assert best is not None
    return best


def _meta(view: View) -> torch.Tensor:
    # Strides without memory: PyTorch's meta tensors follow views exactly and refuse what is none.
    return torch.empty(0, device="meta").as_strided(view.shape, view.strides, view.offset)


def contiguous(source: Tensor) -> View:
    """The whole of a tensor, row-major."""
    shape = extents_of(source)
    return View(source, shape, _packed(shape), 0)


def _packed(shape: tuple[Extent, ...]) -> tuple[Extent, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _reshaped(view: View, shape: tuple[Extent, ...]) -> View | None:
    """Reshape a view from its last dim to its first: contiguous dims may be cut anew, others must stay."""
    packed = _packed(view.shape)
    dims = zip(view.shape, view.strides, packed, strict=True)
    if all((isinstance(size, int) and size == 1) or same_extent(a, b) for size, a, b in dims):
        return View(view.source, shape, _packed(shape), view.offset)
    # All dims but the last as one, for a tall matrix.
    if len(shape) == 2 and len(view.shape) > 2 and same_extent(shape[-1], view.shape[-1]):
        for dim in range(len(view.shape) - 2):
            if not same_extent(view.strides[dim], view.shape[dim + 1] * view.strides[dim + 1]):
                return None
        return View(view.source, shape, view.strides[-2:], view.offset)
    return None


def _view(source: Tensor, chain: list[Operator], keeps: Callable[[Operator], bool]) -> View | None:
    if not all(isinstance(size, int) for x in (source, *(op.outputs[0] for op in chain)) for size in extents_of(x)):
        view: View | None = contiguous(source)
        for op in chain:
            view = None if view is None else view if keeps(op) else _apply_symbolic(op, view)
        return view
    seen: torch.Tensor | None = torch.empty([int(size) for size in source.shape], device="meta")
    for op in chain:
        seen = None if seen is None else seen if keeps(op) else _apply(op, seen)
    if seen is None:
        return None
    return View(source, tuple(seen.shape), tuple(seen.stride()), int(seen.storage_offset()))


def _apply(op: Operator, x: torch.Tensor) -> torch.Tensor | None:
    """Apply an operator to a strided tensor; None if the result is not a view of it."""
    shape = [int(size) for size in op.outputs[0].shape]
    try:
        if traits_of(op).moves is Moves.RESHAPE:
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


def _apply_symbolic(op: Operator, view: View) -> View | None:
    """Apply an operator to a view with symbolic dims, as :func:`_apply` does."""
    shape = extents_of(op.outputs[0])
    if traits_of(op).moves is Moves.RESHAPE:
        return view.reshaped(shape)
    axes: list[int] | None = None
    if isinstance(op, PermuteDimsOp):
        axes = list(op.attrs["axes"])
    elif isinstance(op, TransposeOp2D):
        axes = [1, 0]
    elif isinstance(op, RearrangeOp) and all(len(dims) == 1 for dims in op.attrs["plan"]):
        axes = [dims[0] for dims in op.attrs["plan"]]
    if axes is not None:
        return View(view.source, shape, tuple(view.strides[axis] for axis in axes), view.offset)
    if isinstance(op, StridedSliceOp):
        strides, offset = list(view.strides), view.offset
        for axis, start, step in zip(op.attrs["axes"], op.attrs["starts"], op.attrs["strides"], strict=True):
            if not all(isinstance(value, int) for value in (start, step)) or start < 0 or step < 1:
                return None
            offset = offset + start * strides[axis]
            strides[axis] = strides[axis] * step
        return View(view.source, shape, tuple(strides), offset)
    return None
