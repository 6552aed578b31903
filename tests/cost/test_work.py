"""The work of operators on a machine whose kernels were measured, and what a plan costs there."""

from __future__ import annotations

from dataclasses import replace

import hidet
import pytest
from hidet import ops
from hidet.graph import Tensor

from hidet_dist.calibration.kernels import KERNEL_PROBES, KernelProbe, work_in
from hidet_dist.cost.model import PredictedCost
from hidet_dist.cost.work import local_work, work_of
from hidet_dist.machine import LIBRARY, Cluster, Device, Link
from hidet_dist.machine.kernels import ATTENTION, KERNEL_CLASSES, KernelCost, Work
from hidet_dist.normalize import normalize
from hidet_dist.rules.rule import Choice, RuleTable
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh, TensorShardSpec
from hidet_dist.weights import weight

MESH = DeviceMesh((2,))
LINK = Link(1e-6, 1e9)


def symbol(*shape: int) -> Tensor:
    return hidet.symbol(list(shape), "float32", "cpu")


def choice(y: Tensor, spec: str) -> Choice:
    return next(own for own in RuleTable(MESH)(y.op)[1] if str(own.spec) == spec)


def test_a_product_with_a_weight_reads_that_from_memory() -> None:
    y = ops.matmul(symbol(4, 8, 16), weight("w", [16, 32], "float32"))
    columns = choice(y, "(R, R, R), (R, S0) -> (R, R, S0)")
    moved = 4 * (4 * 8 * 16 + 16 * 16 + 4 * 8 * 16)
    assert work_of(y.op, columns, MESH) == Work("matmul", 2 * 4 * 8 * 16 * 16, moved, 4 * 16 * 16, calls=1)


def test_a_stack_of_products_is_a_call_for_each() -> None:
    y = ops.matmul(symbol(4, 6, 8, 16), symbol(4, 6, 16, 32))
    split = choice(y, "(R, S0, R, R), (R, S0, R, R) -> (R, S0, R, R)")
    assert work_of(y.op, split, MESH).calls == 4 * 3


def test_a_convolution_on_a_cpu_counts_the_operations_of_its_kernel() -> None:
    """Winograd's filtering takes 16 multiplications for 2 x 2 pixels, where weights are known and strides are 1."""
    x, w = symbol(2, 32, 10, 9), weight("w", [48, 32, 3, 3], "float32")
    products, transforms = 2 * 16 * 16 * 48, 32 * 16 + 24 * 48  # of half of the channels
    for stride, filters, fewer in ((1, w, True), (2, w, False), (1, symbol(48, 32, 3, 3), False)):
        y = ops.conv2d(x, filters, padding=1, stride=stride)
        split = choice(y, "(R, S0, R, R), (R, S0, R, R) -> (R, R, R, R) | all_reduce(sum, axes=0)")
        plain, kernel = work_of(y.op, split, MESH), work_of(y.op, split, MESH, fusion=LIBRARY)
        tiles = 2 * 5 * 5
        assert plain.operations == split.operations
        assert kernel.operations == (tiles * (products + transforms) if fewer else split.operations)


def test_tensors_passed_to_a_neighbour_move_no_bytes() -> None:
    y = ops.gelu(symbol(8, 16))
    split = choice(y, "(S0, R) -> (S0, R)")
    own, absorbed = work_of(y.op, split, MESH), work_of(y.op, split, MESH, 2 * 4 * 64)
    assert (own.kernel, own.functions, own.moved_bytes, own.calls) == ("elementwise", 64, 2 * 4 * 64, 1)
    assert (absorbed.functions, absorbed.moved_bytes, absorbed.calls) == (64, 0, 0)
    assert own.operations == 5 * 64


def test_an_operator_of_a_program_has_the_work_that_the_search_counted_for_its_choice() -> None:
    x = symbol(4, 8, 16)
    for y in (
        ops.matmul(x, weight("w", [16, 32], "float32")),
        ops.matmul(symbol(4, 6, 8, 16), symbol(4, 6, 16, 32)),
        ops.gelu(x),
        ops.layer_norm(x),
    ):
        whole = next(own for own in RuleTable(MESH)(y.op)[1] if own.spec.is_replicated)
        assert local_work(y.op, {}) == work_of(y.op, whole, MESH)


