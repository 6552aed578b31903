"""Convolutions of the CPU target against PyTorch's, with what stands before and behind them."""

import hidet
import pytest
import torch
from hidet import ops
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hidet_dist.compat.rewrites import sound_rewrites
from hidet_dist.compile import optimize_program
from hidet_dist.compile.cpu import cpu_kernels
from hidet_dist.compile.cpu.build import cpu_target
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.runtime.openblas import load_openblas
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh

HIDET = {1: ops.conv1d, 2: ops.conv2d, 3: ops.conv3d}
TORCH = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


def optimized(outputs, inputs):
    graph = normalize(hidet.trace_from(outputs, inputs))
    program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0])
    return optimize_program(program)


def symbols(*tensors):
    return [hidet.symbol(list(x.shape), str(x.dtype).removeprefix("torch."), "cpu") for x in tensors]


def run(graph, *tensors):
    with cpu_target():
        return [y.torch() for y in graph.forward([hidet.from_torch(x) for x in tensors])]


def names(graph):
    return [node.name for node in graph.nodes]


def check(x, w, stride, pads, dilation, groups):
    spatial = len(stride)
    a, b = symbols(x, w)
    padded = ops.pad(a, [0, 0, *pads, 0, 0, *pads]) if any(pads) else a
    y = HIDET[spatial](padded, b, stride=list(stride), dilations=list(dilation), groups=groups)
    graph = optimized(y, [a, b])
    assert names(graph) == ["BlasConvolution"]
    expected = TORCH[spatial](
        x.double(), w.double(), stride=stride, padding=pads, dilation=dilation, groups=groups
    ).float()
    (result,) = run(graph, x, w)
    assert result.shape == expected.shape
    # A sum of k products of numbers of about 1, in whatever order.
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[x.dtype]
    bound = tolerance * max(1.0, float(expected.abs().max()))
    assert float((result.float() - expected).abs().max()) <= bound


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


