"""Kernels of the CPU target against PyTorch: every way in which loops are arranged, sizes odd, one and symbolic."""

import copy

import hidet
import numpy as np
import pytest
import torch
from hidet import ops
from hidet.ir.tools.type_infer import TypeInfer
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hidet_dist.compile import compile_program, optimize_program
from hidet_dist.compile.cpu.build import cpu_target
from hidet_dist.compile.cpu.kernels.index import Axis, Index, Size, SplitNeeded
from hidet_dist.compile.cpu.kernels.lower import lower_to_kernels
from hidet_dist.compile.cpu.kernels.terms import Compare
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.simulate import simulate
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.symbols import SymbolSize
from hidet_dist.testing import models

functional = torch.nn.functional
RNG = np.random.default_rng(0)


def symbol(*shape, dtype="float32"):
    return hidet.symbol(list(shape), dtype, "cpu")


def numbers(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def computed(outputs, inputs, data):
    """The outputs, and the names of the optimized graph's operators but for reshapes."""
    graph = normalize(hidet.trace_from(outputs, inputs))
    names = {symbol.name: SymbolSize(8) for x in inputs for symbol in x.shape if not isinstance(symbol, int)}
    program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((1,))), symbols=names).plan.stages[0])
    compiled = optimize_program(program)
    assert all(hasattr(node.task, "kernel") or node.share_map for node in compiled.nodes), "hidet's own kernel is left"
    names = [node.name for node in compiled.nodes if not node.share_map]
    return simulate(program, data, compiled), names


def check(cases):
    """Compute all cases in one graph, whose inputs are all of theirs, and compare each with PyTorch."""
    inputs, outputs, data, expected = [], [], [], []
    for ours, theirs, arrays in cases:
        own = [symbol(*x.shape, dtype=str(x.dtype)) for x in arrays]
        inputs += own
        data += arrays
        outputs.append(ours(*own))
        expected.append(theirs(*map(torch.from_numpy, arrays)))
    results, names = computed(outputs, inputs, data)
    for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert result.shape == tuple(wanted.shape), number
        np.testing.assert_allclose(result, wanted.numpy(), rtol=2e-5, atol=2e-5, err_msg=f"case {number}")
    return names


def test_layout_changes():
    x, y = numbers(3, 5, 12, 7), numbers(3, 5, 1, 7)
    check(
        [
            (lambda a: ops.transpose(a, [0, 2, 1, 3]), lambda a: a.permute(0, 2, 1, 3), [x]),
            (lambda a: ops.transpose(a, [3, 2, 1, 0]), lambda a: a.permute(3, 2, 1, 0), [x]),
            (lambda a: ops.transpose(a, [0, 3, 1, 2]), lambda a: a.permute(0, 3, 1, 2), [x]),
            (
                lambda a: ops.reshape(ops.transpose(ops.reshape(a, [3, 5, 3, 4, 7]), [0, 2, 4, 1, 3]), [9, 35, 4]),
                lambda a: a.reshape(3, 5, 3, 4, 7).permute(0, 2, 4, 1, 3).reshape(9, 35, 4),
                [x],
            ),
            (lambda a: a[1:3, ::2, 3:11:3, 1:6], lambda a: a[1:3, ::2, 3:11:3, 1:6], [x]),
            (lambda a, b: ops.concat([a, b, a], 2), lambda a, b: torch.cat([a, b, a], 2), [x, y]),
            (lambda a: ops.concat([a, a], 3) * 2.0, lambda a: torch.cat([a, a], 3) * 2.0, [x]),
            (lambda a: ops.pad(a, [1, 2, 0, 3]), lambda a: functional.pad(a, [2, 3, 1, 0]), [numbers(2, 3, 5, 4)]),
            (lambda a, b: a + b, lambda a, b: a + b, [x, y]),
        ]
    )


def test_short_rows_that_are_read_where_a_condition_holds():
    cases = []
    for width in (2, 4, 6, 9):
        for dtype in ("float32", "float64", "int64", "int8"):
            x, keeps = (numbers(6, width) * 9).astype(dtype), numbers(6, 1) > 0
            cases += [
                (lambda a: ops.pad(a, [1, 2, 2, 0]), lambda a: functional.pad(a, [2, 0, 1, 2]), [x]),
                (lambda a: ops.pad(a, [3, 0, 1, 0]), lambda a: functional.pad(a, [0, 0, 3, 1]), [x]),
                (ops.where, torch.where, [keeps, x, x[::-1].copy()]),
            ]
    check(cases)


