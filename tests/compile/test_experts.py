"""The CPU's kernel of products by experts: its results are the definition's, and a row's are its own alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hidet
import pytest
import torch
from hidet import ops
from hidet.graph import FlowGraph

import hidet_dist
from hidet_dist import operators
from hidet_dist.artifacts import Manifest
from hidet_dist.weights.panels import PANEL_WIDTHS

EXPERTS, SIZE, INNER = 6, 40, 72


@dataclass(frozen=True)
class Case:
    """A layer: the layout and the dtype of its weights, the precision that they are stored in, and processors."""

    transposed: bool = True
    dtype: str = "float32"
    precision: str = ""
    arch: str = "native"
    most: float = 1e-5  # relative error


CASES = {
    "rows of matrices": Case(transposed=False),
    "bfloat16": Case(dtype="bfloat16", most=1e-2),
    "int8": Case(precision="int8", most=0.03),
}
SLOW = {
    "float16": Case(dtype="float16", most=2e-3),
    "int4": Case(precision="int4", most=0.3),
    "any processor": Case(arch="x86-64"),
    "AVX2": Case(arch="x86-64-v3"),
    "AVX2, int4": Case(arch="x86-64-v3", precision="int4", most=0.3),
}


def matrices(case: Case) -> list[torch.Tensor]:
    """Those of the gate, of the other projection and of the one back, [experts, inner, columns]."""
    generator = torch.Generator().manual_seed(0)
    sides = [(SIZE, INNER), (SIZE, INNER), (INNER, SIZE)]
    made = (torch.randn(EXPERTS, *side, generator=generator) / side[0] ** 0.5 for side in sides)
    return [one.to(getattr(torch, case.dtype)) for one in made]


def layer(case: Case) -> FlowGraph:
    """A layer of experts, for any number of tokens with two choices each."""
    x = hidet.symbol(["tokens", SIZE], case.dtype, "cpu")
    chosen = hidet.symbol(["tokens", 2], "int32", "cpu")
    scales = hidet.symbol(["tokens", 2], "float32", "cpu")
    gate, up, down = (hidet.from_torch((one.mT if case.transposed else one).contiguous()) for one in matrices(case))
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        y = ops.silu(operators.expert_product(x, gate, chosen, transposed=case.transposed))
        y = y * operators.expert_product(x, up, chosen, transposed=case.transposed)
        return hidet.trace_from(
            operators.expert_product(y, down, chosen, scales, transposed=case.transposed), [x, chosen, scales]
        )


def inputs(case: Case, tokens: int) -> list[torch.Tensor]:
    """Tokens that choose the first experts most, the fourth never, and in some places none."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.tensor([8.0, 4.0, 2.0, 0.0, 1.0, 1.0]).expand(tokens, -1)
    chosen = torch.multinomial(weights, 2, generator=generator).int()
    chosen[5::7, 1] = -1
    chosen[6::11, 0] = EXPERTS
    x = torch.randn(tokens, SIZE, generator=generator).to(getattr(torch, case.dtype))
    return [x, chosen, torch.rand(tokens, 2, generator=generator)]


def wanted(case: Case, x: torch.Tensor, chosen: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The layer in double precision, each choice by itself."""
    gate, up, down = (one.double() for one in matrices(case))
    y = torch.zeros(len(x), SIZE, dtype=torch.float64)
    for t, (row, experts, own) in enumerate(zip(x.double(), chosen.tolist(), scales.double(), strict=True)):
        for expert, scale in zip(experts, own, strict=True):
            if 0 <= expert < EXPERTS:
                hidden = torch.nn.functional.silu(row @ gate[expert]) * (row @ up[expert])
                y[t] += scale * (hidden @ down[expert])
    return y


def check(case: Case, folder: Path, counts: Sequence[int]) -> None:
    config: dict = {"symbols": {"tokens": 64}}
    if case.precision:
        config["weights"] = {"precision": case.precision}
    if case.arch != "native":
        config["arch"] = case.arch
    hidet_dist.auto_parallel(layer(case), {"mesh_shape": [1]}, config, folder)
    manifest = Manifest.load(folder)
    (stage,) = manifest.program().stages
    width = PANEL_WIDTHS[manifest.arch]
    assert [(one.matrices, one.width, one.transposed) for one in stage.panels.values()] == [
        (EXPERTS, width, case.transposed)
    ] * 3
    most = max(counts)
    x, chosen, scales = inputs(case, most)
    expected = wanted(case, x, chosen, scales)
    with hidet_dist.load_partition(folder) as partition:
        whole = partition(x, chosen, scales)
        error = torch.linalg.norm(whole.double() - expected) / torch.linalg.norm(expected)
        assert error < case.most
        for count in counts:
            assert torch.equal(partition(x[:count], chosen[:count], scales[:count]), whole[:count])
        last = slice(most - 1, most)
        assert torch.equal(partition(x[last], chosen[last], scales[last]), whole[last])


@pytest.mark.parametrize("name", CASES)
def test_results_are_right_and_do_not_depend_on_other_tokens(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path / "out", [1, 2, 7, 64, 600])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_results_are_right_and_do_not_depend_on_other_tokens_for_other_weights(name: str, tmp_path: Path) -> None:
    check(SLOW[name], tmp_path / "out", [1, 2, 7, 64, 9000])
