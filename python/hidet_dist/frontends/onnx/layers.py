"""Lowerings of convolutions, pooling, normalization, resampling and recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hidet import ops
from hidet.graph import Tensor

from hidet_dist import operators
from hidet_dist.frontends.onnx.nodes import Node, Refused, lowers, rank_of, static
from hidet_dist.operators import elementwise, reductions, shaping
from hidet_dist.operators.pooling import along_dim
from hidet_dist.operators.recurrent import gru, lstm
from hidet_dist.operators.resampling import cubic_weights, linear_weights
from hidet_dist.spec.extents import extents_of


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _pads(node: Node, x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """The padding before and after each spatial dim, the former first, as the attribute ``pads`` has it."""
    dims, how = len(kernel), _text(node.get("auto_pad", "NOTSET"))
    if how == "NOTSET":
        return [int(n) for n in node.get("pads", [0] * (2 * dims))]
    if how == "VALID":
        return [0] * (2 * dims)
    before, after = [], []
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        size = static(x, dim + 2, "a dim that is padded by itself")
        total = max((-(-size // s) - 1) * s + d * (k - 1) + 1 - size, 0)
        less, more = total // 2, total - total // 2
        before.append(less if how == "SAME_UPPER" else more)
        after.append(more if how == "SAME_UPPER" else less)
    return before + after


def _padded(x: Tensor, pads: Sequence[int], value: float = 0.0) -> Tensor:
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
    pads = _pads(node, x, kernel, stride, dilation)
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
    extra = list(node.get("output_padding", [0] * dims))
    if "output_shape" in node.attributes or _text(node.get("auto_pad", "NOTSET")) not in ("NOTSET", "VALID"):
        raise Refused("a transposed convolution with output_shape or auto_pad is not supported")
    pads = list(node.get("pads", [0] * (2 * dims)))
    whole = operators.convolution(x, weight, None, stride, [0] * dims, dilation, True, extra, node.get("group", 1))
    whole = _padded(whole, [-n for n in pads])
    return whole if bias is None else elementwise.add(whole, ops.reshape(bias, [-1, *ones]))


@lowers("MaxPool", "AveragePool")
def _pool(node: Node) -> Tensor:
    x, kernel = node.tensor(0), [int(n) for n in node.attributes["kernel_shape"]]
    if len([name for name in node.outputs if name]) > 1:
        raise Refused("the places of a maximum pooling are not supported")
    ones = [1] * len(kernel)
    stride, dilation = list(node.get("strides", ones)), list(node.get("dilations", ones))
    pads = _pads(node, x, kernel, stride, dilation)
    before, after = pads[: len(kernel)], pads[len(kernel) :]
    ceil, largest, counts = bool(node.get("ceil_mode", 0)), node.operator == "MaxPool", node.get("count_include_pad", 0)
    if before != after:
        if not largest and not counts:
            raise Refused("an average pooling with unequal padding that does not count is not supported")
        x, before = _padded(x, pads, -math.inf if largest else 0.0), [0] * len(kernel)
    if largest:
        return operators.max_pool(x, len(kernel), kernel, stride, before, dilation, ceil)
    if dilation != ones:
        raise Refused("an average pooling with a dilation is not supported")
    return operators.avg_pool(x, len(kernel), kernel, stride, before, ceil, bool(counts))


@lowers("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(node: Node) -> Tensor:
    x = node.tensor(0)
    function = reductions.mean if node.operator == "GlobalAveragePool" else reductions.amax
    return function(x, list(range(2, rank_of(x))), True)


@lowers("BatchNormalization")
def _batch_normalization(node: Node) -> Tensor:
    if node.get("training_mode", 0):
        raise Refused("batch normalization in training mode is not supported: export the model in inference mode")
    x, scale, shift, mean, variance = (node.tensor(place) for place in range(5))
    return operators.batch_norm(x, scale, shift, mean, variance, node.get("epsilon", 1e-5))


@lowers("InstanceNormalization")
def _instance_normalization(node: Node) -> Tensor:
    return operators.instance_norm(node.tensor(0), node.tensor(1), node.tensor(2), node.get("epsilon", 1e-5))


@lowers("LayerNormalization")
def _layer_normalization(node: Node) -> Any:
    x = node.tensor(0)
    axis = node.get("axis", -1) % rank_of(x)
    shape = list(extents_of(x)[axis:])
    weight, bias, eps = node.optional(1), node.optional(2), node.get("epsilon", 1e-5)
    if len([name for name in node.outputs if name]) > 1:
        return operators.native_layer_norm(x, shape, weight, bias, eps)
    return operators.layer_norm(x, shape, weight, bias, eps)


@lowers("RMSNormalization")
def _rms_normalization(node: Node) -> Tensor:
    x = node.tensor(0)
    shape = list(extents_of(x)[node.get("axis", -1) % rank_of(x) :])
    return operators.rms_norm(x, shape, node.optional(1), node.get("epsilon", 1e-5))


@lowers("GroupNormalization")
def _group_normalization(node: Node) -> Tensor:
    x, weight, bias = (node.tensor(place) for place in range(3))
    groups = int(node.attributes["num_groups"])
    channels = static(x, 1, "the channels")
    if node.opset < 21:  # one scale for each group, as it was
        weight, bias = (shaping.repeat_interleave(own, channels // groups, 0) for own in (weight, bias))
    return operators.group_norm(x, groups, weight, bias, node.get("epsilon", 1e-5))


# Resampling


def _source(out: int, size: int, factor: float, mode: str) -> np.ndarray:
    """Where in the input each element of the output is, as the standard defines the coordinate transformations."""
    at = np.arange(out, dtype=np.float32)
    scale = np.float32(factor)
    if mode == "asymmetric":
        return at / scale
    if mode == "align_corners":
        whole = np.float32(size) * scale  # the size before it is rounded down, as the standard's formula has it
        return at * np.float32(size - 1) / (whole - 1) if out > 1 else at * 0
    if mode == "pytorch_half_pixel" and out == 1:
        return at * 0
    if mode in ("half_pixel", "pytorch_half_pixel"):
        return (at + np.float32(0.5)) / scale - np.float32(0.5)
    if mode == "half_pixel_symmetric":
        whole = np.float32(size) * scale
        adjusted = np.float32(out) / whole
        centre = np.float32(size) / 2
        return centre * (1 - adjusted) + (at + np.float32(0.5)) / scale - np.float32(0.5)
    raise Refused(f"the coordinate transformation {mode!r} of Resize is not supported")


def _nearest(source: np.ndarray, size: int, rounding: str) -> np.ndarray:
    functions: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "round_prefer_floor": lambda v: np.ceil(v - 0.5),
        "round_prefer_ceil": lambda v: np.floor(v + 0.5),
        "floor": np.floor,
        "ceil": np.ceil,
    }
    if rounding not in functions:
        raise Refused(f"the rounding {rounding!r} of Resize is not supported")
    return np.clip(functions[rounding](source), 0, size - 1).astype(np.int64)


@lowers("Resize")
def _resize(node: Node) -> Tensor:
    x = node.tensor(0)
    rank = rank_of(x)
    axes = [axis % rank for axis in node.get("axes", range(rank))]
    scales, sizes = node.value(2), node.value(3)
    own = [static(x, axis, "a dim that is resized") for axis in axes]
    if sizes is not None and len(node.known(3, "the sizes of Resize")):
        wanted = [int(n) for n in node.known(3, "the sizes of Resize")]
        if _text(node.get("keep_aspect_ratio_policy", "stretch")) != "stretch":
            raise Refused("Resize that keeps the aspect ratio is not supported")
        factors = [out / size for out, size in zip(wanted, own, strict=True)]
    elif scales is not None:
        factors = [float(f) for f in node.known(2, "the factors of Resize")]
        wanted = [math.floor(size * factor) for size, factor in zip(own, factors, strict=True)]
    else:
        raise Refused("Resize has neither sizes nor factors")
    if node.get("antialias", 0):
        raise Refused("Resize with antialiasing is not supported")
    mode = _text(node.get("mode", "nearest"))
    coordinates = _text(node.get("coordinate_transformation_mode", "half_pixel"))
    for axis, size, out, factor in zip(axes, own, wanted, factors, strict=True):
        if out == size and factor == 1:
            continue
        source = _source(out, size, factor, coordinates)
        if mode == "nearest":
            x = _at_places(
                x, axis, size, out, _nearest(source, size, _text(node.get("nearest_mode", "round_prefer_floor")))
            )
        elif mode == "linear":
            x = along_dim(x, axis, linear_weights(size, source))
        elif mode == "cubic" and not node.get("exclude_outside", 0):
            x = along_dim(x, axis, cubic_weights(size, source, node.get("cubic_coeff_a", -0.75)))
        else:
            raise Refused(f"Resize by the mode {mode!r}, or one that excludes what lies outside, is not supported")
    return x


def _at_places(x: Tensor, dim: int, size: int, out: int, places: np.ndarray) -> Tensor:
    if out % size == 0 and (places == np.arange(out) // (out // size)).all():
        return shaping.repeat_interleave(x, out // size, dim)
    return shaping.take_along(x, places, dim)


# Recurrent layers


def _directions(node: Node) -> list[list[Tensor | None]]:
    """For each direction of a recurrent layer its weight, recurrence, bias and initial states."""
    if node.get("layout", 0):
        raise Refused("a recurrent layer with the batch first is not supported")
    if node.value(4) is not None:
        lengths, steps = node.value(4), static(node.tensor(0), 0, "the length of a sequence")
        if not isinstance(lengths, np.ndarray) or (lengths != steps).any():
            raise Refused("a recurrent layer with lengths of its own for each sequence is not supported")
    if "clip" in node.attributes or node.get("input_forget", 0) or node.value(7) is not None:
        raise Refused("a recurrent layer with a clip, coupled gates or peepholes is not supported")
    defaults = ["Sigmoid", "Tanh"] + (["Tanh"] if node.operator == "LSTM" else [])
    given = [_text(name) for name in node.get("activations", [])]
    directions = 2 if _text(node.get("direction", "forward")) == "bidirectional" else 1
    if given and given != defaults * directions:
        raise Refused(f"a recurrent layer with the activations {given} is not supported")
    parts: list[list[Tensor | None]] = []
    for direction in range(directions):
        tensors = [node.optional(place) for place in (1, 2, 3, 5, 6)]
        parts.append([None if x is None else shaping.select(x, 0, direction) for x in tensors])
    return parts


@lowers("LSTM", "GRU")
def _recurrent(node: Node) -> tuple[Tensor, ...]:
    x, parts = node.tensor(0), _directions(node)
    direction = _text(node.get("direction", "forward"))
    outputs, hidden, cells = [], [], []
    for number, (weight, recurrence, bias, first, cell) in enumerate(parts):
        assert weight is not None and recurrence is not None
        reverse = direction == "reverse" or number == 1
        biases = None if bias is None else _halves(bias)
        if node.operator == "LSTM":
            y, last, state = lstm(x, weight, recurrence, biases, first, cell, order="iofg", reverse=reverse)
            cells.append(state)
        else:
            resets_last = bool(node.get("linear_before_reset", 0))
            y, last = gru(
                x, weight, recurrence, biases, first, order="zrn", reverse=reverse, linear_before_reset=resets_last
            )
        outputs.append(y)
        hidden.append(last)
    return shaping.stack(outputs, 1), *(shaping.stack(states, 0) for states in (hidden, cells) if states)


def _halves(bias: Tensor) -> tuple[Tensor, Tensor]:
    """The biases of the weight and of the recurrence."""
    size = static(bias, 0, "the size of a bias")
    cut = size // 2
    return ops.strided_slice(bias, [0], [cut], [0]), ops.strided_slice(bias, [cut], [size], [0])