def test_rows_and_columns():
    x, w, m = numbers(4, 6, 67), numbers(67), numbers(4, 1, 67)
    names = check(
        [
            (lambda a: ops.softmax(a, -1), lambda a: a.softmax(-1), [x]),
            (lambda a: ops.softmax(a, 1), lambda a: a.softmax(1), [numbers(2, 5, 300)]),
            (lambda a, b: ops.softmax(a * 0.5 + b, -1), lambda a, b: (a * 0.5 + b).softmax(-1), [x, m]),
            (
                lambda a, b: ops.layer_norm(a + b) * b + a,
                lambda a, b: functional.layer_norm(a + b, (67,)) * b + a,
                [x, w],
            ),
            (
                lambda a, b: a * ops.rsqrt(ops.mean(ops.square(a), -1, keep_dim=True) + 1e-5) * b,
                lambda a, b: functional.rms_norm(a, (67,), b, 1e-5),
                [x, w],
            ),
            (
                ops.batch_norm_infer,
                functional.batch_norm,
                [x, numbers(6), np.abs(numbers(6)) + 0.5],
            ),
        ]
    )
    assert len(names) == 6  # each of them is one kernel


def test_reductions_and_pooling():
    x, image = numbers(5, 37, 66), numbers(2, 3, 13, 21)
    check(
        [
            (lambda a: ops.sum(a, [-1]), lambda a: a.sum(-1), [x]),
            (lambda a: ops.mean(a, [1]), lambda a: a.mean(1), [x]),
            (lambda a: ops.max(a, [0]), lambda a: a.amax(0), [x]),
            (lambda a: ops.min(a, [2], keep_dim=True), lambda a: a.amin(2, keepdim=True), [x]),
            (lambda a: ops.sum(a, [0, 1, 2]), lambda a: a.sum(), [x]),
            (lambda a: ops.relu(ops.sum(a, [0, 2])), lambda a: a.sum((0, 2)).relu(), [x]),
            (lambda a: ops.argmax(a, 1), lambda a: a.argmax(1), [x]),
            (lambda a: ops.argmin(a, 2), lambda a: a.argmin(2), [x]),
            (lambda a: ops.max_pool2d(a, 3, 2, 1), lambda a: functional.max_pool2d(a, 3, 2, 1), [image]),
            (lambda a: ops.avg_pool2d(a, 2, 2, 0), lambda a: functional.avg_pool2d(a, 2, 2, 0), [image]),
            (lambda a: ops.mean(a, [2, 3]), lambda a: a.mean((2, 3)), [numbers(2, 9, 7, 7)]),
        ]
    )


def test_elementary_functions_are_as_exact_as_pytorchs():
    wide = np.concatenate([np.linspace(-30, 30, 4001), np.linspace(-1e-3, 1e-3, 101), [-1e30, 1e30]])
    x = wide.astype(np.float32)
    positive = np.exp(np.linspace(-80, 80, 4001)).astype(np.float32)
    functions = {ops.exp: np.exp, ops.tanh: np.tanh, ops.erf: lambda v: torch.from_numpy(v).erf().numpy()}
    functions |= {ops.sigmoid: lambda v: 1 / (1 + np.exp(-v)), ops.log: np.log}
    inputs = [symbol(*x.shape), symbol(*positive.shape)]
    results, _ = computed([f(inputs[f is ops.log]) for f in functions], inputs, [x, positive])
    with np.errstate(over="ignore"):
        for function, result in zip(functions, results, strict=True):
            exact = functions[function]((positive if function is ops.log else x).astype(np.float64))
            smallest = np.finfo(np.float32).tiny
            np.testing.assert_allclose(
                result, exact.astype(np.float32), rtol=3e-7, atol=smallest, err_msg=str(function)
            )


