"""Products that may be cuBLAS's: what is built. That it computes them is tested where it is served."""

import math
from dataclasses import replace

import hidet
import numpy as np
import pytest
import torch

import hidet_dist
from hidet_dist import auto_parallel
from hidet_dist.artifacts.manifest import Manifest
from hidet_dist.compat.cublas_products import product_of
from hidet_dist.compile import optimize_program
from hidet_dist.compile.cuda import build
from hidet_dist.compile.cuda.target import CudaTarget
from hidet_dist.errors import ConfigError
from hidet_dist.machine import builtin
from hidet_dist.machine.gpu import GPUS
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh
from hidet_dist.toolchain.cuda import Toolkit

H100 = CudaTarget(GPUS["H100-SXM5-80GB"], cublas=True)


@pytest.fixture
def toolkit(monkeypatch, tmp_path):
    """An nvcc that is never called."""
    found = Toolkit(tmp_path / "nvcc", "13.0.88", tmp_path)
    monkeypatch.setattr(build, "find_toolkit", lambda: found)
    monkeypatch.setattr(build, "link_folder", lambda toolkit, folder: tmp_path)


def multiply(product, a, b):
    """The expected result of :func:`hidet_dist_cublas_product`, from the operands' layouts."""
    batch, m, n, k = (int(each) for each in (product.batch, product.m, product.n, product.k))
    b_shape = (n, k) if product.transposed else (k, n)

    def matrices(x, shape, apart):
        bytes_of = x.itemsize
        strides = (apart * bytes_of, shape[1] * bytes_of, bytes_of)
        assert batch == 1 or apart * (batch - 1) + shape[0] * shape[1] <= x.size
        return np.lib.stride_tricks.as_strided(x, (batch, *shape), strides)

    right = matrices(b, b_shape, int(product.batch_b))
    return matrices(a, (m, k), int(product.batch_a)) @ (right.swapaxes(1, 2) if product.transposed else right)


def product_in(graph):
    """The product among the kernels of a program for a GPU, which none is built of."""
    plan = search(graph, builtin("dgx-h100", DeviceMesh((1,)))).plan
    program = partition_graph(graph, plan.stages[0], target=H100)
    (found,) = (node.task for node in optimize_program(program, H100).nodes if product_of(node.task) is not None)
    return found


HEADS = [((), ()), ((3,), ()), ((3,), (3,)), ((1,), (3,)), ((2, 3), ()), ((2, 3), (2, 1)), ((2, 3), (2, 3))]


@pytest.mark.parametrize(("dtype", "transposed"), [("float32", False), ("float16", False), ("float16", True)])
@pytest.mark.parametrize("heads", HEADS)
def test_a_product_is_one_call_whatever_is_broadcast(toolkit, heads, dtype, transposed):
    (heads_a, heads_b), (m, n, k) = heads, (8, 64, 40)
    rng = np.random.default_rng(0)
    a = rng.integers(-4, 5, (*heads_a, m, k)).astype(dtype)
    b = rng.integers(-4, 5, (*heads_b, n, k) if transposed else (*heads_b, k, n)).astype(dtype)
    x, y = (hidet.symbol(list(each.shape), dtype, "cpu") for each in (a, b))
    z = hidet.ops.matmul_nt(x, y) if transposed else hidet.ops.matmul(x, y)
    product = product_of(product_in(normalize(hidet.trace_from(z, [x, y]))))
    assert product.dtype == dtype
    if dtype == "float32" and 1 in heads_b:  # a kernel of its own
        b = np.ascontiguousarray(np.broadcast_to(b, (*heads_a, k, n)))
    expected = a @ (b.swapaxes(-1, -2) if transposed else b)
    np.testing.assert_array_equal(multiply(product, a, b).reshape(expected.shape), expected)
    assert int(product.batch) == (math.prod(heads_b) if dtype == "float16" or 1 not in heads_b else math.prod(heads_a))


