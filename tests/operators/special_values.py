"""Functions that compare elements, as PyTorch has them, and operands of several layouts with NaN, infinities and ties.

A function takes ``v``, float[8, 12]. Operands differ in how ``v`` is made of an input: the values are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Function = Callable[[Tensor], Tensor]

LAYOUTS: dict[str, tuple[Function, Function]] = {
    "plain": (lambda v: v, lambda x: x),
    "permuted": (lambda v: v.T.contiguous(), lambda x: x.T),
    "reshaped": (lambda v: v.reshape(2, 4, 12), lambda x: x.reshape(8, 12)),
    "joined": (
        lambda v: v.reshape(2, 4, 3, 4).permute(0, 2, 1, 3).contiguous(),
        lambda x: x.permute(0, 2, 1, 3).reshape(8, 12),
    ),
}
"""How an input is made of ``v``, and how ``v`` is made of the input."""

ELEMENTWISE: dict[str, Function] = {
    "relu": torch.relu,
    "relu6": functional.relu6,
    "clamp": lambda v: v.clamp(-1, 1.5),
    "clamp_min": lambda v: v.clamp(min=0.5),
    "clamp_max": lambda v: v.clamp(max=0.5),
    "clamp_nan": lambda v: v.clamp(min=math.nan),
    "clamp_inf": lambda v: v.clamp(max=math.inf),
    "clamp_tensors": lambda v: v.clamp(v.flip(0), v.flip(1)),
    "hardtanh": functional.hardtanh,
    "hardsigmoid": functional.hardsigmoid,
    "hardswish": functional.hardswish,
    "hardshrink": functional.hardshrink,
    "softshrink": functional.softshrink,
    "threshold": lambda v: functional.threshold(v, 0.5, 20.0),
    "leaky_relu": lambda v: functional.leaky_relu(v, 0.1),
    "prelu": lambda v: functional.prelu(v, torch.tensor([0.2], dtype=v.dtype)),
    "elu": functional.elu,
    "celu": lambda v: functional.celu(v, 2.0),
    "selu": functional.selu,
    "softplus": functional.softplus,
    "logsigmoid": functional.logsigmoid,
    "maximum": lambda v: torch.maximum(v, v.flip(0)),
    "minimum": lambda v: torch.minimum(v, v.flip(0)),
    "fmax": lambda v: torch.fmax(v, v.flip(0)),
    "fmin": lambda v: torch.fmin(v, v.flip(1)),
    "sign": torch.sign,
    "abs": torch.abs,
    "round": torch.round,
    "nan_to_num": lambda v: torch.nan_to_num(v, 3.0),
    "nan_to_num_nearer": lambda v: torch.nan_to_num(v, 3.0, 0.5, -0.25),
    "times_zero": lambda v: v * 0,
    "eq": lambda v: v == v.flip(0),
    "ne": lambda v: v != v.flip(0),
    "lt": lambda v: v < v.flip(0),
    "le": lambda v: v <= v.flip(0),
    "gt": lambda v: v > 0,
    "not_gt": lambda v: ~(v > 0),
    "not_le": lambda v: torch.logical_not(v <= v.flip(0)),
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "isfinite": torch.isfinite,
    "bool": lambda v: v.bool(),
    "logical_and": lambda v: torch.logical_and(v, v.flip(0)),
    "where": lambda v: torch.where(v > 0, v, -v),
}

REDUCTIONS: dict[str, Function] = {
    "amax": lambda v: v.amax(),
    "amax_0": lambda v: v.amax(0),
    "amax_1": lambda v: v.amax(1),
    "amin": lambda v: v.amin(),
    "amin_0": lambda v: v.amin(0),
    "amin_1": lambda v: v.amin(1),
    "argmax": lambda v: v.argmax(),
    "argmax_0": lambda v: v.argmax(0),
    "argmax_1": lambda v: v.argmax(1),
    "argmin": lambda v: v.argmin(),
    "argmin_0": lambda v: v.argmin(0),
    "argmin_1": lambda v: v.argmin(1),
    "max_1": lambda v: v.max(1)[1],
    "any": lambda v: v.any(1),
    "all": lambda v: v.all(0),
    "norm_inf": lambda v: torch.linalg.vector_norm(v, math.inf, 1),
    "norm_0": lambda v: torch.linalg.vector_norm(v, 0, 1),
    "sum": lambda v: v.sum(1),
    "logsumexp": lambda v: v.logsumexp(1),
    "softmax": lambda v: v.softmax(1),
    "log_softmax": lambda v: v.log_softmax(0),
    "cumsum": lambda v: v.cumsum(1),
    "cummax": lambda v: v.cummax(1)[0],
    "cummin": lambda v: v.cummin(0)[0],
    "sort": lambda v: v.sort(dim=1, stable=True)[1],
    "topk": lambda v: v.topk(5, 1)[0],
    "topk_least": lambda v: v.topk(5, 0, largest=False)[0],
    "scatter_max": lambda v: v.scatter_reduce(1, torch.arange(12).repeat(8, 1) // 3, v.flip(1), "amax"),
    "scatter_min": lambda v: v.scatter_reduce(1, torch.arange(12).repeat(8, 1) // 3, v.flip(1), "amin"),
}

POOLINGS: dict[str, Function] = {
    "max_pool": lambda v: functional.max_pool2d(v.reshape(1, 2, 4, 12), 3, 2, 1),
    "max_pool_1d": lambda v: functional.max_pool1d(v.reshape(1, 8, 12), 2, 3, 1, 2, True),
    "avg_pool": lambda v: functional.avg_pool2d(v.reshape(1, 2, 4, 12), 3, 2, 1, True),
    "adaptive_max": lambda v: functional.adaptive_max_pool2d(v.reshape(1, 2, 4, 12), (2, 4)),
    "adaptive_max_uneven": lambda v: functional.adaptive_max_pool2d(v.reshape(1, 2, 4, 12), (3, 5)),
    "adaptive_avg": lambda v: functional.adaptive_avg_pool2d(v.reshape(1, 2, 4, 12), (2, 4)),
    "adaptive_avg_uneven": lambda v: functional.adaptive_avg_pool2d(v.reshape(1, 2, 4, 12), (3, 5)),
    "global_max": lambda v: functional.adaptive_max_pool2d(v.reshape(1, 2, 4, 12), 1),
}

ALL = {**ELEMENTWISE, **REDUCTIONS, **POOLINGS}


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    """``v``: numbers with ties; rows with NaN, with each infinity or both, with all, and of minus infinity alone."""
    numbers = torch.randint(-2, 5, (8, 12), generator=torch.Generator().manual_seed(0)).to(dtype) / 2
    for row, column, value in [
        (0, 5, math.nan), (1, 3, math.inf), (1, 7, math.inf), (2, 0, -math.inf), (2, 9, math.nan), (2, 10, math.nan),
        (3, 2, math.inf), (3, 4, -math.inf), (4, 11, math.nan), (4, 1, math.inf), (4, 6, -math.inf),
    ]:  # fmt: skip
        numbers[row, column] = value
    numbers[6] = -math.inf
    return numbers


class Special(nn.Module):
    """Functions of operands, one input for each."""

    def __init__(self, cases: list[tuple[str, str]]):
        super().__init__()
        self.cases = cases
        self.layouts = list(dict.fromkeys(layout for _, layout in cases))

    def inputs(self, v: Tensor) -> tuple[Tensor, ...]:
        """The inputs that are made of ``v``."""
        return tuple(LAYOUTS[layout][0](v) for layout in self.layouts)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        operands = {layout: LAYOUTS[layout][1](x) for layout, x in zip(self.layouts, inputs, strict=True)}
        return tuple(ALL[name](operands[layout]) for name, layout in self.cases)
