"""Convolutions of images with channels last, by filters in panels; see ``hidet_dist/kernels/channels_last.h``.

Graphs have the channels of images second, one plane after the other. Kernels of convolutions are faster if the channels
of a pixel lie beside one another: they compute a vector of output channels at once, from panels of filters, which are
written once with the artifacts. Each operator between convolutions can run in either layout, by its definition. The
layouts are chosen so that the fewest bytes change theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from hidet.graph import FlowGraph, Operator, Tensor, ops
from hidet.graph.ops.arithmetic import MultiplyOp
from hidet.graph.ops.conv1d.conv1d import Conv1dOp
from hidet.graph.ops.conv2d.conv2d import Conv2dOp
from hidet.graph.ops.conv3d.conv3d import Conv3dOp

from hidet_dist.compat.native_call import STORE, Values
from hidet_dist.compile.cpu.conv import convolution_of, spatial_dims
from hidet_dist.compile.cpu.layouts import (
    SECOND,
    TO_LAST,
    TO_SECOND,
    Layouts,
    choose_layouts,
    keeps_order,
)
from hidet_dist.compile.cpu.relaid import channels_last_axes, channels_second_axes, relaid
from hidet_dist.compile.cpu.tiled import ELEMENT_TYPES, Epilogue, TiledOp
from hidet_dist.partitioning.operators import CommunicationOp
from hidet_dist.patterns.winograd import has_winograd
from hidet_dist.rewriting import Uses, copy_operator, only_user, uses_of
from hidet_dist.spec.extents import Extent, extents_of, same_shape
from hidet_dist.traits import traits_of

_CODES = {"float32": "HIDET_DIST_F32", "float16": "HIDET_DIST_F16", "bfloat16": "HIDET_DIST_BF16"}
_CONVOLUTIONS = (Conv1dOp, Conv2dOp, Conv3dOp)
_LEAST_GROUP = 4  # input channels of a group: runs of fewer are gathered one number at a time


class ChannelsLastConvolutionOp(TiledOp):
    """``y[n, ..., oc] = sum x[n, ..., ic] w[oc, ic, ...]`` over one to three spatial dims, summed in float32.

    Parameters
    ----------
    x: Tensor
        [images, ..., channels], float32, float16 or bfloat16.
    w: Tensor
        [out_channels, channels / groups, ...]; or the elements of its panels.
    others: Tensor
        With ``scaled``, first float32[images, 1, ..., channels], by which ``x`` is multiplied; then the epilogue's
        inputs.
    sizes: sequence of int
        Those of the filters: [out_channels, channels / groups, ...].
    pads, stride, dilation: sequence of int
        The zeros before the first element of each spatial dim, its stride and its dilation.
    groups: int
        The number of groups of channels, and of output channels.
    out: sequence of int or expression
        The spatial dims of ``y``.
    width: int
        The columns of a panel; 0 if ``w`` does not lie in panels.
    winograd: bool
        Whether the panels are those of transformed filters; see ``hidet_dist/winograd.h``.
    scaled: bool
        Whether ``x`` is multiplied by a number for each image and channel first; see :func:`scale_of`.
    epilogue: Epilogue, optional
        The computation on each element of ``y``.
    """

    calls_openblas: ClassVar[bool] = False

    def __init__(
        self,
        x: Tensor,
        w: Tensor,
        *others: Tensor,
        sizes: Sequence[int],
        pads: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        out: Sequence[Extent],
        width: int = 0,
        winograd: bool = False,
        scaled: bool = False,
        epilogue: Epilogue | None = None,
    ):
        text = Values()
        images, *inner, channels = extents_of(x)
        out_channels, _, *kernel = sizes
        counts = [text(value) for value in (images, channels, out_channels, groups)]
        dims = spatial_dims(text, inner, out, kernel, stride, dilation, pads)
        codes = [_CODES[x.dtype.name], _CODES[w.dtype.name]]
        function, header = f"convolve_channels_last<{width}, {ELEMENT_TYPES[w.dtype.name]}>", "channels_last.h"
        if winograd:
            function, header = f"convolve_winograd<{width}>", "winograd.h"
        scale = ", (const float *)({})" if scaled else ""
        statement = (
            f"const hidet_dist_convolution convolution = {{{{ {', '.join([*counts, *dims, '{}', '{}', *codes])} }}}}; "
            f"hidet_dist::kernels::{function}(convolution, {STORE}{scale});"
        )
        attributes: dict[str, Any] = {
            "sizes": list(sizes),
            "pads": list(pads),
            "stride": list(stride),
            "dilation": list(dilation),
            "groups": groups,
            "out": list(out),
            "width": width,
            "winograd": winograd,
            "scaled": scaled,
        }
        shape = [images, *out, out_channels]
        super().__init__(
            "channels_last",
            x,
            w,
            others[scaled:],
            shape,
            len(shape) - 1,
            header,
            statement,
            text.values,
            True,
            epilogue,
            attributes,
            others[:scaled],
        )
        self.name = "PanelConvolution"

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel is a group by itself."""
        sizes, groups = self.attrs["sizes"], self.attrs["groups"]
        return bool(groups > 1 and sizes[0] == groups and sizes[1] == 1)

    @property
    def has_winograd(self) -> bool:
        """Whether it takes fewer multiplications by Winograd's minimal filtering, with float32 filters."""
        given = (self.attrs[name] for name in ("sizes", "stride", "dilation", "groups", "out"))
        return all(x.dtype.name == "float32" for x in self.inputs[:2]) and has_winograd(*given)