CASES = {
    "1x1": ((2, 8, 12, 13), (16, 8, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    "1x1 of small images": ((3, 8, 5, 5), (16, 8, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    "1x1 in groups": ((2, 32, 12, 12), (16, 16, 1, 1), (1, 1), (0, 0), (1, 1), 2),
    "1x1 with a stride": ((2, 8, 9, 9), (8, 8, 1, 1), (2, 2), (0, 0), (1, 1), 1),
    "3x3": ((2, 8, 9, 11), (16, 8, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "stem": ((1, 3, 37, 37), (16, 3, 7, 7), (2, 2), (3, 3), (1, 1), 1),
    "many channels": ((1, 140, 6, 6), (600, 140, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "many columns": ((2, 4, 30, 31), (8, 4, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "more padding than input": ((1, 2, 2, 2), (4, 2, 5, 5), (1, 1), (4, 4), (1, 1), 1),
    "depthwise": ((2, 8, 9, 11), (8, 1, 3, 3), (1, 1), (1, 1), (1, 1), 8),
    "depthwise, dilated": ((2, 8, 9, 11), (16, 1, 3, 3), (2, 2), (2, 2), (2, 2), 8),
    "line": ((2, 6, 40), (8, 6, 5), (3,), (2,), (2,), 1),
    "space": ((2, 6, 5, 6, 7), (4, 3, 3, 3, 2), (1, 2, 1), (1, 1, 0), (1, 1, 2), 2),
}


# Those that go the ways of others.
DEEPER = ("1x1 of small images", "1x1 with a stride", "many columns", "depthwise")


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in DEEPER)) for case in CASES])
def test_convolutions_are_right(case):
    x, w, *how = CASES[case]
    check(random(*x), random(*w), *how)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("1x1", torch.float16),
        ("3x3", torch.bfloat16),
        ("depthwise", torch.float16),
        *(
            pytest.param(case, dtype, marks=pytest.mark.slow)
            for case, dtype in (("1x1", torch.bfloat16), ("3x3", torch.float16), ("depthwise", torch.bfloat16))
        ),
    ],
)
def test_half_types_are_summed_up_in_float32(case, dtype):
    x, w, *how = CASES[case]
    check(random(*x, dtype=dtype), random(*w, dtype=dtype), *how)


@st.composite
def convolutions(draw):
    spatial = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 2, 3]))
    inner, outer = groups * draw(st.integers(1, 4)), groups * draw(st.integers(1, 9))
    kernel = [draw(st.integers(1, 4)) for _ in range(spatial)]
    dilation = [draw(st.integers(1, 2)) for _ in range(spatial)]
    pads = [draw(st.integers(0, 3)) for _ in range(spatial)]
    stride = [draw(st.integers(1, 3)) for _ in range(spatial)]
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, pads, strict=True)]
    size = [draw(st.integers(low, low + 9)) for low in least]
    x = [draw(st.integers(1, 3)), inner, *size]
    return random(*x), random(outer, inner // groups, *kernel), stride, pads, dilation, groups


@given(convolutions())
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_convolution_is_right(convolution):
    check(*convolution)


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_normalization_residual_and_activation_are_part_of_the_convolution(batch):
    x, w, residual = random(batch, 8, 6, 7), random(16, 8, 3, 3), random(batch, 16, 6, 7)
    mean, scale, shift = random(16), random(16), random(16)
    variance = scale.abs() + 0.5
    tensors = [x, w, residual, mean, variance, scale, shift]
    inputs = symbols(*tensors)
    y = ops.conv2d(ops.pad(inputs[0], [1, 1, 1, 1]), inputs[1])
    y = ops.batch_norm_infer(y, inputs[3], inputs[4])
    y = y * inputs[5].unsqueeze([0, 2, 3]) + inputs[6].unsqueeze([0, 2, 3])
    graph = optimized(ops.relu(y + inputs[2]), inputs)
    assert names(graph) == ["BlasConvolution"]
    expected = torch.nn.functional.batch_norm(torch.conv2d(x, w, padding=1), mean, variance, scale, shift, eps=1e-5)
    (result,) = run(graph, *tensors)
    torch.testing.assert_close(result, torch.relu(expected + residual), rtol=1e-5, atol=1e-5)


def test_results_that_others_read_are_written():
    x, w = random(1, 4, 6, 6), random(8, 4, 3, 3)
    a, b = symbols(x, w)
    y = ops.conv2d(a, b)
    graph = optimized([ops.relu(y), ops.tanh(y)], [a, b])
    assert names(graph)[0] == "BlasConvolution"
    assert len(names(graph)) == 3
    for result, fn in zip(run(graph, x, w), (torch.relu, torch.tanh), strict=True):
        torch.testing.assert_close(result, fn(torch.conv2d(x, w)), rtol=1e-5, atol=1e-5)


def test_operands_broadcast_along_a_row_of_pixels_are_not_fused():
    x, w, across = random(1, 4, 6, 6), random(8, 4, 3, 3), random(4)
    a, b, c = symbols(x, w, across)
    graph = optimized(ops.conv2d(a, b) + c, [a, b, c])
    assert len(names(graph)) == 2
    (result,) = run(graph, x, w, across)
    torch.testing.assert_close(result, torch.conv2d(x, w) + across, rtol=1e-5, atol=1e-5)


def test_two_convolutions_that_are_added():
    x, w, v = random(1, 4, 6, 6), random(8, 4, 3, 3), random(8, 4, 3, 3)
    a, b, c = symbols(x, w, v)
    graph = optimized(ops.relu(ops.conv2d(a, b) + ops.conv2d(a, c)), [a, b, c])
    assert names(graph) == ["BlasConvolution", "BlasConvolution"]
    (result,) = run(graph, x, w, v)
    torch.testing.assert_close(result, torch.relu(torch.conv2d(x, w) + torch.conv2d(x, v)), rtol=1e-5, atol=1e-5)


def test_padding_with_other_values_is_a_separate_pass():
    x, w = random(1, 4, 6, 6), random(8, 4, 3, 3)
    a, b = symbols(x, w)
    graph = optimized(ops.conv2d(ops.pad(a, [1, 1, 1, 1], value=2.0), b), [a, b])
    assert len(names(graph)) == 2
    (result,) = run(graph, x, w)
    expected = torch.conv2d(torch.nn.functional.pad(x, (1, 1, 1, 1), value=2.0), w)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_hidets_own_optimize_is_untouched():
    a, b = symbols(random(1, 4, 6, 6), random(8, 4, 3, 3))
    graph = hidet.graph.optimize(hidet.trace_from(ops.conv2d(a, b), [a, b]))
    assert "BlasConvolution" not in names(graph)


def test_sizes_may_be_symbolic():
    a, b = hidet.symbol(["batch", 4, "height", 9], "float32", "cpu"), hidet.symbol([8, 4, 3, 3], "float32", "cpu")
    c, residual = hidet.symbol([8], "float32", "cpu"), hidet.symbol(["batch", 8, "height", 9], "float32", "cpu")
    y = ops.conv2d(ops.pad(a, [1, 1, 1, 1]), b) + c.unsqueeze([0, 2, 3])
    with sound_rewrites(), cpu_kernels():
        graph = hidet.graph.optimize(hidet.trace_from(ops.relu(y) + residual, [a, b, c, residual]))
    load_openblas()
    assert names(graph) == ["BlasConvolution"]
    w, bias = random(8, 4, 3, 3), random(8)
    for batch, height in ((1, 5), (3, 1), (2, 17)):
        x, other = random(batch, 4, height, 9), random(batch, 8, height, 9)
        (result,) = run(graph, x, w, bias, other)
        expected = torch.relu(torch.conv2d(x, w, bias, padding=1)) + other
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
