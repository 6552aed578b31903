"""Models built for GPUs that are not there."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from hidet_dist import auto_parallel
from hidet_dist.artifacts.manifest import Manifest
from hidet_dist.compile.cuda import build
from hidet_dist.errors import CompileError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.search import search
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.soundness.graphs import PATTERNS
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import bert, models
from hidet_dist.toolchain.cuda import Toolkit, find_toolkit
from hidet_dist.view import GraphView


def minilm(layers=1):
    config = bert.BertConfig(96, 64, layers, 4, 256, 32)
    return bert.trace(bert.random_bert(config, 0), 2, 8)


def gpt2(layers=1):
    return models.gpt2(layers)[0]


def llama(layers=1):
    return models.llama(layers)[0]


MODELS = {"minilm": minilm, "gpt2": gpt2, "llama": llama}
BUILT = {**MODELS, **{name: partial(PATTERNS[name], np.random.default_rng(0)) for name in ("mlp", "attention")}}


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """A substitute for nvcc that is never called."""
    monkeypatch.setattr(build, "find_toolkit", lambda: Toolkit(tmp_path / "nvcc", "13.0.88", tmp_path))
    monkeypatch.setattr(build, "link_folder", lambda toolkit, folder: tmp_path)


@pytest.fixture(scope="session")
def nvcc():
    """The toolkit; without one, tests that compile are skipped, and say why."""
    try:
        return find_toolkit()
    except CompileError as error:
        pytest.skip(str(error))


def budget(graph, ranks):
    """Bytes for 1.3 of an even share of the weights, beside what a single device would hold of all else."""
    normal = normalize(graph)
    stage = search(normal, builtin("dgx-h100", DeviceMesh((1,)))).plan.stages[0]
    weights = stage.weight_bytes_per_device
    return int(weights * 1.3 / ranks) + max(live_bytes(GraphView(normal), stage)) - weights


@pytest.fixture(
    scope="package",
    params=[
        pytest.param(("mlp", "sm_90"), id="mlp-sm_90"),
        pytest.param(("attention", "sm_90"), id="attention-sm_90", marks=pytest.mark.slow),
        pytest.param(("gpt2", "sm_90"), id="gpt2-sm_90", marks=pytest.mark.slow),
        pytest.param(("minilm", "sm_80"), id="minilm-sm_80", marks=pytest.mark.slow),
        pytest.param(("llama", "sm_90"), id="llama-sm_90", marks=pytest.mark.slow),
        pytest.param(("gpt2", "sm_80"), id="gpt2-sm_80", marks=pytest.mark.slow),
        pytest.param(("minilm", "sm_90"), id="minilm-sm_90", marks=pytest.mark.slow),
        pytest.param(("llama", "sm_80"), id="llama-sm_80", marks=pytest.mark.slow),
    ],
)
def built(request, nvcc, tmp_path_factory):
    """A layer of a model on two GPUs that each hold little more than half of its weights: its artifacts."""
    name, arch = request.param
    graph = BUILT[name]()
    out = tmp_path_factory.mktemp("artifacts") / name
    # Without cuBLAS, one candidate of each kernel, which needs no library.
    target = {"target": "cuda", "arch": arch, "mem_budget": budget(graph, 2), "cuda": {"cublas": False}}
    result = auto_parallel(graph, {"mesh_shape": [2]}, target, out)
    manifest = Manifest.load(out)
    (stage,) = manifest.program().stages
    kernels = [(kernel, out / stage.kernel_file(number)) for number, kernel in enumerate(stage.kernels)]
    return SimpleNamespace(
        name=name, arch=arch, graph=graph, out=out, result=result, manifest=manifest, stage=stage, kernels=kernels
    )
