"""Half precision and several candidates, built for a GPU."""

import hidet
import pytest

from hidet_dist import auto_parallel
from hidet_dist.artifacts.manifest import Manifest
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.normalize.precision import in_precision
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh

from .conftest import MODELS
from .elf import architectures

PINS = {"w0": "(R, S0)", "w1": "(S0, R)"}


def mlp(width):
    x = hidet.symbol([16, width], "float32", "cpu")
    up, down = hidet.randn([width, 2 * width]), hidet.randn([2 * width, width])
    return hidet.trace_from(hidet.ops.gelu(x @ up) @ down + x, [x])


def build(graph, out, ranks=1, **keys):
    auto_parallel(graph, {"mesh_shape": [ranks]}, {"target": "cuda", "arch": "sm_90", **keys}, out)
    manifest = Manifest.load(out)
    (stage,) = manifest.program().stages
    for number in range(len(stage.kernels)):
        assert architectures(out / stage.kernel_file(number)) == {90}
    return stage


@pytest.mark.slow
def test_products_weights_and_communication_are_in_half_precision(nvcc, tmp_path):
    graph = mlp(64)
    stage = build(graph, tmp_path / "out", 2, precision="float16", pins=PINS)
    assert [name for name in stage.kernels if "MatmulF16Cute" in name] == ["FusedMatmulF16Cute"] * 2
    assert stage.weight_bytes == 2 * 64 * 128 * 2 // 2
    assert stage.communications
    assert all("float16" in text for text in stage.communications)
    assert {x.dtype for x in (*stage.inputs, *stage.outputs)} == {"float32"}


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_costs_half_precision_and_less(name):
    graph = MODELS[name]()
    graphs = (graph, in_precision(graph, "float16").graph)
    whole, half = (search(normalize(own), builtin("dgx-h100", DeviceMesh((1,)))).plan for own in graphs)
    assert half.stages[0].weight_bytes_per_device < 0.6 * whole.stages[0].weight_bytes_per_device


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_models_compile_in_half_precision(nvcc, name, dtype, tmp_path):
    build(MODELS[name](), tmp_path / "out", precision=dtype)


@pytest.mark.slow
def test_all_candidates_are_built(nvcc, tmp_path):
    x = hidet.symbol([16, 256], "float32", "cpu")
    graph = hidet.trace_from(hidet.ops.relu(x @ hidet.randn([256, 128])), [x])
    stage = build(graph, tmp_path / "out", precision="float16", cuda={"space": 1})
    assert max(stage.candidates) > 1
