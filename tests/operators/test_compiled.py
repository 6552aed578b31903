"""Operators compiled for the CPU, beside PyTorch's: one graph with an output of each kind of definition."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest
import torch
from tests.operators.against_torch import booleans, floats, integers
from torch.nn import functional

import hidet_dist
from hidet_dist import operators
from hidet_dist.operators import elementwise, reductions

CASES: dict[str, tuple[Any, Any]] = {
    "round": (lambda t: elementwise.round(t["x"]), lambda t: torch.round(t["x"])),
    "remainder": (lambda t: elementwise.remainder(t["x"], 1.5), lambda t: torch.remainder(t["x"], 1.5)),
    "floor_divide": (lambda t: elementwise.floor_divide(t["i"], -3), lambda t: torch.floor_divide(t["i"], -3)),
    "fmod": (lambda t: elementwise.fmod(t["i"], t["n"]), lambda t: torch.fmod(t["i"], t["n"])),
    "softplus": (lambda t: elementwise.softplus(t["x"]), lambda t: functional.softplus(t["x"])),
    "mish": (lambda t: elementwise.mish(t["x"]), lambda t: functional.mish(t["x"])),
    "elu": (lambda t: elementwise.elu(t["x"]), lambda t: functional.elu(t["x"])),
    "log_sigmoid": (lambda t: elementwise.log_sigmoid(t["x"]), lambda t: functional.logsigmoid(t["x"])),
    "clamp": (lambda t: elementwise.clamp(t["x"], -0.5, 0.5), lambda t: t["x"].clamp(-0.5, 0.5)),
    "power": (lambda t: elementwise.pow(t["x"], 3), lambda t: t["x"] ** 3),
    "select": (lambda t: elementwise.where(t["b"], 1.5, -math.inf), lambda t: torch.where(t["b"], 1.5, -math.inf)),
    "masked": (
        lambda t: reductions.softmax(elementwise.masked_fill(t["x"], t["b"], -math.inf), 1),
        lambda t: t["x"].masked_fill(t["b"], -math.inf).softmax(1),
    ),
    "to_bool": (lambda t: operators.to_dtype(t["x"], "bool"), lambda t: t["x"].bool()),
    "sum": (lambda t: reductions.sum(t["i"], 1), lambda t: t["i"].sum(1)),
    "any": (lambda t: reductions.any(t["b"], 0), lambda t: t["b"].any(0)),
    "argmax": (lambda t: reductions.argmax(t["x"], 1), lambda t: t["x"].argmax(1)),
    "cumsum": (lambda t: operators.cumsum(t["i"], 1), lambda t: t["i"].cumsum(1)),
    "cumprod": (lambda t: operators.cumprod(t["x"], 0), lambda t: t["x"].cumprod(0)),
    "cummax": (lambda t: operators.cummax(t["i"], 1)[1], lambda t: t["i"].cummax(1)[1]),
    "sort": (lambda t: operators.sort(t["n"], 1)[1], lambda t: torch.sort(t["n"], dim=1, stable=True)[1]),
    "topk": (lambda t: operators.topk(t["x"], 3, 1)[0], lambda t: torch.topk(t["x"], 3, 1)[0]),
    "index": (lambda t: operators.index(t["x"], [t["r"], t["c"]]), lambda t: t["x"][t["r"], t["c"]]),
    "index_put": (
        lambda t: operators.index_put(t["x"], [t["r"]], t["v"]),
        lambda t: t["x"].index_put([t["r"]], t["v"]),
    ),
    "index_add": (
        lambda t: operators.index_add(t["x"], 0, t["r"], t["v"]),
        lambda t: t["x"].index_add(0, t["r"], t["v"]),
    ),
    "scatter": (lambda t: operators.scatter(t["x"], 1, t["p"], t["x"]), lambda t: t["x"].scatter(1, t["p"], t["x"])),
    "scatter_add": (
        lambda t: operators.scatter_add(t["x"], 1, t["p"], t["x"]),
        lambda t: t["x"].scatter_add(1, t["p"], t["x"]),
    ),
    "histc": (lambda t: operators.histc(t["x"], 5, -2, 2), lambda t: torch.histc(t["x"], 5, -2, 2)),
    "one_hot": (lambda t: operators.one_hot(t["r"], 4), lambda t: functional.one_hot(t["r"], 4)),
    "grouped": (
        lambda t: operators.grouped_product(t["x"], t["w"], t["o"], once=lambda _, make: make()),
        lambda t: torch.cat([t["x"][:1] @ t["w"][0], t["x"][1:3] @ t["w"][2], torch.zeros(1, 2)]),
    ),
    "reflect": (
        lambda t: operators.pad(t["img"], [1, 2, 1, 0], "reflect"),
        lambda t: functional.pad(t["img"], [1, 2, 1, 0], "reflect"),
    ),
    "roll": (lambda t: operators.roll(t["img"], [1, -2], [2, 3]), lambda t: t["img"].roll([1, -2], [2, 3])),
    "max_pool": (
        lambda t: operators.max_pool(t["img"], 2, 3, 2, 1, 1, True),
        lambda t: functional.max_pool2d(t["img"], 3, 2, 1, 1, True),
    ),
    "avg_pool": (
        lambda t: operators.avg_pool(t["img"], 2, 3, 2, 1, True, False),
        lambda t: functional.avg_pool2d(t["img"], 3, 2, 1, True, False),
    ),
    "adaptive": (
        lambda t: operators.adaptive_avg_pool(t["img"], [2, None]),
        lambda t: functional.adaptive_avg_pool2d(t["img"], (2, None)),
    ),
    "adaptive_max": (
        lambda t: operators.adaptive_max_pool(t["img"], [2, 3]),
        lambda t: functional.adaptive_max_pool2d(t["img"], (2, 3)),
    ),
    "bilinear": (
        lambda t: operators.interpolate(t["img"], [7, 9], "bilinear"),
        lambda t: functional.interpolate(t["img"], (7, 9), mode="bilinear"),
    ),
    "nearest": (
        lambda t: operators.interpolate(t["img"], [10, 12]),
        lambda t: functional.interpolate(t["img"], (10, 12)),
    ),
    "transposed": (
        lambda t: operators.conv_transpose(t["img"], t["f"], 2, 1, 1, 2),
        lambda t: functional.conv_transpose2d(t["img"], t["f"], None, 2, 1, 1, 2),
    ),
    "tiles": (
        lambda t: operators.conv_transpose(t["img"], t["f2"], 2),
        lambda t: functional.conv_transpose2d(t["img"], t["f2"], None, 2),
    ),
    "group_norm": (lambda t: operators.group_norm(t["img"], 2), lambda t: functional.group_norm(t["img"], 2)),
    "rms_norm": (lambda t: operators.rms_norm(t["x"], [6]), lambda t: functional.rms_norm(t["x"], [6])),
}


def inputs() -> dict[str, torch.Tensor]:
    return {
        "x": floats(4, 6),
        "i": integers(-9, 10, 4, 6),
        "n": integers(1, 4, 4, 6),
        "b": booleans(4, 6),
        "r": torch.tensor([2, 0, 3]),
        "c": torch.tensor([-1, 5, 1]),
        "v": floats(3, 6),
        "p": torch.stack([torch.tensor([3, 1, 0, 2, 5, 4])] * 4),
        "w": floats(3, 6, 2),
        "o": torch.tensor([1, 1, 3]),
        "img": floats(2, 4, 5, 6),
        "f": floats(4, 3, 3, 3),
        "f2": floats(4, 3, 2, 2),
    }


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_compiled_operators_compute_what_pytorch_does(part, tmp_path):
    names = list(CASES)[part::4]
    given = inputs()
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        symbols = {
            name: hidet.symbol(list(x.shape), str(x.dtype).removeprefix("torch."), "cpu") for name, x in given.items()
        }
        outputs = [CASES[name][0](symbols) for name in names]
        used = {x for y in outputs for x in _leaves(y)}
        order = [name for name, x in symbols.items() if x in used]
        graph = hidet.trace_from(outputs, [symbols[name] for name in order])
    folder = Path(tmp_path) / "built"
    hidet_dist.auto_parallel(graph, {"mesh_shape": [1]}, {}, folder)
    with hidet_dist.load_partition(folder, 0) as model:
        found = model(*(given[name].numpy() for name in order))
    for name, own in zip(names, found, strict=True):
        want = CASES[name][1](given).numpy()
        assert own.dtype == want.dtype, name
        np.testing.assert_allclose(own, want, rtol=2e-5, atol=2e-6, err_msg=name)


def _leaves(y: hidet.Tensor) -> set[hidet.Tensor]:
    found, stack, seen = set(), [y], set()
    while stack:
        x = stack.pop()
        if x in seen:
            continue
        seen.add(x)
        if x.trace is None:
            found.add(x)
        else:
            stack.extend(x.op.inputs)
    return found
