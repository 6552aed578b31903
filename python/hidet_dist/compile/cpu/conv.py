"""Convolutions as products of filters with gathered columns; see ``hidet_dist/kernels/convolution.h``.

hidet's im2col writes all columns at once, which takes as much memory as the kernel's size times the input, and pads the
input in another pass. Here columns are gathered in blocks, and padding operators become part of the gathering.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hidet.graph import Operator, Tensor
from hidet.graph.ops.conv1d.conv1d import Conv1dOp
from hidet.graph.ops.conv2d.conv2d import Conv2dOp
from hidet.graph.ops.conv3d.conv3d import Conv3dOp
from hidet.graph.transforms import ResolveRule, register_resolve_rule

from hidet_dist.compat.native_call import STORE, Values
from hidet_dist.compile.cpu.active import is_active
from hidet_dist.compile.cpu.tiled import ELEMENT_TYPES, Epilogue, TiledOp
from hidet_dist.patterns.winograd import each_dim
from hidet_dist.spec.extents import Extent, extents_of
from hidet_dist.traits import traits_of

_SPATIAL = 3  # spatial dims of the kernel: fewer are preceded by dims of one


class ConvolutionOp(TiledOp):
    """``y[n, oc, ...] = sum x[n, ic, ...] w[oc, ic, ...]`` over one to three spatial dims, summed in float32.

    Parameters
    ----------
    x: Tensor
        [images, channels, ...], float32, float16 or bfloat16. ``others`` are the epilogue's inputs.
    w: Tensor
        [out_channels, channels / groups, ...].
    pads: sequence of int
        The zeros before the first element of each spatial dim; those after the last follow from ``out``.
    stride, dilation: sequence of int
        The stride and dilation of each spatial dim.
    groups: int
        The number of groups of channels, and of output channels.
    out: sequence of int or expression
        The spatial dims of ``y``.
    epilogue: Epilogue, optional
        The computation on each element of ``y``.
    """

    def __init__(
        self,
        x: Tensor,
        w: Tensor,
        *others: Tensor,
        pads: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        out: Sequence[Extent],
        epilogue: Epilogue | None = None,
    ):
        text = Values()
        images, channels, *inner = extents_of(x)
        out_channels, _, *kernel = extents_of(w)
        element = ELEMENT_TYPES[x.dtype.name]
        sizes = [text(value) for value in (images, channels, out_channels, groups)]
        dims = spatial_dims(text, inner, out, kernel, stride, dilation, pads)
        operand = f"(const {element} *)({{}})"
        statement = (
            f"const hidet_dist::kernels::Convolution convolution = {{{{ {', '.join(sizes + dims)} }}}}; "
            f"hidet_dist::kernels::convolve(convolution, {operand}, {operand}, {STORE});"
        )
        attributes: dict[str, Any] = {
            "pads": list(pads),
            "stride": list(stride),
            "dilation": list(dilation),
            "groups": groups,
            "out": list(out),
        }
        shape = [images, out_channels, *out]
        super().__init__(
            "convolution", x, w, others, shape, 2, "convolution.h", statement, text.values, True, epilogue, attributes
        )
        self.name = "BlasConvolution"


def spatial_dims(
    text: Values,
    inner: Sequence[Extent],
    out: Sequence[Extent],
    kernel: Sequence[Extent],
    stride: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[int],
) -> list[str]:
    """Write the arrays of a convolution's spatial dims in C++, in the order of the arguments, led by dims of one."""

    def three(values: Sequence[Extent], otherwise: int) -> str:
        missing = [otherwise] * (_SPATIAL - len(values))
        return f"{{{{ {', '.join(text(value) for value in [*missing, *values])} }}}}"

    return [*(three(values, 1) for values in (inner, out, kernel, stride, dilation)), three(pads, 0)]


@dataclass(frozen=True)
class DescribedConvolution:
    """A convolution of hidet.

    Attributes
    ----------
    source: the tensor that it reads, before it is padded.
    attributes: those of :class:`ConvolutionOp`.
    """

    source: Tensor
    attributes: dict[str, Any]


def convolution_of(op: Operator) -> DescribedConvolution:
    """Describe a convolution of hidet; padding before it is part of it."""
    x, w = op.inputs
    spatial = len(w.shape) - 2
    pads = list(op.attrs.get("padding", [0] * spatial))[:spatial]
    source, before = _unpadded(x)
    attributes = {
        "pads": [a + b for a, b in zip(pads, before, strict=True)],
        "stride": each_dim(op, "stride"),
        "dilation": each_dim(op, "dilations"),
        "groups": int(op.attrs["groups"]),
        "out": list(extents_of(op.outputs[0])[2:]),
    }
    return DescribedConvolution(source, attributes)


class _ConvolutionRule(ResolveRule):
    def resolve(self, op: Operator) -> list[Tensor] | None:
        x, w = op.inputs
        if not is_active(op) or x.dtype != w.dtype or x.dtype.name not in ELEMENT_TYPES:
            return None
        how = convolution_of(op)
        return [ConvolutionOp(how.source, w, **how.attributes).outputs[0]]


for _operator in (Conv1dOp, Conv2dOp, Conv3dOp):
    register_resolve_rule(_operator)(_ConvolutionRule)


def _unpadded(x: Tensor) -> tuple[Tensor, list[int]]:
    """Strip zero padding of spatial dims: return the tensor without it, and the zeros before each dim."""
    dims = len(x.shape)
    op = x.op
    if op is not None and traits_of(op).pads and op.attrs["value"] == 0.0:
        pads = list(op.attrs["pads"])
        if all(isinstance(pad, int) and pad >= 0 for pad in pads) and pads[:2] == pads[dims : dims + 2] == [0, 0]:
            return op.inputs[0], pads[2:dims]
    return x, [0] * (dims - 2)
