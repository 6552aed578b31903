"""Layers of experts: products by experts as an operator of PyTorch, its lowering, and layers of transformers by it.

transformers has several implementations of a layer of experts, and finds the one to call by a name in the
configuration. While a module is exported, this one is called, whatever the name is. It computes what they do, by
products in which each row names its expert. Others sort rows by expert, gather a matrix for each row, or loop over the
experts that have any row, which no graph can do. Some models have layers of their own
(:mod:`hidet_dist.frontends.pytorch.own_experts`).

Programs that were exported elsewhere have grouped products, and batched products by gathered matrices. These become
products by experts, too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from hidet.graph import Tensor, ops
from hidet.graph.ops.transform import PermuteDimsOp, TakeOp

from hidet_dist import operators
from hidet_dist.compat.replacing import replaced
from hidet_dist.errors import TraceError
from hidet_dist.frontends.pytorch.calls import Call, lowers
from hidet_dist.operators import elementwise
from hidet_dist.operators.shaping import reshaped
from hidet_dist.spec.extents import extents_of, same_extent

_MODULE = "transformers.integrations.moe"


@torch.library.custom_op("hidet_dist::expert_product", mutates_args=())
def expert_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    chosen: torch.Tensor,
    scales: torch.Tensor | None = None,
    transposed: bool = False,
) -> torch.Tensor:
    """Multiply each row with the matrices of its chosen experts.

    Parameters
    ----------
    x: torch.Tensor
        [tokens, choices, inner], or [tokens, inner]: one row for all choices of a token.
    weight: torch.Tensor
        [experts, inner, columns], or [experts, columns, inner] if ``transposed``.
    chosen: torch.Tensor
        Integers [tokens, choices]: the experts of each token, different ones. Another number gives zeros.
    scales: torch.Tensor, optional
        [tokens, choices]: the choices of a token are summed up, each times its scale.
    transposed: bool
        Whether the matrices are transposed.

    Returns
    -------
    torch.Tensor
        [tokens, choices, columns], or [tokens, columns] with scales; of the dtype of ``x``.
    """
    matrices = weight.mT if transposed else weight
    rows = x if x.dim() == 3 else x[:, None].expand(-1, chosen.shape[1], -1)
    y = x.new_zeros(*chosen.shape, matrices.shape[2], dtype=torch.float32)
    for expert in range(matrices.shape[0]):
        own = chosen == expert
        y[own] = rows[own].float() @ matrices[expert].float()
    return (y if scales is None else (y * scales[..., None].float()).sum(1)).to(x.dtype)


@expert_product.register_fake
def _shape_of_result(
    x: torch.Tensor,
    weight: torch.Tensor,
    chosen: torch.Tensor,
    scales: torch.Tensor | None = None,
    transposed: bool = False,
) -> torch.Tensor:
    columns = weight.shape[1 if transposed else 2]
    tokens, choices = chosen.shape
    return x.new_empty([tokens, columns] if scales is not None else [tokens, choices, columns])


@lowers("hidet_dist.expert_product.default")
def _expert_product(
    call: Call,
    x: Tensor,
    weight: Tensor,
    chosen: Tensor,
    scales: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    return operators.expert_product(x, weight, chosen, scales, transposed=transposed, once=call.once)


@lowers("_grouped_mm.default", "transformers.grouped_mm_fallback.default")
def _grouped_mm(call: Call, a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    if offs is None:
        return operators.matmul(a, b)
    source = _untransposed(b)
    if source is not None:
        return operators.grouped_product(a, source, offs, transposed=True, once=call.once)
    return operators.grouped_product(a, b, offs, once=call.once)


def _untransposed(x: Tensor) -> Tensor | None:
    """The tensor of three dims whose last two were swapped to give ``x``; None if ``x`` is anything else."""
    if isinstance(x.op, PermuteDimsOp) and list(x.op.attrs["axes"]) == [0, 2, 1]:
        source: Tensor = x.op.inputs[0]
        return source
    return None


def by_gathered(call: Call, a: Tensor, b: Tensor) -> Tensor | None:
    """A batched product one of whose operands was gathered, a matrix for each row of the other; None for any other.

    These are ``x[rows, 1, inner] @ weight[chosen]`` and ``weight[chosen] @ x[rows, inner, 1]``.
    """
    if len(a.shape) != 3 or len(b.shape) != 3:
        return None
    if same_extent(a.shape[1], 1):
        return _gathered(call, a, b, 2, False)
    return _gathered(call, b, a, 1, True) if same_extent(b.shape[2], 1) else None


def _gathered(call: Call, x: Tensor, matrices: Tensor, inner: int, transposed: bool) -> Tensor | None:
    """The product of rows, which have their elements in dim ``inner``, by gathered matrices."""
    if (source := _untransposed(matrices)) is not None:
        matrices, transposed = source, not transposed
    op = matrices.op
    if not isinstance(op, TakeOp) or int(op.attrs["axis"]) or len(op.inputs[1].shape) != 1:
        return None
    weight, chosen = op.inputs
    experts = extents_of(weight)[0]
    if len(weight.shape) != 3 or not isinstance(experts, int) or weight.dtype != x.dtype:
        return None
    rows = extents_of(chosen)[0]

    def numbers() -> Tensor:
        number = operators.to_dtype(chosen, "int32")  # negative numbers count from the last expert
        number = elementwise.where(elementwise.lt(number, 0), elementwise.add(number, experts), number)
        return reshaped(operators.to_dtype(number, "int32"), [rows, 1])

    y = operators.expert_product(
        reshaped(x, [rows, extents_of(x)[inner]]),
        weight,
        call.once(("numbers of experts", chosen), numbers),
        transposed=transposed,
        once=call.once,
    )
    return y if inner == 2 else ops.transpose(y, [0, 2, 1])


@contextlib.contextmanager
def experts_by_products() -> Iterator[None]:
    """Have transformers' layers of experts computed by products by experts while the block runs."""
    moe = sys.modules.get(_MODULE)
    if moe is None:  # no module has such a layer
        yield
        return
    with replaced(moe.ExpertsInterface, {"get_interface": lambda *_: _experts}):
        yield


def _experts(
    layer: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute a layer of experts, as transformers calls its implementations: [tokens, size] in and out.

    Raises
    ------
    TraceError
        When transformers itself has split the experts.
    """
    if getattr(layer, "_is_expert_parallel", False):
        raise TraceError(
            f"transformers has split the experts of {type(layer).__name__} over devices: load the model on one device."
        )
    transposed, has_bias = not layer.is_transposed, layer.has_bias
    name = "gate_up_proj" if layer.has_gate else "up_proj"
    weight = getattr(layer, name)
    y = expert_product(hidden_states.to(weight.dtype), weight, top_k_index, None, transposed)
    if has_bias:
        # A bias is a matrix of one row, and each of its inputs is 1.
        ones = y.new_ones(hidden_states.shape[0], 1)
        y = y + expert_product(ones, getattr(layer, f"{name}_bias")[:, None], top_k_index)
    y = layer._apply_gate(y) if layer.has_gate else layer.act_fn(y)
    normed = getattr(layer, "has_post_expert_norm", False)  # transformers 5.17 has no such layers
    scales = None if normed else top_k_weights
    out = expert_product(y, layer.down_proj, top_k_index, scales, transposed)
    if has_bias:
        ones = out.new_ones(hidden_states.shape[0], 1)
        out = out + expert_product(ones, layer.down_proj_bias[:, None], top_k_index, scales)
    if scales is None:
        out = (layer.post_expert_norm(out) * top_k_weights[..., None]).sum(1)
    return out.to(hidden_states.dtype)