def test_infinity_and_nan_are_kept():
    inf, nan = np.inf, np.nan
    rows = np.array([[-inf] * 40, [0.0] * 39 + [nan], [1.0] * 39 + [-inf], [inf] + [0.0] * 39, [3e38] * 40], np.float32)
    special = np.array([nan, inf, -inf, 0.0, -0.0], np.float32)
    check(
        [
            (lambda a: ops.softmax(a, -1), lambda a: a.softmax(-1), [rows]),
            (lambda a: ops.max(a, [1]), lambda a: a.amax(1), [rows]),
            (lambda a: ops.max(a, [0]), lambda a: a.amax(0), [rows]),
            (lambda a: ops.argmax(a, 1), lambda a: a.argmax(1), [rows]),
            (ops.relu, lambda a: a.relu(), [special]),
            (ops.exp, lambda a: a.exp(), [special]),
            (ops.tanh, lambda a: a.tanh(), [special]),
            (ops.log, lambda a: a.log(), [special]),
            (lambda a: a / nan, lambda a: a / nan, [special]),
            (lambda a: a / -inf, lambda a: a / -inf, [special]),
        ]
    )


def test_lookups_and_other_types():
    table, places = numbers(11, 6), np.array([[0, 10, -1], [3, 3, 7]], np.int64)
    integers = np.array([[-7, 5, 100], [-128, 127, 3]], np.int8)
    half = np.array(
        [0.0, -0.0, 1.0, 65504.0, 65519.9, 65520.0, 6e-8, -3e-8, 2.0**-15 * 1.1, np.inf, np.nan, 1 / 3] * 4, "f"
    )
    check(
        [
            (ops.take, lambda a, b: a[b], [table, places]),
            (lambda a: a + a, lambda a: a + a, [integers]),
            (lambda a: ops.cast(a, "float32") * 0.5, lambda a: a.float() * 0.5, [integers]),
            (lambda a: ops.sum(ops.cast(a, "int32"), [0]), lambda a: a.int().sum(0, dtype=torch.int32), [integers]),
            (lambda a: ops.cast(ops.cast(a, "float16"), "float32"), lambda a: a.half().float(), [half]),
            (lambda a: ops.cast(ops.cast(a, "bfloat16"), "float32"), lambda a: a.bfloat16().float(), [half]),
            (lambda a: ops.where(a > 0.5, a, a * 2.0), lambda a: torch.where(a > 0.5, a, a * 2.0), [table]),
            (lambda a: ops.exp(ops.cast(a, "float64")), lambda a: a.double().exp(), [table]),
        ]
    )


def test_softmax_of_short_floats():
    x = numbers(11, 40).astype(np.float16)
    own = symbol(*x.shape, dtype="float16")
    (result,), names = computed(ops.softmax(own, -1), [own], [x])
    assert len(names) == 1
    exact = torch.from_numpy(x).float().softmax(-1).numpy()
    np.testing.assert_allclose(result.astype("f"), exact, rtol=3 * 2.0**-11, atol=2.0**-24)  # three roundings


@settings(max_examples=3, derandomize=True, deadline=None, phases=[Phase.generate])
@given(st.data())
def test_chains_of_any_shape(data):
    cases = []
    for _ in range(3):
        shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 17, 33]), min_size=2, max_size=4))
        axes = data.draw(st.permutations(range(len(shape))))
        axis = data.draw(st.integers(0, len(shape) - 1))
        broadcast = [size if data.draw(st.booleans()) else 1 for size in shape]
        kind = data.draw(st.sampled_from(["softmax", "sum", "max", "none"]))

        def ours(a, b, axes=axes, axis=axis, kind=kind):
            y = ops.permute_dims(a * b + a, list(axes))
            if kind == "softmax":
                y = ops.softmax(y, axis)
            elif kind != "none":
                y = y - getattr(ops, kind)(y, [axis], keep_dim=True)
            return ops.reshape(ops.tanh(y), [-1])

        def theirs(a, b, axes=axes, axis=axis, kind=kind):
            y = (a * b + a).permute(*axes)
            if kind == "softmax":
                y = y.softmax(axis)
            elif kind != "none":
                y = y - getattr(y, {"max": "amax"}.get(kind, kind))(axis, keepdim=True)
            return y.tanh().reshape(-1)

        cases.append((ours, theirs, [numbers(*shape), numbers(*broadcast)]))
    check(cases)