def test_a_program_is_costed_as_the_search_costs_its_operators() -> None:
    """With measured kernels and without them."""
    kernels = {kernel: KernelCost(1e-12, 1e-11, 1e-7) for kernel in KERNEL_CLASSES}
    y = ops.matmul(symbol(8, 16), weight("w", [16, 32], "float32"))
    whole = next(own for own in RuleTable(MESH)(y.op)[1] if own.spec.is_replicated)
    for measured in ({}, kernels):
        device = Device("d", {"default": 1e12}, 1e11, 2**30, 1e-6, kernels=measured)
        model = PredictedCost(Cluster(MESH, (LINK,), device))
        assert model.local(y.op, {}) == model.operator(y.op, whole)


def test_a_table_is_read_by_the_rows_that_are_looked_up() -> None:
    ids = hidet.symbol([6], "int32", "cpu")
    y = ops.take(weight("table", [100, 8], "float32"), ids)
    whole = choice(y, "(R, R), (R) -> (R, R)")
    assert work_of(y.op, whole, MESH) == Work("lookup", whole.operations, 4 * (6 * 8 + 6 + 6 * 8))


@pytest.mark.parametrize("probe", KERNEL_PROBES, ids=lambda probe: probe.title)
def test_a_probe_is_work_of_the_class_that_it_is_for(probe: KernelProbe) -> None:
    work = work_in(probe)
    absorbed = [one for one in work if not one.calls]
    expected = "elementwise" if probe.kernel == "function" else probe.kernel
    if probe.kernel == ATTENTION:  # its operators are one kernel, which calls no other
        assert all(one.kernel == ATTENTION for one in absorbed if one.operations)
        assert {one.kernel for one in absorbed if one.moved_bytes or one.functions} == {ATTENTION}
        return
    assert {one.kernel for one in work if one.calls} == {expected}
    assert {one.kernel for one in absorbed} <= {"elementwise", "copy"}
    assert bool(sum(one.functions for one in work)) == (probe.kernel == "function")


def test_every_class_has_probes() -> None:
    assert {probe.kernel for probe in KERNEL_PROBES} == set(KERNEL_CLASSES)


def test_a_plan_costs_what_its_kernels_were_measured_to() -> None:
    """Rows are split; a float64 product, which was not measured, keeps to the roofline."""
    product, copy = KernelCost(1e-9, 1e-12, 1e-5), KernelCost(0.0, 1e-9)
    device = Device("toy", {"default": 1e9}, 1e8, 10**9, 1e-6, cache_bytes=10**9)
    cluster = Cluster(MESH, (LINK,), replace(device, kernels={"matmul": product, "copy": copy}))
    x = symbol(64, 32)
    graph = normalize(hidet.trace_from(ops.matmul(x, weight("w", [32, 16], "float32")), [x]))
    rows = TensorShardSpec(((0,), ()))
    plan = search(graph, cluster, input_specs=[rows], output_specs=[rows]).plan
    work = Work("matmul", 2 * 32 * 32 * 16, 4 * (32 * 32 + 32 * 16 + 32 * 16), 4 * 32 * 16)
    expected = 1e-6 + work.operations * 1e-9 + 4 * (32 * 32 + 32 * 16) * 1e-12 + 4 * 32 * 16 * 1e-8 + 1e-5
    assert plan.seconds == pytest.approx(expected)
    double = hidet.symbol([64, 32], "float64", "cpu")
    wide = normalize(hidet.trace_from(ops.matmul(double, weight("w", [32, 16], "float64")), [double]))
    plan = search(wide, cluster, input_specs=[rows], output_specs=[rows]).plan
    moved = 8 * (32 * 32 + 32 * 16 + 32 * 16)
    assert plan.seconds == pytest.approx(1e-6 + max(2 * 32 * 32 * 16 / 1e9, moved / 1e8))
