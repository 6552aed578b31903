"""Lowerings of convolutions, pooling, normalization, resampling and recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from hidet import ops
from hidet.graph import Tensor

from hidet_dist import operators
from hidet_dist.frontends.onnx.nodes import Invalid, Node, Refused, bounded, dim_of, lowers, rank_of, static
from hidet_dist.operators import elementwise, reductions, shaping
from hidet_dist.operators.pooling import along_dim
from hidet_dist.operators.recurrent import gru, lstm
from hidet_dist.operators.resampling import cubic_weights, linear_weights
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


@lowers("Conv")
def _conv(node: Node) -> Tensor:
    x, weight = node.tensor(0), node.tensor(1)
    kernel = [int(n) for n in extents_of(weight)[2:]]
    ones = [1] * len(kernel)
    stride, dilation = list(node.get("strides", ones)), list(node.get("dilations", ones))
    pads = pads_of(node, x, kernel, stride, dilation)
    before, after = pads[: len(kernel)], pads[len(kernel) :]
    if before != after:
        x, before = _padded(x, pads), [0] * len(kernel)
    return operators.convolution(x, weight, node.optional(2), stride, before, dilation, groups=node.get("group", 1))


@lowers("ConvTranspose")
def _conv_transpose(node: Node) -> Tensor:
    x, weight, bias = node.tensor(0), node.tensor(1), node.optional(2)
    kernel = [int(n) for n in extents_of(weight)[2:]]
    dims, ones = len(kernel), [1] * len(kernel)
    stride, dilation = list(node.get("strides", ones)), list(node.get("dilations", ones))
    output_padding, groups = list(node.get("output_padding", [0] * dims)), node.get("group", 1)
    if "output_shape" in node.attributes or node.text("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise Refused("a transposed convolution with output_shape or auto_pad is not supported")
    pads = list(node.get("pads", [0] * (2 * dims)))
    y = operators.convolution(x, weight, None, stride, [0] * dims, dilation, True, output_padding, groups)
    y = _padded(y, [-n for n in pads])
    return y if bias is None else elementwise.add(y, ops.reshape(bias, [-1, *ones]))


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
    kernel, stride, dilation, before, after, ceil_mode = _window(node, x)
    counts_padding = bool(node.get("count_include_pad", 0))
    if before != after:
        if not counts_padding:
            raise Refused("an average pooling with unequal padding is only supported with count_include_pad")
        x, before = _padded(x, [*before, *after]), [0] * len(kernel)
    if dilation != [1] * len(kernel):
        raise Refused("an average pooling with a dilation is not supported")
    return operators.avg_pool(x, len(kernel), kernel, stride, before, ceil_mode, counts_padding)


@lowers("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(node: Node) -> Tensor:
    x = node.tensor(0)
    function = reductions.mean if node.operator == "GlobalAveragePool" else reductions.amax
    return function(x, list(range(2, rank_of(x))), True)


@lowers("BatchNormalization")
def _batch_normalization(node: Node) -> Tensor:
    if node.get("training_mode", 0):
        raise Refused("batch normalization in training mode is not supported: export the model in inference mode")
    x, scale, bias, mean, variance = (node.tensor(n) for n in range(5))
    return operators.batch_norm(x, scale, bias, mean, variance, node.get("epsilon", 1e-5))


@lowers("InstanceNormalization")
def _instance_normalization(node: Node) -> Tensor:
    return operators.instance_norm(node.tensor(0), node.tensor(1), node.tensor(2), node.get("epsilon", 1e-5))


@lowers("LayerNormalization")
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


@lowers("Resize")
def _resize(node: Node) -> Tensor:
    x = node.tensor(0)
    rank = rank_of(x)
    axes = [dim_of(axis, rank) for axis in node.get("axes", range(rank))]
    scales, requested = node.value(2), node.value(3)
    sizes = [static(x, axis, "a dim that is resized") for axis in axes]
    if requested is not None and len(node.known(3, "the sizes of Resize")):
        output_sizes = [int(n) for n in node.known(3, "the sizes of Resize")]
        if node.text("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise Refused("Resize that keeps the aspect ratio is not supported")
        factors = [output_size / size for output_size, size in zip(output_sizes, sizes, strict=True)]
    elif scales is not None:
        factors = [float(f) for f in node.known(2, "the scales of Resize")]
        if not all(0 < factor < math.inf for factor in factors):
            raise Invalid(f"the scales {factors} are not all positive numbers")
        output_sizes = [math.floor(size * factor) for size, factor in zip(sizes, factors, strict=True)]
    else:
        raise Refused("Resize has neither sizes nor scales")
    if node.get("antialias", 0):
        raise Refused("Resize with antialiasing is not supported")
    mode = node.text("mode", "nearest")
    transformation = node.text("coordinate_transformation_mode", "half_pixel")
    if transformation == "tf_crop_and_resize":
        raise Refused("Resize of a region of its input (tf_crop_and_resize) is not supported")
    for axis, size, output_size, factor in zip(axes, sizes, output_sizes, factors, strict=True):
        if output_size == size and factor == 1:
            continue
        bounded(output_size, "the coordinates of Resize")
        if mode != "nearest":
            bounded(size * output_size, "the weights of Resize", _MOST_WEIGHTS)
        coordinates = _input_coordinates(output_size, size, factor, transformation)
        if mode == "nearest":
            indices = _nearest(coordinates, size, node.text("nearest_mode", "round_prefer_floor"))
            if output_size % size == 0 and (indices == np.arange(output_size) // (output_size // size)).all():
                x = shaping.repeat_interleave(x, output_size // size, axis)
            else:
                x = shaping.take_along(x, indices, axis)
        elif mode == "linear":
            x = along_dim(x, axis, linear_weights(size, coordinates))
        elif mode == "cubic" and not node.get("exclude_outside", 0):
            x = along_dim(x, axis, cubic_weights(size, coordinates, node.get("cubic_coeff_a", -0.75)))
        else:
            raise Refused(f"Resize by the mode {mode!r}, or with exclude_outside, is not supported")
    return x


# Recurrent layers

_MOST_STEPS = 2**14  # each of which becomes operators of the graph


def _directions(node: Node) -> list[list[Tensor | None]]:
    """List the weight, recurrence, bias and initial states of each direction of a recurrent layer.

    Raises
    ------
    Refused
        When the layer has options that are not supported.
    """
    bounded(static(node.tensor(0), 0, "the length of a sequence"), "the steps of a recurrent layer", _MOST_STEPS)
    if node.get("layout", 0):
        raise Refused("a recurrent layer with layout=1 (the batch first) is not supported")
    if node.value(4) is not None:
        lengths, steps = node.value(4), static(node.tensor(0), 0, "the length of a sequence")
        if not isinstance(lengths, np.ndarray) or (lengths != steps).any():
            raise Refused("a recurrent layer with sequences of different lengths is not supported")
    if "clip" in node.attributes or node.get("input_forget", 0) or node.value(7) is not None:
        raise Refused("a recurrent layer with a clip, coupled gates or peepholes is not supported")
    defaults = ["Sigmoid", "Tanh"] + (["Tanh"] if node.operator == "LSTM" else [])
    given = [name.decode() if isinstance(name, bytes) else str(name) for name in node.get("activations", [])]
    directions = 2 if node.text("direction", "forward") == "bidirectional" else 1
    if given and given != defaults * directions:
        raise Refused(f"a recurrent layer with the activations {given} is not supported")
    parts: list[list[Tensor | None]] = []
    for direction in range(directions):
        tensors = [node.optional(n) for n in (1, 2, 3, 5, 6)]
        parts.append([None if x is None else shaping.select(x, 0, direction) for x in tensors])
    return parts


@lowers("LSTM", "GRU")
def _recurrent(node: Node) -> tuple[Tensor, ...]:
    x, parts = node.tensor(0), _directions(node)
    direction = node.text("direction", "forward")
    outputs, last_states = [], []
    for number, (weight, recurrence, bias, hidden, cell) in enumerate(parts):
        assert weight is not None and recurrence is not None
        reverse = direction == "reverse" or number == 1
        biases = None if bias is None else _halves(bias)
        last: Sequence[Tensor]
        if node.operator == "LSTM":
            y, *last = lstm(x, weight, recurrence, biases, hidden, cell, order="iofg", reverse=reverse)
        else:
            before_reset = bool(node.get("linear_before_reset", 0))
            y, *last = gru(
                x, weight, recurrence, biases, hidden, order="zrn", reverse=reverse, linear_before_reset=before_reset
            )
        outputs.append(y)
        last_states.append(last)
    return shaping.stack(outputs, 1), *(shaping.stack(states, 0) for states in zip(*last_states, strict=True))


def _halves(bias: Tensor) -> tuple[Tensor, Tensor]:
    """Split a bias into that of the weight and that of the recurrence."""
    size = static(bias, 0, "the size of a bias")
    half = size // 2
    return ops.strided_slice(bias, [0], [half], [0]), ops.strided_slice(bias, [half], [size], [0])