def test_sizes_that_are_not_known():
    batch, seq = 3, 37
    x = symbol("batch", "seq", 24)
    rows, columns = x.shape[0], x.shape[1]
    heads = ops.transpose(ops.reshape(x, [rows, columns, 4, 6]), [0, 2, 1, 3])
    outputs = [
        ops.softmax(heads * 2.0, 2),
        ops.reshape(heads, [rows, 4 * columns, 6]),
        ops.layer_norm(x),
        ops.sum(x, [1]),
    ]
    data = numbers(batch, seq, 24)
    (soft, flat, norm, total), _ = computed(outputs, [x], [data])
    own = torch.from_numpy(data)
    split = own.reshape(batch, seq, 4, 6).permute(0, 2, 1, 3)
    for result, expected in [
        (soft, (split * 2.0).softmax(2)),
        (flat, split.reshape(batch, 4 * seq, 6)),
        (norm, functional.layer_norm(own, (24,))),
        (total, own.sum(1)),
    ]:
        np.testing.assert_allclose(result, expected.numpy(), rtol=2e-5, atol=2e-5)


def test_operators_that_share_a_task_keep_their_own_inputs():
    data = [numbers(2, 32), numbers(2, 32)]
    a, b = (symbol(2, 32) for _ in data)
    first = ops.reshape(a, [64])
    second = copy.copy(first.op)  # as programs have it: equal reshapes are made once
    second.inputs = [b]
    second.outputs = second.symbolic_run()
    graph = lower_to_kernels(hidet.trace_from(ops.exp(first) - second.outputs[0] * 3.0, [a, b]))
    (node,) = graph.nodes
    assert set(node.inputs) == {a, b}
    with cpu_target():
        (result,) = models.run_whole(graph, data)
    np.testing.assert_allclose(result, np.exp(data[0].ravel()) - data[1].ravel() * 3, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_options_of_the_user_do_not_change_kernels(tmp_path):
    x = symbol(4, 6)
    graph = normalize(hidet.trace_from(ops.exp(x) + 1.0, [x]))
    program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0])
    with hidet.option.context():
        hidet.option.cache_dir(str(tmp_path))  # which has no such kernel yet
        hidet.option.search_space(2)
        assert compile_program(program).candidates == [1]


def test_the_same_graph_gives_the_same_kernels():
    def texts():
        x = symbol(4, 6, 64)
        graph = normalize(hidet.trace_from(ops.softmax(ops.transpose(ops.gelu(x), [1, 0, 2]) * 0.5, -1), [x]))
        program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0])
        return [node.task.kernel.text for node in optimize_program(program).nodes]

    assert texts() == texts()


def test_a_product_by_a_logistic_function_is_one_function(tmp_path):
    x, weight = symbol(40, 64), hidet.asarray(numbers(64, 64))
    y = ops.matmul(x, weight)
    graph = normalize(hidet.trace_from([ops.silu(y), x * ops.sigmoid(x)], [x]))
    program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0])
    with hidet.option.context():
        hidet.option.cache_dir(str(tmp_path))
        compile_program(program)
    sources = [file.read_text() for name in ("source.cc", "kernel.h") for file in tmp_path.rglob(f"ops/**/{name}")]
    assert sum("hd::times_logistic(" in source for source in sources) == 2
    assert not any("hd::exp(" in source for source in sources)


def test_halves_that_are_exchanged_are_read_without_divisions():
    tokens, data = 5, numbers(5, 24)
    x = symbol("tokens", 24)
    heads = ops.transpose(ops.reshape(x, [1, x.shape[0], 3, 8]), [0, 2, 1, 3])
    turned = ops.concat([-heads[:, :, :, 4:], heads[:, :, :, :4]], 3)
    y = ops.transpose(heads * 2.0 + turned, [0, 2, 1, 3])
    graph = normalize(hidet.trace_from(y, [x]))
    program = partition_graph(
        graph, search(graph, builtin("cpu", DeviceMesh((1,))), symbols={"tokens": SymbolSize(8)}).plan.stages[0]
    )
    texts = [node.task.kernel.text for node in optimize_program(program).nodes if not node.share_map]
    assert len(texts) == 1
    assert "%" not in texts[0]
    (result,), _ = computed([y], [x], [data])
    own = torch.from_numpy(data).reshape(1, tokens, 3, 8)
    expected = own * 2.0 + torch.cat([-own[..., 4:], own[..., :4]], -1)
    np.testing.assert_allclose(result, expected.numpy(), rtol=2e-5, atol=2e-5)


