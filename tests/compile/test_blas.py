"""Matrix products by OpenBLAS, against their definitions; and what is read in place instead of being copied."""

import hidet
import numpy as np
import pytest
import torch
from hidet import ops
from hidet.graph import FlowGraph

from hidet_dist.compat.rewrites import sound_rewrites
from hidet_dist.compile import optimize_program
from hidet_dist.compile.cpu import cpu_kernels
from hidet_dist.compile.cpu.build import cpu_target
from hidet_dist.compile.cpu.target import CpuTarget
from hidet_dist.compile.cpu.views import view_of
from hidet_dist.errors import CompileError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.rewriting import copy_operator, rewrite
from hidet_dist.runtime.openblas import load_openblas
from hidet_dist.search import search
from hidet_dist.simulate import simulate
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.spec import DeviceMesh

RNG = np.random.default_rng(0)


def symbol(*shape):
    return hidet.symbol(list(shape), "float32", "cpu")


def optimized(outputs, inputs):
    """The names of the optimized graph's operators, and its largest difference from the graph as it was."""
    graph = normalize(hidet.trace_from(outputs, inputs))
    program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0])
    data = [RNG.standard_normal([int(size) for size in x.shape]).astype(np.float32) for x in inputs]
    compiled = optimize_program(program)
    results = simulate(program, data, compiled)
    expected = evaluate_graph(graph, data)
    error = max(float(np.abs(a - b).max()) for a, b in zip(results, expected, strict=True))
    return [node.name for node in compiled.nodes], error


CASES = {
    "plain": lambda: (ops.matmul(a := symbol(5, 7), b := symbol(7, 3)), [a, b]),
    "tall": lambda: (ops.matmul(a := symbol(2, 5, 7), b := symbol(7, 3)), [a, b]),
    "stacked": lambda: (ops.matmul(a := symbol(2, 3, 5, 7), b := symbol(2, 3, 7, 4)), [a, b]),
    "broadcast left": lambda: (ops.matmul(a := symbol(5, 7), b := symbol(3, 7, 4)), [a, b]),
    "broadcast both": lambda: (ops.matmul(a := symbol(2, 1, 5, 7), b := symbol(1, 3, 7, 4)), [a, b]),
    "one row": lambda: (ops.matmul(a := symbol(1, 7), b := symbol(7, 3)), [a, b]),
    "one column": lambda: (ops.matmul(a := symbol(5, 7), b := symbol(7, 1)), [a, b]),
    "inner of one": lambda: (ops.matmul(a := symbol(5, 1), b := symbol(1, 3)), [a, b]),
    "all ones": lambda: (ops.matmul(a := symbol(1, 1), b := symbol(1, 1)), [a, b]),
    "transposed b": lambda: (ops.matmul_nt(a := symbol(5, 7), b := symbol(3, 7)), [a, b]),
    "transposed stack": lambda: (ops.matmul_nt(a := symbol(2, 5, 7), b := symbol(2, 3, 7)), [a, b]),
    "permuted key": lambda: (ops.matmul(a := symbol(2, 5, 7), ops.transpose(b := symbol(2, 3, 7), [0, 2, 1])), [a, b]),
    "heads": lambda: (
        ops.matmul(
            ops.transpose(ops.reshape(q := symbol(2, 5, 12), [2, 5, 3, 4]), [0, 2, 1, 3]),
            ops.transpose(ops.reshape(k := symbol(2, 6, 12), [2, 6, 3, 4]), [0, 2, 3, 1]),
        ),
        [q, k],
    ),
    "slice of fused qkv": lambda: (ops.matmul(a := symbol(5, 4), (b := symbol(4, 12))[:, 4:8]), [a, b]),
    "rows apart": lambda: (ops.matmul((a := symbol(10, 7))[0:10:2, :], b := symbol(7, 3)), [a, b]),
    "columns apart": lambda: (ops.matmul((a := symbol(5, 14))[:, 0:14:2], b := symbol(7, 3)), [a, b]),
    "both permuted": lambda: (ops.matmul(ops.transpose(a := symbol(7, 5)), ops.transpose(b := symbol(3, 7))), [a, b]),
}


@pytest.mark.parametrize("case", CASES)
def test_products_are_right_however_their_operands_lie(case):
    output, inputs = CASES[case]()
    names, error = optimized([output], inputs)
    assert "BlasMatmul" in names
    assert error < 1e-5


@pytest.mark.parametrize("case", ["permuted key", "heads", "slice of fused qkv", "rows apart", "both permuted", "tall"])
def test_operands_that_blas_can_read_are_not_copied(case):
    output, inputs = CASES[case]()
    names, _ = optimized([output], inputs)
    assert [name for name in names if name != "Reshape"] == ["BlasMatmul"]


def test_operands_that_blas_cannot_read_are_copied_first():
    output, inputs = CASES["columns apart"]()
    names, _ = optimized([output], inputs)
    assert names == ["StridedSlice", "BlasMatmul"]


