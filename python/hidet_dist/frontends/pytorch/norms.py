"""Lowerings of normalization layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hidet.graph import Tensor

from hidet_dist.frontends.pytorch.calls import Call, lower_plainly, lowers
from hidet_dist.frontends.refusals import Refused
from hidet_dist.operators import batch_norm, group_norm, instance_norm, layer_norm, rms_norm


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
    return layer_norm(x, normalized_shape, weight, bias, eps)


@lowers("native_layer_norm.default")
def _native_layer_norm(
    call: Call, x: Tensor, normalized_shape: Sequence[Any], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, None, None]:
    return layer_norm(x, normalized_shape, weight, bias, eps), None, None


@lowers("_fused_rms_norm.default")
def _fused_rms_norm(
    call: Call, x: Tensor, normalized_shape: Sequence[Any], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, None]:
    return rms_norm(x, normalized_shape, weight, eps), None


@lowers("group_norm.default")
def _group_norm(
    call: Call,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    return group_norm(x, num_groups, weight, bias, eps)


@lowers("native_group_norm.default")
def _native_group_norm(
    call: Call, x: Tensor, weight: Tensor | None, bias: Tensor | None, n: Any, c: Any, hw: Any, group: int, eps: float
) -> tuple[Tensor, None, None]:
    return group_norm(x, group, weight, bias, eps), None, None


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
    if use_input_stats:
        return instance_norm(x, weight, bias, eps)
    return _batch_norm(call, x, weight, bias, running_mean, running_var, False, momentum, eps)


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
    return batch_norm(x, weight, bias, running_mean, running_var, eps)


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
    return batch_norm(x, weight, bias, running_mean, running_var, eps), None, None


lower_plainly({"rms_norm.default": rms_norm})