@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 12), st.sampled_from(["<", "<="]))
def test_a_comparison_bounds_its_axis(factor, offset, extent, operator):
    axis = Axis(Size(extent))
    comparison = Compare(operator, Index.of(axis).times(Size(factor)), Index.of(-offset))
    for holds in (True, False):
        bound = comparison.bound(holds)
        if factor == 0:
            assert bound is None
            continue
        assert bound is not None
        found, first, end = bound
        assert found is axis
        assert first >= 0
        assert end <= extent
        holding = [
            place
            for place in range(extent)
            if (factor * place + offset < 0 or (operator == "<=" and factor * place + offset == 0)) == holds
        ]
        assert list(range(first, end)) == holding


@given(st.integers(0, 7), st.integers(1, 8), st.integers(-40, 40), st.integers(1, 9))
def test_division_of_an_index_within_a_part(first, length, offset, divisor):
    axis, other = Axis(Size(16)), Axis(Size(3))
    index = Index.of(axis) + Index.of(other).times(Size(16)) + Index.of(offset)
    both = index.divided_within(Size(divisor), {axis: (first, first + length)})
    for i in range(first, first + length) if both is not None else ():
        for j in range(3):
            places = {axis: i, other: j}
            value = i + 16 * j + offset
            assert value >= 0 or divisor == 1  # as C divides
            got = [
                sum(number * (places[atom] if atom is not None else 1) for (atom, _), number in part.terms.items())
                for part in both
            ]
            assert got == [value // divisor, value % divisor]


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), st.integers(1, 40))
def test_division_of_an_index(a, b, c, divisor):
    axes = [Axis(Size(n)) for n in (a, b, c)]
    index = Index.of(axes[0]).times(Size(b * c)) + Index.of(axes[1]).times(Size(c)) + Index.of(axes[2])
    try:
        both = index.divided(Size(divisor))
    except SplitNeeded as needed:
        assert needed.axis.extent.number % needed.factor.number == 0
        assert 1 < needed.factor.number < needed.axis.extent.number
        return
    if both is None:
        return

    def value(part, places):
        return sum(n * (places[axes.index(atom)] if atom is not None else 1) for (atom, _), n in part.terms.items())

    for places in np.ndindex(a, b, c):
        assert (value(both[0], places), value(both[1], places)) == divmod(value(index, places), divisor)


@pytest.mark.parametrize("size", [1, 7])
def test_tensors_of_one_element(size):
    check([(lambda a: ops.softmax(a, 0) + a, lambda a: a.softmax(0) + a, [numbers(size, 1, 1)])])


def test_sums_of_varying_extent_stay_with_hidet():
    x = symbol(4, 9)
    graph = normalize(hidet.trace_from(ops.relu(ops.cumsum(x, dim=1)), [x]))
    program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0])
    compiled = optimize_program(program)
    assert any(not hasattr(node.task, "kernel") for node in compiled.nodes)
    data = numbers(4, 9)
    expected = torch.from_numpy(data).cumsum(1).relu().numpy()
    np.testing.assert_allclose(simulate(program, [data], compiled)[0], expected, rtol=2e-5, atol=2e-5)


def _type_inferences(monkeypatch, length):
    """Count the type inferences of hidet while it optimizes a chain of element-wise operators."""
    calls = 0
    infer = TypeInfer.visit_TensorElement

    def counted(self, e):
        nonlocal calls
        calls += 1
        return infer(self, e)

    x = symbol(4, 8)
    y = x
    for _ in range(length // 2):
        y = ops.tanh(y) * 1.5
    graph = normalize(hidet.trace_from(y, [x]))
    program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0])
    with monkeypatch.context() as patch:
        patch.setattr(TypeInfer, "visit_TensorElement", counted)
        compiled = optimize_program(program)
    return calls, compiled, program


def test_long_chains_are_fused_in_bounded_pieces_in_linear_time(monkeypatch):
    _type_inferences(monkeypatch, 8)  # so that what is inferred once is not counted
    short, _, _ = _type_inferences(monkeypatch, 80)
    long, compiled, program = _type_inferences(monkeypatch, 160)
    assert long < 2.5 * short
    assert 2 <= len(compiled.nodes) <= 8
    data = numbers(4, 8)
    expected = data
    for _ in range(80):
        expected = np.tanh(expected) * np.float32(1.5)
    np.testing.assert_allclose(simulate(program, [data], compiled)[0], expected, rtol=1e-4, atol=1e-5)
