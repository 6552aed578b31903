"""Weights taken as files have them, in few bits: their values are those of the reference, bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import hidet
import numpy as np
import pytest
import safetensors.torch
import torch
from hidet import ops

import hidet_dist
from hidet_dist.artifacts import Manifest
from hidet_dist.errors import ConfigError
from hidet_dist.weights.combined import Joined, SlicedSource, Stacked
from hidet_dist.weights.gguf_file import GgufFile, GgufTensor, Reordered
from hidet_dist.weights.named import part_of_weight, weight_of
from hidet_dist.weights.packing import panel_blocks
from hidet_dist.weights.panels import FEW_BITS, Panels
from hidet_dist.weights.sources import source_of
from hidet_dist.weights.stored_groups import read_groups, stored_precision_of

Q = gguf.GGMLQuantizationType
ENCODINGS = {
    Q.Q8_0: (32, 34, [0]),
    Q.Q4_0: (32, 18, [0]),
    Q.Q4_1: (32, 20, [0, 1]),
    Q.Q4_K: (256, 144, [0, 1]),
    Q.Q6_K: (256, 210, [104]),
}
"""The elements and the bytes of a block, and the places of its float16 numbers."""

ROWS = 40


def stored(path: Path, kind: Q, columns: int = 512) -> tuple[GgufTensor, torch.Tensor]:
    """A tensor of random blocks in a file, and its values by the ``gguf`` package."""
    rng = np.random.default_rng(int(kind))
    elements, nbytes, places = ENCODINGS[kind]
    raw = rng.integers(0, 256, (ROWS, columns // elements, nbytes), dtype=np.uint8)
    for place in places:
        halves = (rng.standard_normal((*raw.shape[:2], 1)) / 64).astype(np.float16)
        raw[..., 2 * place : 2 * place + 2] = halves.view(np.uint8)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", raw.reshape(ROWS, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = gguf.quants.dequantize(raw.reshape(ROWS, -1), kind).reshape(ROWS, columns)
    return GgufFile.open(path).tensors["w"], torch.from_numpy(np.ascontiguousarray(values))


def values_of(data: torch.Tensor, panels: Panels) -> torch.Tensor:
    """Read panels of few bits: float32[columns, depth]."""
    few, width, group = FEW_BITS[panels.precision], panels.width, panels.group
    blocks = data.reshape(-1, panels.depth // group, width * (few.scale_bytes + group * few.bits // 8))
    scales = few.scale_bytes * width
    numbers = blocks[..., :scales].contiguous().view(torch.float32 if few.wide else torch.float16).float()
    factors, minimums = numbers[..., :width], numbers[..., width:]
    rest = blocks[..., scales:]
    if few.bits == 8:
        elements = rest.reshape(*rest.shape[:2], group // 4, width, 4).view(torch.int8).transpose(2, 3)
    else:
        halves = rest.reshape(*rest.shape[:2], group // 8, 1, width, 4)
        both_halves = torch.cat([halves & 15, halves >> 4], 3).to(torch.int8)
        elements = both_halves.permute(0, 1, 4, 2, 3, 5) - 8 * (panels.precision == "int4")
    elements = elements.reshape(*rest.shape[:2], width, group).float()
    values = elements * factors[..., None] + (minimums[..., None] if few.affine else 0.0)
    return values.transpose(1, 2).reshape(-1, panels.depth)[: panels.columns]


@pytest.mark.parametrize("kind", ENCODINGS)
def test_groups_have_the_values_of_the_reference(tmp_path: Path, kind: Q) -> None:
    tensor, values = stored(tmp_path / "a.gguf", kind)
    assert torch.equal(tensor.groups([slice(0, ROWS), slice(0, 512)]).values(), values)
    region = [slice(3, 17), slice(96, 320)]
    assert torch.equal(read_groups(tensor, region).values(), values[3:17, 96:320])
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Reordered(tensor, order).groups(region).values(), values[order][3:17, 96:320])


@pytest.mark.parametrize("kind", ENCODINGS)
def test_artifacts_have_the_values_of_the_reference(tmp_path: Path, kind: Q) -> None:
    tensor, values = stored(tmp_path / "a.gguf", kind)
    x = hidet.symbol([3, 512], "float32", "cpu")
    graph = hidet.trace_from(ops.matmul_nt(x, weight_of("w", tensor, tensor.shape, tensor.dtype)), [x])
    config = {"weights": {"precision": "stored"}}
    result = hidet_dist.auto_parallel(graph, {"mesh_shape": [1]}, config, tmp_path / "out")
    (stage,) = Manifest.load(tmp_path / "out").program().stages
    ((name, panels),) = stage.panels.items()
    assert result.weight_bytes_per_rank == [stage.weight_bytes]
    (file,) = (tmp_path / "out").rglob("*.safetensors")
    data = safetensors.torch.load_file(file)[name]
    assert torch.equal(values_of(data.reshape(-1), panels), values)
    given = np.random.default_rng(0).standard_normal((3, 512), np.float32)
    with hidet_dist.load_partition(tmp_path / "out") as model:
        answer = np.asarray(model(given))
    exact = given @ values.T.numpy()
    assert np.linalg.norm(answer - exact) < 0.02 * np.linalg.norm(exact)


def test_shards_are_of_whole_groups(tmp_path: Path) -> None:
    tensor, _ = stored(tmp_path / "a.gguf", Q.Q4_0, 96)  # three groups
    x = hidet.symbol([3, 96], "float32", "cpu")
    graph = hidet.trace_from(ops.matmul_nt(x, weight_of("w", tensor, tensor.shape, tensor.dtype)), [x])
    config = {"weights": {"precision": "stored"}, "arch": "x86-64-v3"}
    (weight,) = hidet_dist.make_plan(graph, {"mesh_shape": [2]}, config).stages[0].weights
    assert weight.storage is not None
    assert str(weight.spec) in ("(R, R)", "(S0, R)", "(R, S0[2,1])")
    (weight,) = (
        hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {**config, "pins": {"w0": "(R, S0)"}}).stages[0].weights
    )
    assert str(weight.spec) == "(R, S0[2,1])"
    with pytest.raises(ConfigError, match="split its groups of 32"):
        hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {**config, "pins": {"w0": "(R, S0[5,1])"}})


def test_weights_joined_and_stacked_of_such_weights_are_taken_too(tmp_path: Path) -> None:
    tensor, values = stored(tmp_path / "a.gguf", Q.Q4_K)
    gate_up = Joined([tensor, tensor], [ROWS, ROWS], 0)
    whole = Stacked([gate_up, gate_up, gate_up], 0)
    expected = torch.cat([values, values]).expand(3, -1, -1)
    weight = weight_of("w", whole, [3, 2 * ROWS, 512], "float32")
    assert stored_precision_of(weight) == tensor.stored_precision
    region = [slice(1, 3), slice(ROWS - 3, ROWS + 5), slice(32, 320)]
    assert torch.equal(read_groups(whole, region).values(), expected[tuple(region)])
    part = part_of_weight(part_of_weight(weight, 1, 7, 60), 2, 64, 256)
    assert stored_precision_of(part) == tensor.stored_precision
    assert stored_precision_of(part_of_weight(weight, 2, 7, 71)) is None
    across = weight_of("w", Joined([tensor, tensor], [512, 512], 1), [ROWS, 1024], "float32")
    assert stored_precision_of(across) is None
    other, _ = stored(tmp_path / "b.gguf", Q.Q8_0)
    mixed = weight_of("w", Joined([tensor, other], [ROWS, ROWS], 0), [2 * ROWS, 512], "float32")
    assert stored_precision_of(mixed) is None


def test_panels_behind_the_last_row_are_zeros(tmp_path: Path) -> None:
    tensor, values = stored(tmp_path / "a.gguf", Q.Q4_1)
    few = weight_of("w", SlicedSource(tensor, [slice(0, 33), slice(0, 512)]), [33, 512], "float32")
    x = hidet.symbol([3, 512], "float32", "cpu")
    graph = hidet.trace_from(ops.matmul_nt(x, few), [x])
    config = {"weights": {"precision": "stored"}, "pins": {"w0": "(S0, R)"}, "arch": "x86-64-v3"}
    (stage,) = hidet_dist.make_plan(graph, {"mesh_shape": [2]}, config).stages  # of 17 rows, and 16 and one of zeros
    panels = Panels(1, 512, 17, True, 16, "uint4", 32)
    blocks = list(panel_blocks(source_of(few), stage.weights[0], stage.mesh, (1,), panels, block_bytes=1))
    assert len(blocks) == 2  # the second has the row of zeros alone
    got = values_of(torch.cat(blocks), panels)
    assert torch.equal(got[:16], values[17:33]) and not got[16:].any()
