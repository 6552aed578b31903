"""Each test fails when hidet no longer needs what is bent of its way to CUDA kernels."""

import importlib
from dataclasses import replace
from pathlib import Path

import hidet
import hidet.cuda
import pytest
from hidet.graph.ops.fusion.apply_prologue_epilogue import TileDerivation
from hidet.ir.stmt import LaunchKernelStmt
from hidet.ir.tools import collect
from hidet.lang import attrs
from hidet.lang.cuda import blockIdx, threadIdx

from hidet_dist.compat.cuda_build import RUNTIME, described_gpu
from hidet_dist.compat.half_products import half_products
from hidet_dist.compat.joint_launches import joint_launches, launched_in_turn
from hidet_dist.compat.symbolic_tiles import symbolic_tiles
from hidet_dist.machine.gpu import GPUS
from hidet_dist.toolchain.cuda import Toolkit

H100 = GPUS["H100-SXM5-80GB"]
compiler = importlib.import_module("hidet.backend.build")
build_task = importlib.import_module("hidet.drivers.build_task")


@pytest.fixture
def described(tmp_path):
    """A described GPU, with an nvcc that is never called."""
    toolkit = Toolkit(tmp_path / "nvcc", "13.0.88", tmp_path)

    def describe(gpu=H100, space=0):
        return described_gpu(gpu, toolkit, tmp_path / "link", tmp_path / "cache", space)

    return describe


@pytest.fixture
def commands(monkeypatch):
    """The commands that hidet's compiler would run."""
    seen = []
    monkeypatch.setattr(compiler.NVCC, "run_compile_command", lambda self, command, *_: seen.append(command))
    return seen


def compile_nothing(tmp_path):
    (tmp_path / "a.cu").touch()
    compiler.compile_source(str(tmp_path / "a.cu"), str(tmp_path / "lib.so"), "cuda")


def test_hidet_still_compiles_only_where_there_is_a_driver(described, commands, tmp_path, monkeypatch):
    monkeypatch.setattr(hidet.cuda, "available", lambda: False)
    with pytest.raises(RuntimeError, match="CUDA is not available"):
        compile_nothing(tmp_path)
    with described():
        compile_nothing(tmp_path)
    assert len(commands) == 1


def test_hidet_still_links_every_kernel_against_the_driver(described, commands, tmp_path):
    with described():
        compile_nothing(tmp_path)
    (command,) = commands
    words = command.split()
    assert "-lcuda" in words, "hidet does not ask for libcuda any more: drop --as-needed"
    assert words[:3] == [str(tmp_path / "nvcc"), "-Xlinker", "--as-needed"]
    assert f"-L{tmp_path / 'link'}" in words
    assert "arch=compute_90a,code=sm_90a" in words


def test_hidets_headers_still_include_streams(described, commands, tmp_path, monkeypatch):
    task = (hidet.symbol([2, 3], "float32", "cpu") + 1.0).op.task
    (tmp_path / "task").mkdir()
    with described():
        build_task.build_task_module(task, task.implement("cuda", str(tmp_path)), str(tmp_path / "task"), "cuda")
    included = [line for line in (tmp_path / "task/source.cu").read_text().splitlines() if line.startswith("#include")]
    assert included[0] == f"#include <{RUNTIME}>"
    assert not any("/runtime/" in line for line in included[1:] if "complex" not in line), "hidet has other headers"
    headers = Path(hidet.__file__).parent / "include/hidet/runtime"
    assert "<iostream>" in (headers / "common.h").read_text(), "hidet's headers are quick to compile: use them"


def test_hidets_cache_still_takes_one_architecture_for_another(monkeypatch):
    task = (hidet.symbol([2, 3], "float32", "cpu") + 1.0).op.task
    folders = []
    monkeypatch.setattr(build_task, "compile_task_from_scratch", lambda *arguments: folders.append(arguments[3]))
    for arch in ("sm_80", "sm_90"):
        with hidet.option.context():
            hidet.option.cuda.arch(arch)
            hidet.option.cache_operator(False)
            build_task.build_task(task, "cuda", load=False)
    assert folders[0] == folders[1], "the key of the cache has the architecture: one cache will do"


def test_hidet_still_counts_the_multiprocessors_of_a_present_gpu(described):
    from hidet.graph.ops.matmul.resolve import parallel_k_heuristic_nparts

    parts = []
    for multiprocessors in (1, H100.multiprocessors):
        with described(replace(H100, multiprocessors=multiprocessors)):
            parts.append(parallel_k_heuristic_nparts(1, 64, 64, 4096))
    assert parts == [4, 8]