def channels_last(graph: FlowGraph, weights: Collection[Tensor]) -> FlowGraph:
    """Let convolutions by some ``weights``, and what lies between them, run with the channels last.

    Returns ``graph`` itself if there is no such convolution.
    """
    constant = set(weights)
    convolutions = {node for node in graph.nodes if _runs_by_panels(node, constant)}
    if not convolutions:
        return graph
    return _LayoutRewriter(graph, choose_layouts(graph, convolutions)).graph()


def _runs_by_panels(op: Operator, weights: Collection[Tensor]) -> bool:
    if not isinstance(op, _CONVOLUTIONS) or op.build_target != "cpu":
        return False
    x, w = op.inputs
    if w not in weights or x.dtype != w.dtype or x.dtype.name not in ELEMENT_TYPES:
        return False
    sizes = extents_of(w)
    if not all(isinstance(size, int) for size in (*sizes, extents_of(x)[1])):
        return False
    groups = int(op.attrs["groups"])
    return groups == 1 or int(sizes[1]) >= _LEAST_GROUP or (int(sizes[1]) == 1 and int(sizes[0]) == groups)


def scale_of(node: Operator, uses: Uses) -> tuple[Tensor, Tensor] | None:
    """Return the factors of a convolution's input, if it is scaled channel by channel for this convolution alone.

    The convolution is then of single pixels, in float32 and not in groups, so that it can multiply a tile's pixels by
    the scale before it multiplies them by the filters: networks with squeeze and excitation have such ones.

    Returns
    -------
    What is scaled, [images, channels, ...], and the scale, [images, channels, 1, ...]; None for another convolution.
    """
    how = convolution_of(node)
    multiply, attributes, kernel = how.source.op, how.attributes, extents_of(node.inputs[1])[2:]
    if not isinstance(multiply, MultiplyOp) or only_user(how.source, uses) is not node:
        return None
    if attributes["groups"] != 1 or any(n != 1 for n in (*kernel, *attributes["stride"])) or any(attributes["pads"]):
        return None
    shape = extents_of(how.source)
    if not same_shape(attributes["out"], shape[2:]):  # there are zeros behind the last pixels
        return None
    of_channels = [*shape[:2], *[1] * len(kernel)]
    for x, scale in (multiply.inputs, multiply.inputs[::-1]):
        if same_shape(extents_of(x), shape) and same_shape(extents_of(scale), of_channels):
            return (x, scale) if x.dtype.name == scale.dtype.name == "float32" else None
    return None


