"""The costs of operators that share a kernel."""

from dataclasses import replace

import hidet
import pytest
from hidet import ops

from hidet_dist.cost.fusion import Fused, Member, fused_operators
from hidet_dist.cost.model import PredictedCost
from hidet_dist.machine import FUSIONS, GPU, HIDET, LIBRARY, Cluster, Device, Link, builtin
from hidet_dist.machine.kernels import KERNEL_CLASSES, KernelCost
from hidet_dist.normalize import normalize
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh, TensorShardSpec
from hidet_dist.view import GraphView

ONE = DeviceMesh((1,))
LAUNCH = 1000.0
# Arithmetic takes next to no time, a byte a second.
SLOW_MEMORY = Cluster(ONE, (Link(0.0, 1.0),), Device("gpu", {"default": 1e15}, 1.0, 2**40, LAUNCH))
ROWS, LENGTH = 8, 32
TENSOR_BYTES = 4 * ROWS * LENGTH


def symbol(*shape):
    return hidet.symbol(list(shape), "float32", "cpu")


def seconds(y, inputs, cluster=SLOW_MEMORY, **options):
    return search(normalize(hidet.trace_from(y, inputs)), cluster, **options).plan.seconds


def rms(x):
    return x * ops.rsqrt(ops.mean(x * x, -1, keep_dim=True) + 1e-5)


@pytest.mark.parametrize("make", [lambda x: ops.softmax(x, 1), ops.layer_norm, rms], ids=["softmax", "norm", "rms"])
def test_a_kernel_of_several_operators_is_launched_once_and_reads_and_writes_its_tensor_once(make):
    x = symbol(ROWS, LENGTH)
    assert seconds(make(x), [x]) == pytest.approx(LAUNCH + 2 * TENSOR_BYTES)


def test_scores_of_attention_never_reach_memory():
    q, k, v = (symbol(2, 64, 16) for _ in range(3))
    bias = symbol(2, 64, 64)
    y = ops.softmax(ops.matmul(q, ops.transpose(k, [0, 2, 1])) * 0.25 + bias, 2) @ v
    moved = 4 * (4 * 2 * 64 * 16 + 2 * 64 * 64)  # q, k, v, the result and the bias
    assert seconds(y, [q, k, v, bias]) == pytest.approx(LAUNCH + moved)


@pytest.mark.parametrize(("queries", "is_one"), [(64, True), (8, False)])
def test_attention_on_a_cpu_is_one_kernel_of_its_own_class(queries, is_one):
    """Where it is, an operation takes a second, a byte a thousand, and nothing but the operators of it takes time."""
    kernels = {"attention": KernelCost(1.0, 1e3)} if is_one else {}
    device = Device("cpu", {"default": 1e30}, 1e30, 2**40, 0.0, cache_bytes=2**40, kernels=kernels, fusion=LIBRARY)
    q, (k, v) = symbol(2, queries, 16), (symbol(2, 64, 16) for _ in range(2))
    y = ops.softmax(ops.matmul(q, ops.transpose(k, [0, 2, 1])) * 0.25, 2) @ v
    scores = 2 * queries * 64
    found = seconds(y, [q, k, v], Cluster(ONE, (Link(0.0, 1.0),), device))
    view = GraphView(normalize(hidet.trace_from(y, [q, k, v])))
    assert any(isinstance(entry, Member) for entry in fused_operators(view, LIBRARY).values()) == is_one
    if is_one:
        moved = 4 * 2 * (2 * queries * 16 + 2 * 64 * 16)
        assert found == pytest.approx(2 * scores * 2 * 16 + 6 * scores + moved * 1e3)
    else:
        assert found < 1e-9


def test_what_is_around_a_norm_is_part_of_its_kernel():
    x, other = symbol(ROWS, LENGTH), symbol(ROWS, LENGTH)
    y = ops.relu(ops.softmax(x + other, 1))
    assert seconds(y, [x, other]) == pytest.approx(LAUNCH + 3 * TENSOR_BYTES)


