"""Weights of products in panels: which are, what artifacts hold, and results that do not depend on other rows."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import hidet
import numpy as np
import pytest
import safetensors.torch
import torch
from hidet import ops
from hidet.graph import FlowGraph, Tensor

import hidet_dist
from hidet_dist.artifacts import Manifest
from hidet_dist.compile import optimize_program
from hidet_dist.compile.cpu.target import CpuTarget
from hidet_dist.errors import ArtifactError, ConfigError, WeightsError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.normalize.storage import with_storages
from hidet_dist.operators import topk
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh
from hidet_dist.weights.packing import packed
from hidet_dist.weights.panels import PANEL_WIDTHS, Panels, StoredPrecision

RNG = np.random.default_rng(0)
TARGET = CpuTarget("x86-64-v3")


def constant(*shape: int, dtype: str = "float32") -> Tensor:
    return hidet.asarray(RNG.standard_normal(shape, np.float32) / 8).to(dtype)


def symbol(*shape: int | str, dtype: str = "float32") -> Tensor:
    return hidet.symbol(list(shape), dtype, "cpu")


def packed_graph(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], precision: StoredPrecision | None = None
) -> tuple[list[str], list[Panels]]:
    """The names of the operators of a graph on one device, and its weights in panels."""
    graph = normalize(hidet.trace_from(list(outputs), list(inputs)))
    precisions = {}
    if precision is not None:
        graph = with_storages(
            graph, ("float32",), lambda x, transposed: TARGET.storage(precision, len(x.shape), transposed)
        ).graph
    program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0])
    if precision is not None:
        precisions = {weight.name: precision for weight in program.weights if weight.storage is not None}
    result, weights = TARGET.pack(optimize_program(program, TARGET), program.weight_placeholders, (), precisions)
    for weight in weights.values():
        assert weight.placeholder in result.inputs
    return [node.name for node in result.nodes], [weight.panels for weight in weights.values()]


def test_weights_of_products_are_brought_into_panels() -> None:
    x = symbol(3, 20)
    y = ops.matmul(ops.relu(ops.matmul(x, constant(20, 37)) + constant(37)), constant(37, 8))
    names, panels = packed_graph([y], [x])
    assert names == ["PanelMatmul", "PanelMatmul"]
    assert panels == [Panels(1, 20, 37, False, 16), Panels(1, 37, 8, False, 16)]


def test_weights_with_transposed_matrices_are() -> None:
    x = symbol(3, 20)
    names, panels = packed_graph([ops.matmul_nt(x, constant(37, 20))], [x])
    assert names == ["PanelMatmul"]
    assert panels == [Panels(1, 20, 37, True, 16)]


def test_stacks_of_matrices_are() -> None:
    x = symbol(4, 3, 20)
    names, panels = packed_graph([ops.matmul(x, constant(4, 20, 37))], [x])
    assert names == ["PanelMatmul"]
    assert panels == [Panels(4, 20, 37, False, 16)]


def test_a_weight_of_several_products_is_if_they_read_the_same_matrix() -> None:
    x, w = symbol(3, 20), constant(20, 20)
    y = ops.matmul(ops.relu(ops.matmul(x, w)), w)
    assert packed_graph([y], [x])[0] == ["PanelMatmul", "PanelMatmul"]
    z = ops.matmul_nt(ops.relu(ops.matmul(x, w)), w)
    assert packed_graph([z], [x]) == (["PanelMatmul", "PanelMatmul"], [])


def test_weights_that_other_operators_read_lie_row_by_row() -> None:
    ids, table = symbol(3, dtype="int32"), constant(37, 20)
    names, panels = packed_graph([ops.matmul_nt(ops.relu(ops.take(table, ids)), table)], [ids])
    assert "PanelMatmul" in names
    assert "BlasMatmul" not in names
    assert panels == []
    x, w = symbol(3, 20), constant(20, 20)
    names, panels = packed_graph([ops.matmul(x, w), w * ops.sum(x, [0])], [x])
    assert "PanelMatmul" in names
    assert panels == []
    names, panels = packed_graph([ops.matmul(w, ops.relu(x.reshape([20, 3])))], [x])
    assert names[-1] == "BlasMatmul"
    assert panels == []


def test_inputs_are_never() -> None:
    a, b = symbol(3, 20), symbol(20, 37)
    assert packed_graph([ops.matmul(a, b)], [a, b]) == (["BlasMatmul"], [])


def model(dtype: str) -> tuple[FlowGraph, list[Tensor]]:
    """Products by a matrix, a transposed one and a stack, with epilogues."""
    x = symbol("rows", 70, dtype=dtype)
    weights = [constant(70, 131, dtype=dtype), constant(131, dtype=dtype), constant(90, 131, dtype=dtype)]
    weights.append(constant(3, 90, 33, dtype=dtype))
    y = ops.gelu(ops.matmul(x, weights[0]) + weights[1])
    y = ops.matmul_nt(y, weights[2])
    return hidet.trace_from(ops.matmul(ops.reshape(y, [1, y.shape[0], 90]), weights[3]) * 0.5, [x]), weights


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensor]]:
    folder = tmp_path_factory.mktemp("panels") / "artifacts"
    graph, weights = model(request.param)
    hidet_dist.auto_parallel(graph, {"mesh_shape": [1]}, {"symbols": {"rows": 64}}, folder)
    return folder, weights


def test_a_rows_result_is_the_same_beside_any_others(built: tuple[Path, list[Tensor]]) -> None:
    folder, weights = built
    dtype = getattr(torch, weights[0].dtype.name)
    x = torch.randn(300, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    w = [weight.torch().double() for weight in weights]
    hidden = torch.nn.functional.gelu(x.double() @ w[0] + w[1])
    expected = (hidden @ w[2].t()) @ w[3] * 0.5
    with hidet_dist.load_partition(folder) as partition:
        whole = partition(x)
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(whole.double(), expected, rtol=tolerance, atol=tolerance)
        for rows in (1, 2, 3, 6, 7, 14, 15, 64, 193):
            assert torch.equal(partition(x[:rows]), whole[:, :rows])
        assert torch.equal(partition(x[200:201]), whole[:, 200:201])


def test_artifacts_hold_the_weights_as_kernels_read_them(built: tuple[Path, list[Tensor]]) -> None:
    folder, weights = built
    manifest = Manifest.load(folder)
    (stage,) = manifest.program().stages
    stored = safetensors.torch.load_file(folder / manifest.weights_files[0])
    width = PANEL_WIDTHS[manifest.arch]
    expected = [Panels(1, 70, 131, False, width), Panels(1, 131, 90, True, width), Panels(3, 90, 33, False, width)]
    assert list(stage.panels.values()) == expected
    for (name, panels), weight in zip(stage.panels.items(), (weights[0], *weights[2:]), strict=True):
        assert torch.equal(stored[name], packed(weight.torch(), panels))
    assert stage.weight_bytes == sum(int(weight.nbytes) for weight in weights)
    assert "openblas" not in stage.libraries


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"width": 24}, r"panels\['w\d'\].width is 24; it must be \d+, by arch"),
        ({"depth": 0}, r"panels\['w\d'\].depth is 0; it must be positive"),
        ({"depth": 131, "columns": 70}, r"panels\.w\d\.depth is 131, but the launcher was built for 70"),
        ({"transposed": True}, r"panels\.w\d\.transposed is True, but the launcher was built for False"),
    ],
)
def test_artifacts_of_another_layout_are_refused(
    built: tuple[Path, list[Tensor]], tmp_path: Path, change: dict, says: str
) -> None:
    manifest = Manifest.load(built[0])
    copy = Path(shutil.copytree(built[0], tmp_path / "copy"))
    (stage,) = manifest.program().stages
    name = next(iter(stage.panels))
    panels = {**stage.panels, name: dataclasses.replace(stage.panels[name], **change)}
    program = dataclasses.replace(manifest.program(), stages=(dataclasses.replace(stage, panels=panels),))
    dataclasses.replace(manifest, programs=(program,)).save(copy)
    with pytest.raises(ArtifactError, match=says):
        hidet_dist.load_partition(copy)


def test_lower_precision_is_for_products_of_float32_weights_but_routers() -> None:
    ids, tokens = symbol(5, dtype="int32"), constant(37, 20)
    x = ops.take(tokens, ids)
    router, up, head = constant(20, 6), constant(20, 64), constant(64, 9)
    _, chosen = topk(ops.softmax(ops.matmul(x, router), 1), 2)
    y = ops.matmul(ops.relu(ops.matmul(x, up) + constant(64)), head)
    _, panels = packed_graph([y, chosen], [ids], StoredPrecision("int4", 64))
    assert sorted(panels, key=lambda one: one.columns) == [
        Panels(1, 20, 6, False, 16),
        Panels(1, 64, 9, False, 16, "int4", 64),
        Panels(1, 20, 64, False, 16, "int4", 64),
    ]
    x = symbol(3, 20, dtype="float16")
    (half,) = packed_graph([ops.matmul(x, constant(20, 8, dtype="float16"))], [x], StoredPrecision("int8"))[1]
    assert half == Panels(1, 20, 8, False, 16)


def test_tables_that_are_the_matrix_of_a_product_too_have_a_lower_precision_there() -> None:
    ids, table = symbol(3, dtype="int32"), constant(37, 20)
    y = ops.matmul_nt(ops.relu(ops.take(table, ids)), table)
    assert packed_graph([y], [ids], StoredPrecision("int8"))[1] == [Panels(1, 20, 37, True, 16, "int8", 32)]
    other = symbol(37, 20)
    assert packed_graph([y, table * other], [ids, other], StoredPrecision("int8"))[1] == []


@pytest.mark.parametrize(
    ("precision", "most"),
    [
        ("int8", 0.02),
        pytest.param("int4", 0.2, marks=pytest.mark.slow),
        ("uint4", 0.15),
        ("bfloat16", 0.01),
        pytest.param("float16", 1e-3, marks=pytest.mark.slow),
    ],
)
def test_weights_are_stored_in_a_lower_precision(tmp_path: Path, precision: str, most: float) -> None:
    graph, weights = model("float32")
    config = {"symbols": {"rows": 64}, "weights": {"precision": precision}}
    hidet_dist.auto_parallel(graph, {"mesh_shape": [1]}, config, tmp_path / "out")
    manifest = Manifest.load(tmp_path / "out")
    (stage,) = manifest.program().stages
    stored = safetensors.torch.load_file(tmp_path / "out" / manifest.weights_files[0])
    for (name, panels), weight in zip(stage.panels.items(), (weights[0], *weights[2:]), strict=True):
        assert panels.precision == precision
        assert torch.equal(stored[name], packed(weight.torch(), panels))
    assert stage.weight_bytes == sum(one.nbytes for name, one in stored.items() if name.startswith("w"))
    w = [weight.torch().double() for weight in weights]
    x = torch.randn(70, 70, generator=torch.Generator().manual_seed(0))
    expected = (torch.nn.functional.gelu(x.double() @ w[0] + w[1]) @ w[2].t()) @ w[3] * 0.5
    with hidet_dist.load_partition(tmp_path / "out") as partition:
        whole = partition(x)
        assert torch.linalg.norm(whole - expected) < most * torch.linalg.norm(expected)
        for rows in (1, 5, 16):
            assert torch.equal(partition(x[:rows]), whole[:, :rows])


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"precision": "int3"}, r"\['precision'\] must be one of float16, bfloat16, int8, int4, uint4, stored"),
        ({"precision": "int8", "group": 48}, r"\['group'\] must be one of 32, 64, 128"),
        ({"precision": "float16", "group": 32}, r"\['group'\] is for the precisions int8, int4, uint4"),
        ({"bits": 8}, "'bits'"),
        ({"files": 3}, r"\['files'\] must be the path"),
    ],
)
def test_other_options_of_weights_are_refused(weights: dict, says: str, tmp_path: Path) -> None:
    graph, _ = model("float32")
    with pytest.raises(ConfigError, match=says):
        hidet_dist.auto_parallel(graph, {"mesh_shape": [1]}, {"weights": weights}, tmp_path / "out")


def test_weights_that_a_precision_cannot_hold_are_refused(tmp_path: Path) -> None:
    x, w = symbol(3, 20), hidet.asarray(np.full((20, 8), 1e38, np.float32))
    graph = hidet.trace_from(ops.matmul(x, w), [x])
    with pytest.raises(WeightsError, match="too large for the precision int8"):
        hidet_dist.auto_parallel(graph, {"mesh_shape": [1]}, {"weights": {"precision": "int8"}}, tmp_path / "out")


@pytest.mark.parametrize("named", [False, True])
def test_programs_of_one_storage_look_rows_up_in_its_own_dtype(tmp_path: Path, named: bool) -> None:
    data = RNG.standard_normal((37, 20), np.float32)
    safetensors.torch.save_file({"table": torch.from_numpy(data)}, tmp_path / "w.safetensors")
    x, ids = symbol(3, 20), symbol(3, dtype="int32")
    tables = [hidet.distributed.weight("table", [37, 20]) if named else hidet.asarray(data) for _ in range(3)]
    graphs = {
        "rows": hidet.trace_from(ops.take(tables[0], ids), [ids]),
        "product": hidet.trace_from(ops.matmul_nt(x, tables[1]), [x]),
        "both": hidet.trace_from(ops.matmul_nt(ops.take(tables[2], ids), tables[2]), [ids]),
    }
    config = {"weights": {"precision": "int8"} | ({"files": tmp_path / "w.safetensors"} if named else {})}
    hidet_dist.build_family(graphs, {"mesh_shape": [1]}, config, tmp_path / "out")
    manifest = Manifest.load(tmp_path / "out")
    assert [len(program.stages[0].panels) for program in manifest.programs] == [0, 1, 1]
    if named:
        stored = safetensors.torch.load_file(tmp_path / "out" / manifest.weights_files[0])
        dtypes = sorted(str(one.dtype) for name, one in stored.items() if name.startswith("w"))
        assert dtypes == ["torch.float32", "torch.uint8"]
    wanted = np.array([4, 0, 36], np.int32)
    with hidet_dist.load_partition(tmp_path / "out") as programs:
        rows = programs.program("rows")(wanted)
        np.testing.assert_array_equal(rows, data[wanted])
        product = programs.program("product")(rows)
        np.testing.assert_array_equal(programs.program("both")(wanted), product)
    expected = rows @ data.T
    assert np.linalg.norm(product - expected) < 0.02 * np.linalg.norm(expected)


def test_programs_of_one_storage_read_a_weight_in_one_layout(tmp_path: Path) -> None:
    w, x, y, ids = constant(20, 20), symbol(3, 20), symbol(3, 20), symbol(3, dtype="int32")
    graphs = {
        "product": hidet.trace_from(ops.matmul(x, w), [x]),
        "rows": hidet.trace_from(ops.matmul(y, w) + ops.take(w, ids), [y, ids]),
    }
    hidet_dist.build_family(graphs, {"mesh_shape": [1]}, {}, tmp_path / "out")
    manifest = Manifest.load(tmp_path / "out")
    assert [stage.panels for program in manifest.programs for stage in program.stages] == [{}, {}]
    given, rows = RNG.standard_normal((3, 20), np.float32), np.array([4, 0, 19], np.int32)
    with hidet_dist.load_partition(tmp_path / "out") as programs:
        product = programs.program("product")(torch.from_numpy(given))
        both = programs.program("rows")(torch.from_numpy(given), torch.from_numpy(rows))
    torch.testing.assert_close(both - product, w.torch()[rows], rtol=0, atol=1e-5)