class _LayoutRewriter:
    """The rewriting of a graph to chosen layouts. Tensors with channels second are those of the graph, or copies."""

    def __init__(self, graph: FlowGraph, layouts: Mapping[Operator, Layouts]):
        self.original = graph
        self.layouts = layouts
        self.uses = uses_of(graph)
        self.second: dict[Tensor, Tensor] = {}
        self.last: dict[Tensor, Tensor] = {}
        self.known: dict[Any, Operator] = {}  # equal operators of equal layers are made once

    def graph(self) -> FlowGraph:
        """Rewrite the graph."""
        for node in self.original.nodes:
            layouts = self.layouts[node]
            if layouts == SECOND:
                inputs = [self.as_second(x) for x in node.inputs]
                if any(new is not old for new, old in zip(inputs, node.inputs, strict=True)):
                    self.second.update(zip(node.outputs, copy_operator(node, inputs), strict=True))
            elif layouts == TO_SECOND:
                self.second[node.outputs[0]] = self.as_last(node.inputs[0])
            elif layouts == TO_LAST:
                self.last[node.outputs[0]] = self.as_second(node.inputs[0])
            else:
                self.run_last(node)
        result = FlowGraph([self.as_second(y) for y in self.original.outputs], self.original.inputs)
        result.update_nodes()
        return result

    def as_second(self, x: Tensor) -> Tensor:
        """Return a tensor of the original graph with the channels second."""
        if x not in self.second:
            if x not in self.last:
                return x
            self.second[x] = _moved(self.last[x], extents_of(x), channels_second_axes(len(x.shape)), keeps_order(x))
        return self.second[x]

    def as_last(self, x: Tensor) -> Tensor:
        """Return a tensor of the original graph with the channels last."""
        if x not in self.last:
            axes, extents = channels_last_axes(len(x.shape)), extents_of(x)
            shape = [extents[axis] for axis in axes]
            self.last[x] = _moved(self.as_second(x), shape, axes, keeps_order(x))
        return self.last[x]

    def run_last(self, node: Operator) -> None:
        """Make an operator with channels last."""
        (y,) = node.outputs
        if isinstance(node, _CONVOLUTIONS):
            self.last[y] = self.convolution(node)
            return
        if isinstance(node, CommunicationOp):
            (self.last[y],) = node.reforward([self.as_last(node.inputs[0])])
            return
        rank = len(node.inputs[0].shape if traits_of(node).in_any_layout else y.shape)  # a reduction may drop dims
        moved = [
            number
            for number, x in enumerate(node.inputs)
            if len(x.shape) == rank or (traits_of(node).elementwise and 0 < len(x.shape) < rank)
        ]
        inputs = [
            self.as_last(self.widened(x, rank)) if number in moved else self.as_second(x)
            for number, x in enumerate(node.inputs)
        ]
        key = type(node), node.task, tuple(moved)
        if key in self.known:
            (result,) = copy_operator(self.known[key], inputs)
        else:
            self.known[key] = relaid(node, inputs, moved, rank)
            (result,) = self.known[key].outputs
        (self.last if len(y.shape) == rank else self.second)[y] = result

    def widened(self, x: Tensor, rank: int) -> Tensor:
        """Return a tensor with leading dims of one entry, so that it has ``rank`` dims."""
        if len(x.shape) == rank:
            return x
        return ops.reshape(self.as_second(x), [*[1] * (rank - len(x.shape)), *extents_of(x)])

    def convolution(self, node: Operator) -> Tensor:
        """Make a convolution with channels last."""
        how, w = convolution_of(node), self.as_second(node.inputs[1])
        x, *scale = scale_of(node, self.uses) or (how.source,)
        inputs = [self.as_last(x), w, *map(self.as_last, scale)]
        attributes: dict[str, Any] = {
            "sizes": [int(size) for size in extents_of(node.inputs[1])],
            **how.attributes,
            "scaled": bool(scale),
        }
        key = ChannelsLastConvolutionOp, str([*map(extents_of, inputs), inputs[0].dtype.name, attributes])
        if key in self.known:
            return copy_operator(self.known[key], inputs)[0]
        y: Tensor = ChannelsLastConvolutionOp(*inputs, **attributes).outputs[0]
        self.known[key] = y.op
        return y


def _moved(x: Tensor, shape: Sequence[Extent], axes: Sequence[int], keeps_order: bool) -> Tensor:
    y: Tensor = ops.reshape(x, list(shape)) if keeps_order else ops.permute_dims(x, list(axes))
    return y