def test_hidet_still_runs_operators_without_inputs_while_it_optimizes(described):
    x = hidet.symbol([2], "float32", "cpu")
    graph = hidet.trace_from(x + 1.0, [x])
    modes = []
    option = hidet.option.execution_mode
    try:
        hidet.option.execution_mode = lambda kind="compilation": (modes.append(kind), option(kind))
        hidet.graph.optimize(graph)
    finally:
        hidet.option.execution_mode = option
    assert "interpreter" in modes, "graphs are optimized without running anything: drop the mode"
    with described():
        hidet.option.execution_mode("interpreter")
        assert hidet.full([2], 1.0, device="cuda:0").storage is None


def test_all_is_as_before_afterwards(described):
    startup = importlib.import_module("hidet.drivers.utils").lazy_initialize_cuda
    before = [hidet.cuda.available, hidet.cuda.properties, compiler.NVCC, hidet.option.execution_mode]
    options = [hidet.option.get_option(name) for name in ("cuda.arch", "search_space", "cache_dir", "execution_mode")]
    initialized = vars(startup).copy()
    with pytest.raises(RuntimeError, match="on purpose"), described(space=2):
        assert hidet.option.cuda.get_arch_pair() == (9, 0)
        assert hidet.cuda.properties().multiProcessorCount == 132
        assert hidet.option.get_option("search_space") == 2
        raise RuntimeError("on purpose")
    assert before == [hidet.cuda.available, hidet.cuda.properties, compiler.NVCC, hidet.option.execution_mode]
    names = ("cuda.arch", "search_space", "cache_dir", "execution_mode")
    assert options == [hidet.option.get_option(name) for name in names]
    assert vars(startup) == initialized


def half_product(k, n):
    a, b = (hidet.symbol(shape, "float16", "cuda:0") for shape in ([16, k], [k, n]))
    return hidet.trace_from(hidet.ops.matmul(a, b), [a, b])


@pytest.mark.parametrize(("k", "n"), [(32, 64), (64, 16)])
def test_hidet_still_chooses_an_unsupported_kernel_for_small_products(described, k, n):
    """In half precision: it has no candidates, and building it fails."""
    with described():
        (node,) = hidet.graph.optimize(half_product(k, n)).nodes
        assert node.task.implement("cuda", "") == []
        with half_products():
            names = [node.name for node in hidet.graph.optimize(half_product(k, n)).nodes]
    assert [name for name in names if "BatchMatmul" in name]
    assert not [name for name in names if "F16" in name]


def test_larger_products_keep_hidets_kernel(described):
    with described(), half_products():
        (node,) = hidet.graph.optimize(half_product(64, 32)).nodes
    assert "MatmulF16Cute" in node.name


def scaled(threads, factor, blocks=4):
    """A kernel that scales a vector, each block some elements."""
    with hidet.script_module() as module:

        @hidet.script
        def scale(x: hidet.float32[blocks * threads], y: hidet.float32[blocks * threads]):
            attrs.func_kind = "cuda_kernel"
            attrs.cuda.grid_dim = blocks
            attrs.cuda.block_dim = threads
            y[blockIdx.x * threads + threadIdx.x] = x[blockIdx.x * threads + threadIdx.x] * factor

    return module.ir_module()


def launches_of(modules, calls):
    """The launches of a module of several kernels: name, blocks and arguments."""
    module = hidet.transforms.lower(launched_in_turn(modules, calls))
    return [
        (launch.func_var.name, int(launch.grid_dim[0]), len(launch.args))
        for launch in collect(module.functions["launch"], LaunchKernelStmt)
    ]


def test_hidet_still_launches_each_kernel_by_itself(described):
    modules, calls = [scaled(64, 2.0), scaled(64, 3.0, 5)], [(0, [0, 1]), (1, [0, 2]), (0, [0, 3])]
    with described():
        assert [blocks for _, blocks, _ in launches_of(modules, calls)] == [4, 5, 4]
        with joint_launches():
            ((name, blocks, arguments),) = launches_of(modules, calls)
    assert name.endswith("_together")
    assert (blocks, arguments) == (13, 5)  # what both launches of one kernel read is one


def test_kernels_of_unequal_blocks_keep_their_launches(described):
    with described(), joint_launches():
        found = launches_of([scaled(64, 2.0), scaled(32, 2.0)], [(0, [0, 1]), (1, [0, 2])])
    assert [blocks for _, blocks, _ in found] == [4, 4]


def test_hidet_still_takes_a_permutation_of_symbolic_dims_for_a_reshape():
    """So a product on tensor cores, with such a permutation behind it, would write its result unpermuted."""
    x = hidet.symbol(["rows", 2, 32], "float16", "cpu")
    op = hidet.ops.permute_dims(x, [1, 0, 2]).op
    (inverse,) = op.task.inverse_map.values()
    assert str(inverse.tile_mapping) == "1:1", "hidet knows such permutations: drop compat/symbolic_tiles.py"
    tiles = TileDerivation(op, (128, 128))
    with symbolic_tiles(), pytest.raises(ValueError, match="permutes symbolic dims"):
        tiles._forward([op])
