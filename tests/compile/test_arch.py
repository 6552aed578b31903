"""The architectures of CPU kernels, and the processors that programs are refused on."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import hidet
import numpy as np
import pytest
from hidet import ops

import hidet_dist
from hidet_dist.artifacts import Manifest
from hidet_dist.compat.cpu_build import precompile_headers
from hidet_dist.compile import optimize_program
from hidet_dist.compile.cpu.build import cpu_target
from hidet_dist.errors import ArtifactError, CompileError, ConfigError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.runtime import processor
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh

X = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)


def build(folder: Path, **options: str) -> Path:
    x = hidet.symbol(list(X.shape), "float32", "cpu")
    y = ops.softmax(ops.relu(ops.matmul(x, hidet.asarray(W))), -1)
    hidet_dist.auto_parallel(hidet.trace_from(y, [x]), {"mesh_shape": [1]}, options, folder)
    return folder


def expected(x: np.ndarray) -> np.ndarray:
    y = np.maximum(x @ W, 0)
    y = np.exp(y - y.max(-1, keepdims=True))
    return y / y.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("arch") / "artifacts", arch="x86-64-v3")


def test_a_level_below_the_processors_can_be_asked_for(artifacts: Path) -> None:
    manifest = Manifest.load(artifacts)
    assert manifest.arch == "x86-64-v3"
    assert {"avx2", "fma", "f16c"} <= set(manifest.cpu_features)
    assert not [name for name in manifest.cpu_features if name.startswith("avx512")]
    with hidet_dist.load_partition(artifacts) as model:
        np.testing.assert_allclose(model(X), expected(X), rtol=1e-4, atol=1e-6)


def test_the_best_level_is_taken_that_the_processor_has(tmp_path: Path) -> None:
    manifest = Manifest.load(build(tmp_path / "artifacts"))
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    assert set(manifest.cpu_features) <= set(flags)
    assert (manifest.arch == "x86-64-v4") == all(f"avx512{part}" in flags for part in ("f", "bw", "cd", "dq", "vl"))


def test_a_processor_that_lacks_a_feature_is_refused(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        own = processor.features() - {"avx2", "fma"}
        patch.setattr(processor, "features", lambda: own)
        with pytest.raises(ConfigError, match=r"x86-64-v3.*lacks avx2, fma\..*\['arch'\]"):
            hidet_dist.load_partition(artifacts)
    with hidet_dist.load_partition(artifacts) as model:  # as if nothing had happened
        model(X)


def test_features_that_are_not_those_of_the_level_are_refused(artifacts: Path, tmp_path: Path) -> None:
    manifest = Manifest.load(artifacts)
    copy = Path(shutil.copytree(artifacts, tmp_path / "copy"))
    for features in ((*manifest.cpu_features, "avx1024f"), manifest.cpu_features[1:], ()):
        dataclasses.replace(manifest, cpu_features=features).save(copy)
        with pytest.raises(ArtifactError, match=r"cpu_features are .* those of its arch, x86-64-v3"):
            hidet_dist.load_partition(copy)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"arch": "znver3"}, "must be one of native, x86-64-v4, x86-64-v3, x86-64-v2, x86-64; got 'znver3'"),
        ({"arch": "sm_90"}, "is for the target 'cuda'; the target is 'cpu'"),
        ({"arch": "x86-64-v3", "target": "cuda"}, "is for the target 'cpu'; the target is 'cuda'"),
        ({"arch": 3}, "must be one of native"),
    ],
)
def test_other_levels_are_refused_before_work_starts(tmp_path: Path, options: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(tmp_path / "artifacts", **options)
    assert not list(tmp_path.iterdir())


def test_a_machine_without_a_compiler_is_refused_before_work_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match=r"needs g\+\+"):
        build(tmp_path / "artifacts")
    assert not list(tmp_path.iterdir())


def test_loading_changes_no_arithmetic_of_the_process(artifacts: Path) -> None:
    """Libraries that are linked for fast mathematics have the thread that loads them flush denormal numbers to zero."""
    program = (
        "import sys, numpy as np, hidet_dist\n"
        "with hidet_dist.load_partition(sys.argv[1]) as model:\n"
        "    model(np.zeros((16, 64), np.float32))\n"
        "    assert (np.full(64, 1e-40, np.float32) * np.float32(0.5)).all()\n"
    )
    subprocess.run([sys.executable, "-c", program, artifacts], check=True, timeout=600)


def test_infinity_and_nan_go_through_what_follows_a_product(artifacts: Path) -> None:
    x = X.copy()
    x[3] = np.nan
    with hidet_dist.load_partition(artifacts) as model:
        y = model(x)
    assert np.isnan(y[3]).all()
    np.testing.assert_allclose(np.delete(y, 3, 0), np.delete(expected(X), 3, 0), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_precompiled_headers_change_no_kernel(tmp_path: Path) -> None:
    """The same bytes come of headers that are compiled once and of those that every kernel reads as text."""
    x = hidet.symbol([4, 100], "float32", "cpu")
    kernels = []
    for precompiled in (False, True):
        graph = normalize(hidet.trace_from(ops.softmax(x, -1), [x]))
        program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0])
        (node,) = optimize_program(program).nodes
        with hidet.option.context():
            cache = tmp_path / f"{precompiled}"
            hidet.option.cache_dir(str(cache))
            with cpu_target():
                if precompiled:
                    precompile_headers()
                node.task.build("cpu", load=False)
        assert bool(list(cache.rglob("*.gch"))) == precompiled
        (kernel,) = cache.rglob("lib.so")
        kernels.append(kernel.read_bytes())
    assert kernels[0] == kernels[1]