def test_a_bias_and_an_activation_are_part_of_the_product():
    a, b, bias = symbol(5, 7), symbol(7, 3), symbol(3)
    names, error = optimized([ops.gelu(ops.matmul(a, b) + bias)], [a, b, bias])
    assert names == ["BlasMatmul"]
    assert error < 1e-5


def test_other_dtypes_keep_hidets_kernels():
    a, b = (hidet.symbol([4, 4], "float64", "cpu") for _ in range(2))
    graph = normalize(hidet.trace_from(ops.matmul(a, b), [a, b]))
    program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0])
    assert [node.name for node in optimize_program(program).nodes] == ["Matmul"]


def test_hidets_own_optimize_is_untouched():
    a, b = symbol(4, 4), symbol(4, 4)
    assert [node.name for node in hidet.graph.optimize(hidet.trace_from(ops.matmul(a, b), [a, b])).nodes] == ["Matmul"]


def test_a_view_reaches_as_far_as_memory_is_only_renamed():
    x = symbol(2, 6, 12)
    heads = ops.transpose(ops.reshape(x, [2, 6, 3, 4]), [0, 2, 1, 3])
    assert (view_of(heads).source, view_of(heads).strides) == (x, (72, 4, 12, 1))
    merged = ops.reshape(heads, [2, 18, 4])  # heads and positions are not next to one another in x
    assert (view_of(merged).source, view_of(merged).strides) == (heads, (72, 4, 1))
    part = x[:, 2:4, 4:8]
    assert (view_of(part).source, view_of(part).strides, view_of(part).offset) == (x, (72, 12, 1), 28)
    assert view_of(ops.relu(x)).source is not x


# Elements are read by layout, and converted by dtype.
QUICK_HALVES = [
    ("plain", "float16"),
    ("transposed b", "bfloat16"),
    ("stacked", "bfloat16"),
    ("both permuted", "float16"),
]


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param(layout, dtype, marks=[pytest.mark.slow] * ((layout, dtype) not in QUICK_HALVES))
        for layout in ("plain", "transposed b", "stacked", "both permuted")
        for dtype in ("float16", "bfloat16")
    ],
)
def test_half_types_are_summed_up_in_float32_and_rounded_once(dtype, layout):
    k = 1200  # more than a panel
    shapes = {"stacked": ((2, 3, 9, k), (2, 3, k, 21)), "transposed b": ((9, k), (21, k))}
    a, b = (half(*shape, dtype=dtype) for shape in shapes.get(layout, ((9, k), (k, 21))))
    if layout == "both permuted":
        a, b = a.t().contiguous(), b.t().contiguous()
    c = half(21, dtype=dtype)
    x, y, bias = (hidet.symbol(list(t.shape), dtype, "cpu") for t in (a, b, c))
    if layout == "both permuted":
        product, whole = ops.matmul(ops.transpose(x), ops.transpose(y)), a.t().double() @ b.t().double()
    elif layout == "transposed b":
        product, whole = ops.matmul_nt(x, y), a.double() @ b.t().double()
    else:
        product, whole = ops.matmul(x, y), a.double() @ b.double()
    graph = cpu_optimized(ops.relu(product + bias), [x, y, bias])
    assert [node.name for node in graph.nodes] == ["BlasMatmul"]
    with cpu_target():
        (result,) = graph.forward([hidet.from_torch(t) for t in (a, b, c)])
    expected = torch.relu(whole + c.double())
    # Half a unit in the last place, and what float32 sums are off.
    unit = torch.finfo(getattr(torch, dtype)).eps
    error = (result.torch().double() - expected).abs()
    assert bool((error <= expected * unit * 0.51 + 1e-4).all())


def half(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))


def cpu_optimized(outputs, inputs):
    with sound_rewrites(), cpu_kernels():
        graph = hidet.graph.optimize(hidet.trace_from(outputs, inputs))
    load_openblas()
    return graph


EPILOGUES = {
    "bias": ((2, 5, 7), (7, 3), lambda y, c: y + c, [(3,)]),
    "column": ((2, 5, 7), (7, 3), lambda y, c: y * c, [(5, 1)]),
    "residual": ((2, 5, 7), (7, 3), lambda y, c: y + c, [(2, 5, 3)]),
    "mask of a stack": ((2, 3, 5, 7), (2, 3, 7, 4), lambda y, c: y * 0.5 + c, [(2, 1, 1, 4)]),
    "triangle": ((2, 3, 5, 7), (2, 3, 7, 4), lambda y, c: y + c, [(1, 1, 5, 4)]),
    "one row": ((1, 7), (7, 3), lambda y, c: y + c, [(3,)]),
    "one column": ((5, 7), (7, 1), lambda y, c: y + c, [(1,)]),
    "twice": ((5, 7), (7, 3), lambda y, c: y + c + c, [(3,)]),
    "many tiles": ((300, 40), (40, 1100), lambda y, c: y + c, [(1100,)]),
}


