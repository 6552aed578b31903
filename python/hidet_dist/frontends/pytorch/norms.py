"""Normalization layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hidet.graph import Tensor, ops
from hidet.graph.ops.normalize.norm import NormalizeOp

from hidet_dist.frontends.pytorch.calls import Call, Refused, cast, constant, lowers
from hidet_dist.frontends.pytorch.shapes import reshaped
from hidet_dist.spec.extents import extents_of


def _normalized(x: Tensor, dims: Sequence[int], epsilon: float) -> Tensor:
    return NormalizeOp(x, list(dims), float(epsilon), "float32").outputs[0]


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * cast(weight, x.dtype.name)
    return x if bias is None else x + cast(bias, x.dtype.name)


@lowers("layer_norm.default")
def _layer_norm(
    call: Call,
    x: Tensor,
    normalized_shape: Sequence[Any],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    rank = len(x.shape)
    return _scaled(_normalized(x, range(rank - len(normalized_shape), rank), eps), weight, bias)


@lowers("rms_norm.default", "_fused_rms_norm.default")
def _rms_norm(
    call: Call, x: Tensor, normalized_shape: Sequence[Any], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    rank = len(x.shape)
    epsilon = _EPSILON[x.dtype.name] if eps is None else float(eps)
    wide = cast(x, "float32") if x.dtype.nbytes < 4 else x
    square = ops.mean(ops.square(wide), list(range(rank - len(normalized_shape), rank)), True)
    factor = ops.rsqrt(ops.add(square, constant(epsilon, wide.dtype.name)))
    found = _scaled(cast(wide * factor, x.dtype.name), weight, None)
    return (found, factor) if call.name == "aten._fused_rms_norm.default" else found


_EPSILON = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "float64": 2**-52}
"""The distance from 1 to the next number, which PyTorch takes where it is given none."""


@lowers("group_norm.default")
def _group_norm(
    call: Call,
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    batch, channels, *rest = extents_of(x)
    split = reshaped(x, [batch, groups, channels // groups, *rest])
    found = reshaped(_normalized(split, range(2, len(split.shape)), eps), extents_of(x))
    return _by_channel(found, weight, bias)


@lowers("native_group_norm.default")
def _native_group_norm(
    call: Call, x: Tensor, weight: Tensor | None, bias: Tensor | None, n: Any, c: Any, hw: Any, groups: int, eps: float
) -> tuple[Tensor, None, None]:
    return _group_norm(call, x, groups, weight, bias, eps), None, None


@lowers("native_layer_norm.default")
def _native_layer_norm(
    call: Call, x: Tensor, normalized_shape: Sequence[Any], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, None, None]:
    return _layer_norm(call, x, normalized_shape, weight, bias, eps), None, None


def _by_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    ones = [1] * (len(x.shape) - 2)

    def along(values: Tensor | None) -> Tensor | None:
        return None if values is None else reshaped(values, [extents_of(values)[0], *ones])

    return _scaled(x, along(weight), along(bias))


@lowers("instance_norm.default")
def _instance_norm(
    call: Call,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> Tensor:
    if not use_input_stats:
        assert running_mean is not None and running_var is not None
        return _batch_norm(call, x, weight, bias, running_mean, running_var, False, momentum, eps)
    return _by_channel(_normalized(x, range(2, len(x.shape)), eps), weight, bias)


@lowers("batch_norm.default")
def _batch_norm(
    call: Call,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        raise Refused("a batch norm by the statistics of the batch is not supported: call module.eval() first")
    # One product and one sum for each element; what is made of the channels' numbers alone is small.
    factor = ops.rsqrt(ops.add(running_var, constant(float(eps), running_var.dtype.name)))
    if weight is not None:
        factor = factor * weight
    shift = -running_mean * factor
    if bias is not None:
        shift = shift + bias
    return _by_channel(x, factor, shift)


@lowers("_native_batch_norm_legit_no_training.default")
def _native_batch_norm(
    call: Call,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, None, None]:
    return _batch_norm(call, x, weight, bias, running_mean, running_var, False, momentum, eps), None, None
