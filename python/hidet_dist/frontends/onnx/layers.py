"""Lowerings of convolutions, pooling, normalization, resampling and recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from hidet import ops
from hidet.graph import Tensor

from hidet_dist import operators
from hidet_dist.frontends.onnx.nodes import MICROSOFT, ONNX, Node, bounded, dims_of, lowers, norm_order, rank_of, static
from hidet_dist.frontends.refusals import Invalid, Refused
from hidet_dist.operators import elementwise, reductions, shaping
from hidet_dist.operators.dtypes import constant
from hidet_dist.operators.pooling import WindowPoolOp, along_dim
from hidet_dist.operators.recurrent import Activation, LstmVariant, gru, lstm, rnn
from hidet_dist.operators.resampling import cubic_weights, linear_weights, stretched_weights
from hidet_dist.spec.extents import extents_of


def pads_of(node: Node, x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Return the padding of the spatial dims as the attribute ``pads`` has it: all beginnings, then all ends."""
    dims, auto_pad = len(kernel), node.text("auto_pad", "NOTSET")
    if auto_pad == "NOTSET":
        return [int(n) for n in node.get("pads", [0] * (2 * dims))]
    if auto_pad == "VALID":
        return [0] * (2 * dims)
    before, after = [], []
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        size = static(x, dim + 2, "a dim with automatic padding")
        total = max((-(-size // s) - 1) * s + d * (k - 1) + 1 - size, 0)
        less, more = total // 2, total - total // 2
        before.append(less if auto_pad == "SAME_UPPER" else more)
        after.append(more if auto_pad == "SAME_UPPER" else less)
    return before + after


def _padded(x: Tensor, pads: Sequence[int], value: float = 0.0) -> Tensor:
    """Pad the spatial dims; ``pads`` is as the attribute, and negative numbers cut off."""
    dims = len(pads) // 2
    return operators.constant_pad_nd(
        x, [n for dim in reversed(range(dims)) for n in (pads[dim], pads[dims + dim])], value
    )


def groups_of(node: Node) -> int:
    """Return the number of groups of a convolution. Raises Invalid for less than 1."""
    groups = int(node.get("group", 1))
    if groups < 1:
        raise Invalid(f"the convolution has {groups} groups; it must have 1 or more")
    return groups


@lowers("Conv")
def convolved(node: Node) -> Tensor:
    """Lower a convolution."""
    x, weight = node.tensor(0), node.tensor(1)
    kernel = [int(n) for n in extents_of(weight)[2:]]
    ones = [1] * len(kernel)
    stride, dilation = list(node.get("strides", ones)), list(node.get("dilations", ones))
    pads = pads_of(node, x, kernel, stride, dilation)
    before, after = pads[: len(kernel)], pads[len(kernel) :]
    if before != after:
        x, before = _padded(x, pads), [0] * len(kernel)
    return operators.convolution(x, weight, node.optional(2), stride, before, dilation, groups=groups_of(node))


@lowers("ConvTranspose")
def _conv_transpose(node: Node) -> Tensor:
    x, weight, bias = node.tensor(0), node.tensor(1), node.optional(2)
    kernel = [int(n) for n in extents_of(weight)[2:]]
    dims, ones = len(kernel), [1] * len(kernel)
    stride, dilation = list(node.get("strides", ones)), list(node.get("dilations", ones))
    output_padding, groups = list(node.get("output_padding", [0] * dims)), groups_of(node)
    pads = _transposed_pads(node, x, kernel, stride, dilation, output_padding)
    y = operators.convolution(x, weight, None, stride, [0] * dims, dilation, True, output_padding, groups)
    y = _padded(y, [-n for n in pads])
    return y if bias is None else elementwise.add(y, ops.reshape(bias, [-1, *ones]))


def _transposed_pads(
    node: Node, x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], extra: Sequence[int]
) -> list[int]:
    """Return what is cut off from a transposed convolution, as the attribute ``pads``; negative numbers add zeros."""
    dims, auto_pad, requested = len(kernel), node.text("auto_pad", "NOTSET"), node.get("output_shape", None)
    if requested is None and auto_pad in ("NOTSET", "VALID"):
        return [int(n) for n in node.get("pads", [0] * (2 * dims))]
    sizes = [static(x, dim + 2, "a dim with automatic padding") for dim in range(dims)]
    if requested is None:
        requested = [size * s for size, s in zip(sizes, stride, strict=True)]
    before, after = [], []
    for size, k, s, d, e, target in zip(sizes, kernel, stride, dilation, extra, requested[-dims:], strict=True):
        total = s * (size - 1) + e + (k - 1) * d + 1 - int(target)
        less = max(total, 0) // 2
        # What is missing is added behind.
        first = less if auto_pad == "SAME_UPPER" else max(total, 0) - less
        before.append(first)
        after.append(total - first)
    return before + after


@lowers("MaxPool")
def _max_pool(node: Node) -> Tensor:
    if len([name for name in node.outputs if name]) > 1:
        raise Refused("the output Indices of a maximum pooling is not supported")
    x, window = node.tensor(0), _window(node, node.tensor(0))
    dims = len(window.kernel)
    padding = window.before
    if window.before != window.after:
        lowest = -math.inf if x.dtype.is_float() else int(np.iinfo(x.dtype.name).min)
        x, padding = _padded(x, [*window.before, *window.after], lowest), [0] * dims
    return operators.max_pool(x, dims, window.kernel, window.stride, padding, window.dilation, window.ceil_mode)


class _Window(NamedTuple):
    """The attributes of a pooling operator, one number for each spatial dim."""

    kernel: list[int]
    stride: list[int]
    dilation: list[int]
    before: list[int]
    after: list[int]
    ceil_mode: bool


def _window(node: Node, x: Tensor) -> _Window:
    kernel = [int(n) for n in node.attributes["kernel_shape"]]
    ones = [1] * len(kernel)
    stride, dilation = list(node.get("strides", ones)), list(node.get("dilations", ones))
    pads = pads_of(node, x, kernel, stride, dilation)
    before, after = pads[: len(kernel)], pads[len(kernel) :]
    return _Window(kernel, stride, dilation, before, after, bool(node.get("ceil_mode", 0)))


@lowers("AveragePool")
def _average_pool(node: Node) -> Tensor:
    return average_pool(node, node.tensor(0))


def average_pool(node: Node, x: Tensor) -> Tensor:
    """Average a tensor over the windows of a node. Raises Refused for unsupported ones."""
    window = _window(node, x)
    dims, counts_padding = len(window.kernel), bool(node.get("count_include_pad", 0))
    if window.before == window.after and window.dilation == [1] * dims:
        return operators.avg_pool(
            x, dims, window.kernel, window.stride, window.before, window.ceil_mode, counts_padding
        )
    total = _window_sums(x, window)
    counts = np.ones([], np.int64)
    for dim in range(dims):
        size, out = static(x, dim + 2, "a dim that is pooled"), static(total, dim + 2, "a dim that is pooled")
        at = np.arange(out).reshape(-1, 1) * window.stride[dim] + np.arange(window.kernel[dim]) * window.dilation[dim]
        at -= window.before[dim]
        low, high = (-window.before[dim], size + window.after[dim]) if counts_padding else (0, size)
        counts = counts[..., None] * ((at >= low) & (at < high)).sum(1)
    return elementwise.div(total, constant(counts, total.dtype, total))


def _window_sums(x: Tensor, window: _Window) -> Tensor:
    """Sum a tensor over windows."""
    dims = len(window.kernel)
    sizes = [static(x, dim + 2, "a dim that is pooled") for dim in range(dims)]
    out = []
    for size, k, s, d, before, after in zip(sizes, *window[:5], strict=True):
        span = size + before + after - d * (k - 1) - 1
        count = -(-span // s) + 1 if window.ceil_mode else span // s + 1
        # A window must begin within the input or the padding before it.
        out.append(count - 1 if window.ceil_mode and (count - 1) * s >= size + before else count)
    x = _padded(x, [*window.before, *window.after])
    none = [0] * dims
    return WindowPoolOp(x, "avg", window.kernel, window.stride, none, window.dilation, out, divisor=1).outputs[0]


@lowers("LpPool")
def _lp_pool(node: Node) -> Tensor:
    x, order = node.tensor(0), norm_order(node)
    return elementwise.pow(_window_sums(_power(x, order), _window(node, x)), 1.0 / order)


def _power(x: Tensor, order: int) -> Tensor:
    return elementwise.pow(elementwise.abs(x), float(order))


@lowers("GlobalLpPool")
def _global_lp_pool(node: Node) -> Tensor:
    x = node.tensor(0)
    return reductions.linalg_vector_norm(x, norm_order(node), list(range(2, rank_of(x))), True)


@lowers("LRN")
def _lrn(node: Node) -> Tensor:
    x, size = node.tensor(0), int(node.attributes["size"])
    batch, channels, *inner = extents_of(x)
    area: Any = math.prod(inner)
    squares = operators.constant_pad_nd(
        ops.reshape(elementwise.mul(x, x), [batch, 1, channels, area]), [0, 0, (size - 1) // 2, size // 2]
    )
    window, one = [size, 1], [1, 1]
    channel_count, places = static(x, 1, "the channels"), static(squares, 3, "the elements of a channel")
    mean = WindowPoolOp(squares, "avg", window, one, [0, 0], one, [channel_count, places], divisor=size).outputs[0]
    around = ops.reshape(mean, [batch, channels, *inner])
    base = elementwise.add(elementwise.mul(around, node.get("alpha", 1e-4)), node.get("bias", 1.0))
    return elementwise.div(x, elementwise.pow(base, node.get("beta", 0.75)))


@lowers("MeanVarianceNormalization")
def _mean_variance_normalization(node: Node) -> Tensor:
    x = node.tensor(0)
    axes = dims_of(node.get("axes", [0, 2, 3]), rank_of(x))
    variance, mean = reductions.var_mean(x, axes, 0, keepdim=True)
    # The constant is of the operator's definition.
    return elementwise.div(elementwise.sub(x, mean), elementwise.add(elementwise.sqrt(variance), 1e-9))


@lowers("GridSample")
def _grid_sample(node: Node) -> Tensor:
    x, grid = node.tensor(0), node.tensor(1)
    mode = node.text("mode", "linear")
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    if mode == "cubic" and rank_of(x) != 4:
        raise Refused("cubic sampling of other than images is not supported")
    for dim in range(2, rank_of(x)):
        static(x, dim, "a dim that is sampled")
    return operators.grid_sample(x, grid, mode, node.text("padding_mode", "zeros"), bool(node.get("align_corners", 0)))


@lowers("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(node: Node) -> Tensor:
    x = node.tensor(0)
    function = reductions.mean if node.operator == "GlobalAveragePool" else reductions.amax
    return function(x, list(range(2, rank_of(x))), True)


@lowers("BatchNormalization")
def _batch_normalization(node: Node) -> Tensor:
    old_training = node.opset < 14 and len([name for name in node.outputs if name]) > 1
    if node.get("training_mode", 0) or old_training:
        raise Refused("batch normalization in training mode is not supported: export the model in inference mode")
    if not node.get("spatial", 1):
        raise Refused("batch normalization of each element by itself (spatial=0) is not supported")
    x, scale, bias, mean, variance = (node.tensor(n) for n in range(5))
    return operators.batch_norm(x, scale, bias, mean, variance, node.get("epsilon", 1e-5))


@lowers("InstanceNormalization")
def _instance_normalization(node: Node) -> Tensor:
    return operators.instance_norm(node.tensor(0), node.tensor(1), node.tensor(2), node.get("epsilon", 1e-5))


@lowers("LayerNormalization", domains=(ONNX, MICROSOFT))
def _layer_normalization(node: Node) -> Any:
    x = node.tensor(0)
    axis = node.axis(rank_of(x), -1)
    shape = list(extents_of(x)[axis:])
    weight, bias, eps = node.optional(1), node.optional(2), node.get("epsilon", 1e-5)
    if len([name for name in node.outputs if name]) > 1:
        return operators.native_layer_norm(x, shape, weight, bias, eps)
    return operators.layer_norm(x, shape, weight, bias, eps)


@lowers("RMSNormalization")
def _rms_normalization(node: Node) -> Tensor:
    x = node.tensor(0)
    shape = list(extents_of(x)[node.axis(rank_of(x), -1) :])
    return operators.rms_norm(x, shape, node.optional(1), node.get("epsilon", 1e-5))


@lowers("GroupNormalization")
def _group_normalization(node: Node) -> Tensor:
    x, weight, bias = (node.tensor(n) for n in range(3))
    groups = int(node.attributes["num_groups"])
    channels = static(x, 1, "the channels")
    if node.opset < 21:  # older opsets have a scale and a bias for each group, not for each channel
        weight, bias = (shaping.repeat_interleave(values, channels // groups, 0) for values in (weight, bias))
    return operators.group_norm(x, groups, weight, bias, node.get("epsilon", 1e-5))


# Resampling

_MOST_WEIGHTS = 2**26  # of a dim that is interpolated: as of one of 4,096 elements that is made 16,384


def _input_coordinates(output_size: int, size: int, factor: float, transformation: str) -> np.ndarray:
    """Map each position of the output to a coordinate of the input.

    The formulas are those of ``coordinate_transformation_mode`` (https://onnx.ai/onnx/operators/onnx__Resize.html).
    """
    position = np.arange(output_size, dtype=np.float32)
    scale = np.float32(factor)
    unrounded = np.float32(size) * scale  # the size of the output before it is rounded down
    if transformation == "asymmetric":
        return position / scale
    if transformation == "align_corners":
        return position * np.float32(size - 1) / (unrounded - 1) if output_size > 1 else position * 0
    if transformation == "tf_half_pixel_for_nn":
        return (position + np.float32(0.5)) / scale
    if transformation == "pytorch_half_pixel" and output_size == 1:
        return position * 0
    if transformation in ("half_pixel", "pytorch_half_pixel"):
        return (position + np.float32(0.5)) / scale - np.float32(0.5)
    if transformation == "half_pixel_symmetric":
        adjustment = np.float32(output_size) / unrounded
        centre = np.float32(size) / 2
        return centre * (1 - adjustment) + (position + np.float32(0.5)) / scale - np.float32(0.5)
    raise Refused(f"the coordinate transformation {transformation!r} of Resize is not supported")


def _nearest(coordinates: np.ndarray, size: int, rounding: str) -> np.ndarray:
    """Round coordinates to indices of a dim, as ``nearest_mode`` says."""
    functions: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "round_prefer_floor": lambda v: np.ceil(v - 0.5),
        "round_prefer_ceil": lambda v: np.floor(v + 0.5),
        "floor": np.floor,
        "ceil": np.ceil,
    }
    if rounding not in functions:
        raise Refused(f"the rounding {rounding!r} of Resize is not supported")
    return np.clip(functions[rounding](coordinates), 0, size - 1).astype(np.int64)


class _Resizing(NamedTuple):
    """What is resized: dims, their sizes before and after, the factors, and the region of each that is taken."""

    axes: list[int]
    sizes: list[int]
    output_sizes: list[int]
    factors: list[float]
    regions: list[tuple[float, float]]


def _resizing(node: Node, x: Tensor) -> _Resizing:
    rank, given = rank_of(x), node.get("axes", None)
    axes = dims_of(given, rank) if given is not None else list(range(rank))
    sizes = [static(x, axis, "a dim that is resized") for axis in axes]
    roi, scales, requested = (1, 2, 3) if node.operator == "Resize" and node.opset >= 11 else (None, 1, None)
    regions = [(0.0, 1.0)] * len(axes)
    if roi is not None and node.text("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        bounds = [float(n) for n in node.known(roi, "the regions of Resize").reshape(-1)]
        regions = list(zip(bounds[: len(axes)], bounds[len(axes) :], strict=True))
    if (
        requested is not None
        and node.value(requested) is not None
        and len(node.known(requested, "the sizes of Resize"))
    ):
        output_sizes = [int(n) for n in node.known(requested, "the sizes of Resize")]
        factors = [output_size / size for output_size, size in zip(output_sizes, sizes, strict=True)]
        policy = node.text("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            factors = [min(factors) if policy == "not_larger" else max(factors)] * len(axes)
            output_sizes = [math.floor(size * factors[0] + 0.5) for size in sizes]
        return _Resizing(axes, sizes, output_sizes, factors, regions)
    factors = _scales(node, scales)
    parts = zip(sizes, factors, regions, strict=True)
    # In single precision, as the shape inference of ONNX and ONNX Runtime compute it.
    output_sizes = [
        math.floor(np.float32(size) * np.float32(factor) * np.float32(end - start))
        for size, factor, (start, end) in parts
    ]
    return _Resizing(axes, sizes, output_sizes, factors, regions)


def _scales(node: Node, number: int) -> list[float]:
    """Return the scales of a Resize, which are input ``number`` or an attribute."""
    if node.operator == "Upsample" and node.opset < 9:
        factors = [float(f) for f in node.attributes["scales"]]
    elif node.value(number) is not None:
        factors = [float(f) for f in node.known(number, "the scales of Resize")]
    else:
        raise Refused("Resize has neither sizes nor scales")
    if not all(0 < factor < math.inf for factor in factors):
        raise Invalid(f"the scales {factors} are not all positive numbers")
    return factors


@lowers("Resize", "Upsample")
def _resize(node: Node) -> Tensor:
    x = node.tensor(0)
    # Older operators measure between the beginnings of elements.
    old = node.operator == "Upsample" or node.opset < 11
    mode = node.text("mode", "nearest")
    transformation = "asymmetric" if old else node.text("coordinate_transformation_mode", "half_pixel")
    outside: list[tuple[int, np.ndarray]] = []
    for axis, size, output_size, factor, region in zip(*_resizing(node, x), strict=True):
        if output_size == size and factor == 1 and region == (0.0, 1.0):
            continue
        bounded(output_size, "the coordinates of Resize")
        if mode != "nearest":
            bounded(size * output_size, "the weights of Resize", _MOST_WEIGHTS)
        if transformation == "tf_crop_and_resize":
            coordinates = _region_coordinates(output_size, size, region)
            outside.append((axis, (coordinates < 0) | (coordinates > size - 1)))
        else:
            coordinates = _input_coordinates(output_size, size, factor, transformation)
        if mode == "nearest":
            # Older operators take the element before, or the one behind where they shrink a dim.
            older = "ceil" if factor < 1 else "floor"
            rounding = older if old else node.text("nearest_mode", "round_prefer_floor")
            indices = _nearest(coordinates, size, rounding)
            if output_size % size == 0 and (indices == np.arange(output_size) // (output_size // size)).all():
                x = shaping.repeat_interleave(x, output_size // size, axis)
            else:
                x = shaping.take_along(x, indices, axis)
        else:
            x = along_dim(x, axis, _weights(node, mode, size, coordinates, factor))
    for axis, places in outside:
        beyond = constant(places.reshape([-1, *[1] * (rank_of(x) - 1 - axis)]), "bool", x)
        x = elementwise.where(beyond, float(node.get("extrapolation_value", 0.0)), x) if places.any() else x
    return x


def _region_coordinates(output_size: int, size: int, region: tuple[float, float]) -> np.ndarray:
    """Map each position of the output to a coordinate within a region, which is given in fractions of the input."""
    start, end = region
    if output_size == 1:
        return np.array([0.5 * (start + end) * (size - 1)], np.float32)
    steps = np.arange(output_size, dtype=np.float32)
    return np.float32(start * (size - 1)) + steps * np.float32((end - start) * (size - 1) / (output_size - 1))


def _weights(node: Node, mode: str, size: int, coordinates: np.ndarray, factor: float) -> np.ndarray:
    """The weights of linear or cubic interpolation: [size, coordinates]. Raises Refused for other modes."""
    if mode not in ("linear", "bilinear", "trilinear", "cubic"):
        raise Refused(f"Resize by the mode {mode!r} is not supported")
    coefficient = float(node.get("cubic_coeff_a", -0.75)) if mode == "cubic" else None
    within, antialias = bool(node.get("exclude_outside", 0)), bool(node.get("antialias", 0))
    if within or (antialias and factor < 1):
        stretch = max(1.0, 1.0 / factor) if antialias else 1.0
        return stretched_weights(size, coordinates, stretch, coefficient, within)
    if coefficient is None:
        return linear_weights(size, coordinates)
    return cubic_weights(size, coordinates, coefficient)


# Recurrent layers

OPERATORS_OF_STEP = {"RNN": 5, "LSTM": 20, "GRU": 20}
"""About the operators that a step of a recurrent layer becomes: those of the activations vary."""


class _Direction(NamedTuple):
    """The tensors of one direction of a recurrent layer, and its activations."""

    weight: Tensor
    recurrence: Tensor
    bias: Tensor | None
    hidden: Tensor | None
    cell: Tensor | None
    peepholes: Tensor | None
    activations: tuple[Activation, ...]


def _directions(node: Node) -> list[_Direction]:
    """List the directions of a recurrent layer.

    Raises
    ------
    Refused
        When the layer has options that are not supported.
    """
    batch_first = bool(node.get("layout", 0))
    length = static(node.tensor(0), int(batch_first), "the length of a sequence")
    if node.value(4) is not None:
        lengths = node.value(4)
        if not isinstance(lengths, np.ndarray) or (lengths != length).any():
            raise Refused("a recurrent layer with sequences of different lengths is not supported")
    directions = 2 if node.text("direction", "forward") == "bidirectional" else 1
    node.unroll(length * directions * OPERATORS_OF_STEP[node.operator])

    def part(position: int, direction: int, dim: int = 0) -> Tensor | None:
        x = node.optional(position)
        return None if x is None else shaping.select(x, dim, direction)

    states = int(batch_first)  # the dim of directions there
    return [
        _Direction(
            shaping.select(node.tensor(1), 0, direction),
            shaping.select(node.tensor(2), 0, direction),
            part(3, direction),
            part(5, direction, states),
            part(6, direction, states),
            part(7, direction),
            activations,
        )
        for direction, activations in enumerate(_activations(node, directions))
    ]


_ACTIVATIONS: dict[str, Activation] = {
    "Tanh": elementwise.tanh,
    "Relu": elementwise.relu,
    "Sigmoid": elementwise.sigmoid,
    "Softsign": elementwise.softsign,
    "Softplus": elementwise.softplus,
}
# Those of gates, of new values and, of an LSTM, of the cell where the output is made.
_DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


def _activations(node: Node, directions: int) -> list[tuple[Activation, ...]]:
    """List the activations of each direction, with the bound of what enters those of gates and new values.

    The bound is not for the cell of an LSTM where the output is made, as ONNX Runtime has it: the standard names "the
    input of activations", and its reference evaluator has no bound.

    Raises
    ------
    Refused
        For an activation that is not supported.
    Invalid
        For as many as the layer does not have, and for a negative bound.
    """
    defaults = _DEFAULTS[node.operator]
    given = [name.decode() if isinstance(name, bytes) else str(name) for name in node.get("activations", [])]
    names = given or defaults * directions
    if len(names) != len(defaults) * directions:
        raise Invalid(f"a recurrent layer with {len(defaults) * directions} activations has {len(given)}: {given}")
    if not set(names) <= _ACTIVATIONS.keys():
        raise Refused(f"a recurrent layer with the activations {given} is not supported")
    bound = float(node.get("clip", math.inf))
    if not bound >= 0:
        raise Invalid(f"the clip of a recurrent layer is a magnitude, not {bound}")

    def activation(name: str, entered: bool) -> Activation:
        function = _ACTIVATIONS[name]
        if not entered or bound == math.inf:
            return function
        return lambda x: function(elementwise.clamp(x, -bound, bound))

    each = [names[n : n + len(defaults)] for n in range(0, len(names), len(defaults))]
    return [tuple(activation(name, n < 2) for n, name in enumerate(own)) for own in each]


@lowers("LSTM", "GRU", "RNN")
def _recurrent(node: Node) -> tuple[Tensor, ...]:
    x, parts = node.tensor(0), _directions(node)
    batch_first = bool(node.get("layout", 0))
    x = ops.permute_dims(x, [1, 0, 2]) if batch_first else x
    direction = node.text("direction", "forward")
    outputs, last_states = [], []
    for number, part in enumerate(parts):
        reverse = direction == "reverse" or number == 1
        biases = None if part.bias is None else _halves(part.bias)
        layer = x, part.weight, part.recurrence, biases, part.hidden
        last: Sequence[Tensor]
        if node.operator == "LSTM":
            gates, new, shown = part.activations
            peepholes = None if part.peepholes is None else _thirds(part.peepholes)
            variant = LstmVariant(peepholes, bool(node.get("input_forget", 0)), (gates, new, shown))
            y, *last = lstm(*layer, part.cell, order="iofg", reverse=reverse, variant=variant)
        elif node.operator == "RNN":
            (activation,) = part.activations
            y, *last = rnn(*layer, activation=activation, reverse=reverse)
        else:
            gates, new = part.activations
            before_reset = bool(node.get("linear_before_reset", 0))
            y, *last = gru(
                *layer, order="zrn", reverse=reverse, linear_before_reset=before_reset, activations=(gates, new)
            )
        outputs.append(y)
        last_states.append(last)
    whole = shaping.stack(outputs, 1)
    if batch_first:
        whole = ops.permute_dims(whole, [2, 0, 1, 3])
    return whole, *(shaping.stack(states, int(batch_first)) for states in zip(*last_states, strict=True))


def _thirds(peepholes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split the peepholes of a layer into those of the input's, the output's and the forget gate."""
    size = static(peepholes, 0, "the size of peepholes") // 3
    first, second, third = (ops.strided_slice(peepholes, [n * size], [(n + 1) * size], [0]) for n in range(3))
    return first, second, third


def _halves(bias: Tensor) -> tuple[Tensor, Tensor]:
    """Split a bias into that of the weight and that of the recurrence."""
    size = static(bias, 0, "the size of a bias")
    half = size // 2
    return ops.strided_slice(bias, [0], [half], [0]), ops.strided_slice(bias, [half], [size], [0])