def test_exponentials_with_another_reader_are_written_to_memory():
    x = symbol(ROWS, LENGTH)
    e = ops.exp(x - ops.max(x, 1, keep_dim=True))
    view = GraphView(normalize(hidet.trace_from([e / ops.sum(e, 1, keep_dim=True), e], [x])))
    assert all(isinstance(entry, Fused) for entry in fused_operators(view).values())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_products_in_half_precision_have_no_prologue_on_a_gpu(dtype):
    a, b = (hidet.symbol([64, 64], dtype, "cpu") for _ in range(2))
    view = GraphView(normalize(hidet.trace_from(ops.matmul(ops.relu(a), b), [a, b])))
    assert len(fused_operators(view, GPU)) == (dtype == "float32")


def test_a_device_with_measured_kernels_computes_a_softmax_by_several():
    x = symbol(ROWS, LENGTH)
    view = GraphView(normalize(hidet.trace_from(ops.softmax(x, 1), [x])))
    assert {type(entry) for entry in fused_operators(view, GPU).values()} == {Member}
    assert {type(entry) for entry in fused_operators(view, HIDET).values()} == {Fused}


def test_sharded_rows_cost_what_the_operators_cost_apart():
    """Two devices that have halves of all rows compute four kernels, and exchange the maxima and the sums."""
    mesh = DeviceMesh((2,))
    cluster = Cluster(mesh, (Link(0.0, 1e15),), SLOW_MEMORY.device)
    cluster = replace(cluster, device=replace(cluster.device, places_shards=True))
    x = symbol(ROWS, LENGTH)
    halves = {
        "op:0": "(R, S0) -> (R, R)",
        "op:1": "(R, S0), (R, R) -> (R, S0)",
        "op:2": "(R, S0) -> (R, S0)",
        "op:3": "(R, S0) -> (R, R)",
        "op:4": "(R, S0), (R, R) -> (R, S0)",
    }
    halved = [TensorShardSpec.parse("(R, S0)")]
    half, statistics = TENSOR_BYTES // 2, 4 * ROWS
    reads = 4 * half + 2 * statistics  # the maximum, the exponentials, the sum and the quotient
    writes = 2 * half + 2 * statistics
    found = seconds(ops.softmax(x, 1), [x], cluster, pins=halves, input_specs=halved, output_specs=halved)
    assert found == pytest.approx(4 * LAUNCH + reads + writes)


@pytest.mark.parametrize("measured", [False, True])
def test_a_device_fuses_as_it_declares_whether_its_kernels_were_measured_or_not(measured):
    x = symbol(64, 64)
    view = GraphView(normalize(hidet.trace_from(ops.softmax(ops.matmul(x, x), 1), [x])))
    kernels = builtin("cpu", ONE).device.kernels if measured else {}
    entries = {}
    for fusion in FUSIONS:
        device = replace(SLOW_MEMORY.device, fusion=fusion, kernels=kernels)
        entries[fusion] = PredictedCost(replace(SLOW_MEMORY, device=device)).fused(view)
    assert entries == {fusion: fused_operators(view, fusion) for fusion in FUSIONS}
    assert any(isinstance(entry, Member) for entry in entries[GPU].values())
    assert not any(isinstance(entry, Member) for entry in entries[LIBRARY].values())


def test_a_calibrated_gpu_computes_a_softmax_by_one_kernel():
    """As measured, each byte takes a second, so the seconds count the passes."""
    kernels = dict.fromkeys(KERNEL_CLASSES, KernelCost(0.0, 1.0))
    device = replace(SLOW_MEMORY.device, kernels=kernels, cache_bytes=2**30)
    x = symbol(ROWS, LENGTH)
    found = seconds(ops.softmax(x, 1), [x], replace(SLOW_MEMORY, device=device))
    assert found == pytest.approx(LAUNCH + 2 * TENSOR_BYTES)


def test_gpus_and_cpus_cost_what_their_kernels_cost():
    x = symbol(256, 1024)
    y = ops.softmax(x, 1)
    gpu, cpu = (builtin(name, ONE).device for name in ("dgx-h100", "cpu"))
    passes = 2 * 4 * 256 * 1024 / gpu.memory_bandwidth_bytes_per_second
    assert gpu.launch_seconds + passes <= seconds(y, [x], builtin("dgx-h100", ONE)) < 2 * gpu.launch_seconds + passes
    assert seconds(y, [x], builtin("cpu", ONE)) > 4 * cpu.launch_seconds