def candidates(task, **options):
    target = replace(H100, **options)
    with target.building():
        return task.implement("cuda", ".")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_one_cublas_candidate_replaces_hidets_calls(toolkit, dtype):
    x, w = hidet.symbol([16, 64], dtype, "cpu"), hidet.symbol([64, 64], dtype, "cpu")
    task = product_in(normalize(hidet.trace_from(hidet.ops.relu(hidet.ops.matmul(x, w)), [x, w])))
    for space in (0, 1) if dtype == "float16" else (0,):  # of the other there are some hundred candidates
        without, with_one, usual = (candidates(task, space=space, cublas=cublas) for cublas in (False, True, None))
        assert len(with_one) == len(without) + 1
        assert len(usual) == len(with_one if dtype == "float32" else without)
        assert not any("cublas" in str(module) for module in (*without, *with_one[:-1]))
        assert str(with_one[-1]).count("hidet_dist_cublas_product") == 1
        # Behind it, one kernel more; before it, none.
        assert sum(own.kind == "cuda_kernel" for own in with_one[-1].functions.values()) == 1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_products_of_one_launch_have_one_candidate_by_cublas(toolkit, dtype):
    x, *weights = (hidet.symbol(shape, dtype, "cpu") for shape in ([16, 64], [64, 64], [64, 32]))
    graph = normalize(hidet.trace_from([hidet.ops.matmul(x, w) for w in weights], [x, *weights]))
    plan = search(graph, builtin("dgx-h100", DeviceMesh((1,)))).plan
    nodes = optimize_program(partition_graph(graph, plan.stages[0], target=H100), H100).nodes
    (node,) = (node for node in nodes if node.name.startswith("Joint"))
    assert H100.calls_cublas(node)
    assert not replace(H100, cublas=False).calls_cublas(node)
    assert replace(H100, cublas=None).calls_cublas(node) == (dtype == "float32")
    *without, last = candidates(node.task)
    assert not any("cublas" in str(module) for module in without)
    assert str(last).count("hidet_dist_cublas_product") == 2


@pytest.mark.slow
def test_it_is_the_last_candidate_that_is_built(nvcc, tmp_path):
    x = hidet.symbol([8, 64], "float32", "cpu")
    graph = hidet.trace_from(hidet.ops.relu(hidet.ops.matmul(x, hidet.ones([64, 32], "float32", "cpu"))), [x])
    out = tmp_path / "out"
    auto_parallel(graph, {"mesh_shape": [1]}, {"target": "cuda", "arch": "sm_90"}, out)
    (stage,) = Manifest.load(out).program().stages
    assert (stage.candidates, stage.cublas) == ((2,), (True,))
    assert b"hidet_dist_cublas_product" in (out / stage.kernel_file(0)).read_bytes()


class Angles(torch.nn.Module):
    """The angles of rotary positions: a product between two kernels, the second of which divides by a size."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(1, 0.01, 32)[None, :, None])

    def forward(self, positions):
        return (self.frequencies @ positions[None, None].float()).transpose(1, 2)


@pytest.mark.slow
def test_kernels_around_a_product_that_divide_by_a_size_are_built(nvcc, tmp_path):
    positions = torch.arange(3)
    graph = hidet_dist.from_torch(Angles().eval(), (positions,), ({0: torch.export.Dim("tokens", min=1)},))
    target = {"target": "cuda", "arch": "sm_90", "symbols": {"tokens": 3}, "cuda": {"cublas": True}}
    out = tmp_path / "out"
    auto_parallel(graph, {"mesh_shape": [1]}, target, out)
    (stage,) = Manifest.load(out).program().stages
    assert True in stage.cublas


def test_it_is_for_gpus():
    x = hidet.symbol([2, 4], "float32", "cpu")
    graph = hidet.trace_from(x + 1.0, [x])
    with pytest.raises(ConfigError, match=r"has options of the target 'cuda'; the target is 'cpu'"):
        auto_parallel(graph, {"mesh_shape": [1]}, {"cuda": {"cublas": True}}, "out")
    with pytest.raises(ConfigError, match=r"'cublas'. must be True or False"):
        auto_parallel(graph, {"mesh_shape": [1]}, {"cuda": {"cublas": "yes"}, "target": "cuda"}, "out")
