"""Weights in panels: the elements of shards, whatever the blocks in which they are read."""

from __future__ import annotations

import math

import pytest
import torch

from hidet_dist.spec import DeviceMesh, TensorPlan, TensorShardSpec
from hidet_dist.weights import read_shard
from hidet_dist.weights.packing import packed, panel_blocks
from hidet_dist.weights.panels import Panels

MESH = DeviceMesh((2,))


class Whole:
    """A source in memory."""

    def __init__(self, elements: torch.Tensor):
        self.elements = elements

    def read(self, region):
        return self.elements[tuple(region)].contiguous()


def by_definition(weight: torch.Tensor, panels: Panels) -> torch.Tensor:
    """The elements in the order that ``hidet_dist/panels.h`` describes."""
    sides = (panels.columns, panels.depth) if panels.transposed else (panels.depth, panels.columns)
    matrices = weight.reshape(panels.matrices, *sides)
    k, j = torch.meshgrid(torch.arange(panels.depth), torch.arange(panels.columns), indexing="ij")
    first = j - j % panels.width
    width = torch.clamp(panels.columns - first, max=panels.width)
    result = torch.full((panels.matrices, panels.depth * panels.columns), -1.0)
    result[:, first * panels.depth + k * width + j % panels.width] = matrices.mT if panels.transposed else matrices
    return result


@pytest.mark.parametrize("block_bytes", [1, 3000, 2**24])
@pytest.mark.parametrize("spec", ["(R, R)", "(R, S0)", "(S0, R)"])
@pytest.mark.parametrize("transposed", [False, True])
def test_shards_in_panels_have_the_elements_of_shards(transposed: bool, spec: str, block_bytes: int) -> None:
    weight = torch.arange(12.0 * 2200).reshape(12, 2200)
    plan = TensorPlan("w", tuple(weight.shape), "float32", 4 * weight.numel(), TensorShardSpec.parse(spec))
    for coordinate in ((0,), (1,)):
        shard = read_shard(Whole(weight), plan, MESH, coordinate)
        depth, columns = reversed(shard.shape) if transposed else shard.shape
        panels = Panels(1, int(depth), int(columns), transposed, 16)
        expected = by_definition(shard, panels)
        assert torch.equal(packed(shard, panels), expected)
        blocks = list(panel_blocks(Whole(weight), plan, MESH, coordinate, panels, block_bytes))
        assert torch.equal(torch.cat(blocks), expected.reshape(-1))
        assert all(block.is_contiguous() for block in blocks)
        assert math.prod(panels.shape) == shard.numel()


@pytest.mark.parametrize("shape", [(2, 3, 5, 19), (6, 5, 19), (6, 95), (30, 19), (570,)])
@pytest.mark.parametrize("transposed", [False, True])
def test_stacks_of_matrices_are_read_whatever_dims_they_have(shape: tuple[int, ...], transposed: bool) -> None:
    weight = torch.arange(570.0).reshape(shape)
    plan = TensorPlan(
        "w", shape, "float32", 4 * weight.numel(), TensorShardSpec.parse(f"({', '.join('R' * len(shape))})")
    )
    panels = Panels(6, 19, 5, True, 8) if transposed else Panels(6, 5, 19, False, 8)
    blocks = panel_blocks(Whole(weight), plan, MESH, (0,), panels)
    assert torch.equal(torch.cat(list(blocks)), by_definition(weight, panels).reshape(-1))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("precision", ["int8", "int4", "uint4", "bfloat16"])
def test_blocks_of_lower_precision_are_those_of_the_whole_weight(precision: str, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 75, 90, generator=generator)
    sides = (90, 75) if transposed else (75, 90)
    panels = Panels(2, *sides, transposed, 16, precision, 0 if precision == "bfloat16" else 32)
    plan = TensorPlan("w", tuple(weight.shape), "float32", 4 * weight.numel(), TensorShardSpec.parse("(R, R, R)"))
    expected = packed(weight, panels)
    for block_bytes in (1, 2**20):
        blocks = list(panel_blocks(Whole(weight), plan, MESH, (0,), panels, block_bytes))
        assert torch.equal(torch.cat(blocks), expected.reshape(-1))


def values_of(stored: torch.Tensor, precision: str) -> torch.Tensor:
    """The values of a stored group of 32 rows and 8 columns."""
    scales = stored[:16].view(torch.float16).float()
    if precision == "int8":
        return stored[16:].view(torch.int8).reshape(8, 8, 4).permute(0, 2, 1).reshape(32, 8).float() * scales
    both = stored[16:].reshape(4, 8, 4).permute(0, 2, 1)
    return (torch.stack([both & 15, both >> 4], 1).reshape(32, 8).float() - 8) * scales


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_weights_of_the_same_groups_are_stored_exactly(precision: str) -> None:
    panels = Panels(1, 32, 8, False, 8, precision, 32)
    weight = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    weight[:, 3] = 0
    once = values_of(packed(weight, panels)[0], precision)
    assert 0 < float((once - weight).abs().max()) < float(weight.abs().max()) / (100 if precision == "int8" else 7)
    assert torch.equal(values_of(packed(once, panels)[0], precision), once)