@pytest.mark.parametrize("case", EPILOGUES)
def test_operands_laid_out_as_the_product_are_read_while_it_is_written(case):
    a, b, apply, others = EPILOGUES[case]
    tensors = [symbol(*a), symbol(*b), *(symbol(*shape) for shape in others)]
    names, error = optimized([apply(ops.matmul(*tensors[:2]), *tensors[2:])], tensors)
    assert names == ["BlasMatmul"]
    assert error < 2e-5


def test_a_reshape_between_product_and_bias_costs_nothing():
    a, b, bias, residual = symbol(10, 7), symbol(7, 3), symbol(3), symbol(2, 5, 3)
    y = ops.reshape(ops.matmul(a, b), [2, 5, 3]) + bias
    names, error = optimized([ops.gelu(y) + residual], [a, b, bias, residual])
    assert names == ["BlasMatmul"]
    assert error < 1e-5


def test_a_reshape_of_rows_is_not_taken_for_one():
    a, b, bias = symbol(10, 7), symbol(7, 6), symbol(3)
    names, error = optimized([ops.reshape(ops.matmul(a, b), [20, 3]) + bias], [a, b, bias])
    assert len(names) > 1
    assert error < 1e-5


def test_products_and_epilogues_of_symbolic_sizes():
    a, mask = hidet.symbol(["batch", "seq", 8], "float32", "cpu"), hidet.symbol(["batch", 1, "seq"], "float32", "cpu")
    w, bias = symbol(8, 8), symbol(8)
    keys = ops.matmul(a, w) + bias
    scores = ops.matmul(a, ops.transpose(keys, [0, 2, 1])) * 0.125 + mask
    graph = cpu_optimized(scores, [a, mask, w, bias])
    assert [node.name for node in graph.nodes] == ["BlasMatmul", "BlasMatmul"]
    weight, shift = torch.randn(8, 8), torch.randn(8)
    for batch, seq in ((1, 1), (3, 5), (2, 70)):
        x, m = torch.randn(batch, seq, 8), torch.randn(batch, 1, seq)
        with cpu_target():
            (result,) = graph.forward([hidet.from_torch(t) for t in (x, m, weight, shift)])
        expected = x @ (x @ weight + shift).transpose(1, 2) * 0.125 + m
        torch.testing.assert_close(result.torch(), expected, rtol=1e-5, atol=1e-5)


def gate(x, weights, first):
    """A gate of one number a row on a product, and the product that reads the same rows."""
    return gated(ops.sigmoid(ops.matmul(x, weights[0]) * 0.5), ops.matmul(x, weights[1]), first)


def shared_expert(x, weights, first):
    """A gate on an expert of two products, beside another expert."""
    expert = ops.matmul(ops.silu(ops.matmul(x, weights[1])), weights[2])
    return ops.matmul(x, weights[3]) + gated(ops.sigmoid(ops.matmul(x, weights[0])), expert, first)


def two_heads(x, weights, first):
    """Two heads, each with a gate."""
    one, two = (ops.sigmoid(ops.matmul(x, weights[number])) for number in (0, 4))
    return gated(one, ops.matmul(x, weights[1]), first) - gated(two, ops.matmul(x, weights[2]), first)


def attention_pooling(x, weights, first):
    """A mean of rows, weighted by scores of one number a row."""
    scores = ops.exp(ops.matmul(ops.tanh(ops.matmul(x, weights[1])), weights[0]))
    return ops.sum(gated(scores, ops.matmul(x, weights[2]), first), [0], keep_dim=True)


def gated(numbers, y, first):
    return numbers * y if first else y * numbers


GATED = {gate: 2, shared_expert: 4, two_heads: 4, attention_pooling: 3}
SIZES = (1, 8, 8, 8, 1, 8)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("head", GATED)
def test_a_trunk_of_gated_heads_is_computed_once(head, first):
    x, weights = symbol(6, 8), [symbol(8, size) for size in SIZES]
    graph = cpu_optimized(head(ops.relu(ops.matmul(x, weights[5])), weights, first), [x, *weights])
    assert [node.name for node in graph.nodes].count("BlasMatmul") == 1 + GATED[head]


def test_gated_heads_are_right():
    x, weights = symbol(6, 8), [symbol(8, size) for size in SIZES]
    trunk = ops.relu(ops.matmul(x, weights[5]))
    _, error = optimized([two_heads(trunk, weights, True)], [x, *weights])
    assert error < 1e-4


class Doubled(CpuTarget):
    """A target that leaves the graph before its last rewrite in place for one of two outputs."""

    def after_fusion(self, graph, frugal):
        rewritten = super().after_fusion(graph, frugal)
        again = rewrite(rewritten, lambda op, new: None if op.inputs[0] in new else copy_operator(op, op.inputs)[0])
        return FlowGraph([rewritten.outputs[0], again.outputs[1]], graph.inputs)


def test_a_product_that_is_computed_twice_is_refused():
    a, b = symbol(4, 8), symbol(8, 8)
    product = ops.matmul(a, b)
    graph = normalize(hidet.trace_from([ops.exp(product), product], [a, b]))
    program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0])
    with pytest.raises(CompileError, match="2 products of 1"):
        optimize_program(program, Doubled())
