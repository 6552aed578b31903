"""Each test fails when hidet no longer needs what is bent for it."""

import sys

import hidet
import numpy as np
import pytest
from hidet import ops

import hidet_dist  # noqa: F401  (sets hidet's definitions right)
from hidet_dist.compat import named_weights
from hidet_dist.compat.quiet import quiet_builds
from hidet_dist.compat.rewrites import ONLY_WITH_GPU, UNSOUND, sound_rewrites
from hidet_dist.normalize import normalize
from hidet_dist.soundness.plans import evaluate_graph


def masked():
    """scores * 2 + mask * 3, the mask broadcast over the last but one dim."""
    scores = hidet.symbol([2, 4], "float32", "cpu")
    mask = hidet.symbol([1, 4], "float32", "cpu")
    return hidet.trace_from(scores * 2.0 + mask * 3.0, [scores, mask])


def reads_beyond_the_mask(graph):
    """Whether the definition of the last operator indexes the one-row mask with its own row index."""
    from hidet_dist.rules.access import analyze

    (node,) = graph.nodes
    position = next(i for i, x in enumerate(node.inputs) if tuple(x.shape) == (1, 4))
    return any(a.indices[0].maximum > 0 for a in analyze(node.task).accesses if a.tensor == position)


def test_hidet_still_rewrites_broadcast_operands_wrongly():
    assert reads_beyond_the_mask(hidet.graph.optimize(masked())), "the rewrite is sound now: drop it from rewrites.py"
    with sound_rewrites():
        assert not reads_beyond_the_mask(hidet.graph.optimize(masked()))


def test_hidet_still_drops_casts_that_round():
    def graph():
        x = hidet.symbol([4], "float32", "cpu")
        return hidet.trace_from(x.to("int32").to("float32") + 0.0, [x])

    x = hidet.asarray(np.array([0.5, 1.5, 2.5, 3.5], np.float32))
    wrong = hidet.graph.optimize(graph())
    assert (wrong(x).numpy() == x.numpy()).all(), "casts are kept now: drop the rewrite from rewrites.py"
    with sound_rewrites():
        right = hidet.graph.optimize(graph())
    np.testing.assert_array_equal(right(x).numpy(), [0, 1, 2, 3])


def test_rewrites_are_back_in_place_afterwards():
    from hidet.graph.transforms import registered_rewrite_rules

    before = registered_rewrite_rules()
    with pytest.raises(RuntimeError), sound_rewrites():
        assert len(registered_rewrite_rules()) == len([rule for rule in before if not isinstance(rule, UNSOUND)])
        raise RuntimeError
    assert registered_rewrite_rules() == before


@pytest.fixture
def rewrites_of_a_gpu():
    """The registrations of hidet when it finds a GPU at its import."""
    from hidet.graph.transforms.graph_patterns import base

    registered_before = hidet.graph.transforms.registered_rewrite_rules()
    base._registered_rewrite_rules[:] = [
        *(rule for rule in registered_before if not isinstance(rule, ONLY_WITH_GPU)),
        *(rule() for rule in ONLY_WITH_GPU),
    ]
    yield
    base._registered_rewrite_rules[:] = registered_before


def attention(second, axis, scale=None, masked=False):
    """softmax(q k) v of 64 x 64 matrices in half precision, and what a rewrite must not forget."""
    from hidet.graph.ops.activation import SoftmaxOp  # of which hidet's own softmax is not made

    q, k, v, mask = (hidet.symbol([1, 64, 64], "float16", "cuda:0") for _ in range(4))
    scores = ops.matmul_nt(q, k) if second else ops.matmul(q, k)
    scores = scale(scores, 0.125) if scale else scores
    scores = scores + mask if masked else scores
    inputs = [q, k, v, *([mask] if masked else [])]
    return hidet.trace_from(ops.matmul(SoftmaxOp(scores, axis).outputs[0], v), inputs)


WRONGLY_REWRITTEN = {
    "a transposed operand": lambda: attention(True, -1),
    "another axis": lambda: attention(False, 1),
    "a mask": lambda: attention(True, -1, masked=True),
    "a factor": lambda: attention(True, 1, ops.multiply),
    "a divisor": lambda: attention(True, 1, ops.divide),
}


def shape_of(graph):
    """The operators' names, with whether a product takes its operand transposed."""
    graph.update_nodes()
    return [(node.name.lower(), node.attrs.get("transpose_b")) for node in graph.nodes]


@pytest.mark.parametrize("what", WRONGLY_REWRITTEN)
def test_hidets_attention_still_forgets_what_it_replaces(rewrites_of_a_gpu, what):
    from hidet.graph.transforms import subgraph_rewrite_pass

    def rewritten():
        with hidet.graph.PassContext():
            return shape_of(subgraph_rewrite_pass()(WRONGLY_REWRITTEN[what]()))

    before = shape_of(WRONGLY_REWRITTEN[what]())
    assert rewritten() != before, "hidet's rule is sound now: drop it from rewrites.py"
    with sound_rewrites():
        after = rewritten()
    assert "attn" not in " ".join(name for name, _ in after)
    assert ("matmul", True) in after or ("matmul", True) not in before
    assert [name for name, _ in after if name in ("matmul", "softmax")] == ["matmul", "softmax", "matmul"]


def test_programs_do_not_depend_on_whether_hidet_found_a_gpu(rewrites_of_a_gpu):
    from hidet.graph.transforms import registered_rewrite_rules

    assert any(isinstance(rule, ONLY_WITH_GPU) for rule in registered_rewrite_rules())
    with sound_rewrites():
        assert not any(isinstance(rule, ONLY_WITH_GPU) for rule in registered_rewrite_rules())


def test_hidet_still_transposes_the_operand_of_a_product_once_for_two():
    def graph():
        a, b = (hidet.symbol([4, 4], "float16", "cpu") for _ in range(2))
        return hidet.trace_from(hidet.ops.matmul_nt(a, hidet.ops.transpose(b)), [a, b])

    def plain():
        a, b = hidet.symbol([4, 6], "float16", "cpu"), hidet.symbol([8, 6], "float16", "cpu")
        return hidet.trace_from(hidet.ops.matmul(a, hidet.ops.transpose(b)), [a, b])

    a, b = (np.random.default_rng(seed).standard_normal((4, 4)).astype(np.float16) for seed in range(2))
    inputs = [hidet.asarray(x) for x in (a, b)]
    wrong = hidet.graph.optimize(graph())(*inputs).numpy()
    assert not np.allclose(wrong, a @ b, atol=1e-2), "hidet's rule is sound now: drop it from rewrites.py"
    with sound_rewrites():
        np.testing.assert_allclose(hidet.graph.optimize(graph())(*inputs).numpy(), a @ b, atol=1e-2)
        assert len(hidet.graph.optimize(plain()).nodes) == 1


def test_hidet_still_compares_symbolic_extents_by_their_truth_value():
    x, w = hidet.symbol([2, 4, "k"], "float32", "cpu"), hidet.symbol(["k", 8], "float32", "cpu")

    def optimized():
        return hidet.graph.optimize(hidet.trace_from(hidet.ops.matmul(x, w), [x, w]))

    with pytest.raises(TypeError, match="logical operations"):
        optimized()
    with sound_rewrites():
        assert [str(extent) for extent in optimized().outputs[0].shape] == ["2", "4", "8"]


def test_hidet_is_loud_and_is_silenced(capfd, monkeypatch):
    logger = sys.modules["hidet.drivers.build_task"].logger
    for handler in logger.handlers:
        monkeypatch.setattr(handler, "stream", sys.stderr)  # that of this test
    x = hidet.symbol([3, 5], "float32", "cpu")
    size = np.random.default_rng().integers(1 << 30)  # a kernel that no cache holds

    def build(offset):
        op = (x + float(size + offset)).op
        hidet.drivers.build_task_batch([(op.task, "cpu"), ((x * float(size + offset)).op.task, "cpu")])

    build(0)
    hidet.drivers.build_task((x - float(size)).op.task, target="cpu")  # in this process, whose loggers remember it
    assert capfd.readouterr().err, "hidet is quiet now: drop quiet.py"
    count = []
    with quiet_builds(lambda: count.append(1)):
        build(1)
    assert capfd.readouterr().err == ""
    assert len(count) == 2


def test_hidet_still_defines_products_with_a_transposed_operand_wrongly():
    from hidet.ir.compute import tensor_input

    from hidet_dist.compat import matmul_definition
    from hidet_dist.rules.access import analyze

    def indexes_of_b(matmul):
        from hidet.ir.task import Task

        a, b = tensor_input("a", "float32", [5, 7]), tensor_input("b", "float32", [3, 7])
        definition = analyze(Task("nt", [a, b], [matmul(a, b, tb=True)]))
        (access,) = [access for access in definition.accesses if access.tensor == 1]
        return access.indices, definition.out_digits[0]

    indices, (rows, columns) = indexes_of_b(matmul_definition.hidet_matmul)
    assert indices[0].digits == set(rows), "hidet's definition is right now: drop matmul_definition.py"
    indices, (rows, columns) = indexes_of_b(matmul_definition.matmul)
    assert indices[0].digits == set(columns)


@pytest.mark.parametrize("shapes", [((5, 7), (3, 7)), ((2, 5, 7), (2, 3, 7)), ((5, 7), (4, 3, 7)), ((5, 7), (5, 7))])
def test_products_with_a_transposed_operand_are_right_on_the_cpu(shapes):
    a, b = (hidet.symbol(list(shape), "float32", "cpu") for shape in shapes)
    graph = hidet.trace_from(hidet.ops.matmul_nt(a, b), [a, b])
    left, right = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in shapes)
    result = graph(hidet.asarray(left), hidet.asarray(right)).numpy()
    np.testing.assert_allclose(result, left @ np.swapaxes(right, -1, -2), atol=1e-5)


VECTORS = [
    ("matmul", (4,), (4, 6)),
    ("matmul", (4, 6), (6,)),
    ("matmul", (4,), (3, 4, 6)),
    ("matmul", (2, 3, 4, 6), (6,)),
    ("matmul_nt", (6,), (4, 6)),
    ("matmul_nt", (6,), (3, 4, 6)),
]


def vector_product(kind, left, right):
    """A graph of ``x @ w`` for constant w, an input, and NumPy's answer."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in (left, right))
    given = hidet.symbol(list(left), "float32", "cpu")
    graph = hidet.trace_from(getattr(hidet.ops, kind)(given, hidet.asarray(w)), [given])
    return graph, x, x @ (w if kind == "matmul" else np.swapaxes(w, -1, -2))


def test_hidet_still_derives_a_wrong_shape_for_a_vector_times_a_matrix():
    from hidet.ir.compute import tensor_input

    from hidet_dist.compat import matmul_definition

    a, b = tensor_input("a", "float32", [4]), tensor_input("b", "float32", [4, 6])
    wrong = matmul_definition.hidet_matmul(a, b, allow_1d=True)
    assert list(map(int, wrong.shape)) == [4], "hidet's shape is right now: drop it from matmul_definition.py"
    assert list(map(int, matmul_definition.matmul(a, b, allow_1d=True).shape)) == [6]


@pytest.mark.parametrize(("kind", "left", "right"), VECTORS)
def test_products_of_vectors_are_numpys_however_they_are_sharded(kind, left, right):
    """The oracle evaluates every choice of the rule on every rank; each such product has choices that shard it."""
    from hidet_dist.rules.rule import RuleTable, derive
    from hidet_dist.soundness.check import check_specs
    from hidet_dist.soundness.plans import check_stage, random_stage
    from hidet_dist.spec import DeviceMesh
    from hidet_dist.view import GraphView

    graph, x, product = vector_product(kind, left, right)
    assert tuple(graph.outputs[0].shape) == product.shape
    (op,) = graph.nodes
    for mesh in (DeviceMesh((2,)), DeviceMesh((2, 2))):
        specs = [choice.spec for choice in derive(op).choices(mesh)]
        assert any(spec.reduce_fns[0] for spec in specs)
        assert any(not spec.out_specs[0].is_replicated for spec in specs)
        data = [x.astype(np.float64), op.inputs[1].numpy().astype(np.float64)]
        assert not check_specs(op, mesh, specs, data).failures
        normal = normalize(graph)
        stage = random_stage(GraphView(normal), mesh, RuleTable(mesh), np.random.default_rng(1))
        assert (
            check_stage(
                normal, stage, data[:1], [data[0] @ (data[1] if kind == "matmul" else data[1].swapaxes(-1, -2))]
            )
            == ""
        )


@pytest.mark.parametrize(("kind", "left", "right"), [VECTORS[0], VECTORS[3]])
def test_products_of_vectors_in_compiled_kernels(kind, left, right):
    from hidet_dist.compile import optimize_program
    from hidet_dist.machine import builtin
    from hidet_dist.partitioning import partition_graph
    from hidet_dist.search import search
    from hidet_dist.simulate import simulate
    from hidet_dist.spec import DeviceMesh

    graph, x, product = vector_product(kind, left, right)
    whole = ", ".join(["R"] * (len(right) - 1))
    normal = normalize(graph)
    plan = search(normal, builtin("cpu", DeviceMesh((2,))), pins={"w0": f"({whole}, S0)" if whole else "(S0)"}).plan
    program = partition_graph(normal, plan.stages[0])
    np.testing.assert_allclose(simulate(program, [x], optimize_program(program))[0], product, atol=1e-5)


def test_products_of_two_vectors_or_of_a_transposed_vector_are_refused():
    vector, matrix = (hidet.symbol(shape, "float32", "cpu") for shape in ([4], [3, 4]))
    with pytest.raises(ValueError, match="rank > 1"):
        hidet.ops.matmul(vector, vector)
    with pytest.raises(ValueError, match="vector cannot be transposed"):
        hidet.ops.matmul_nt(matrix, vector)
    with pytest.raises(ValueError, match="Cannot multiply"):
        hidet.ops.matmul(vector, matrix)


def test_hidets_opaque_tasks_still_hold_the_graph():
    """Pickled for a parallel build, they would take the graph along, which fails once an operator of it has run."""
    import pickle

    from hidet.graph.ops.opaque import OpaqueOperator

    from hidet_dist.partitioning import CommunicationOp

    class Identity(OpaqueOperator):
        def __init__(self, x):
            super().__init__("identity", {"x": x})

        def symbolic_forward(self, x):
            return {"y": self.symbol(x.shape, x.dtype, x.device)}

    x = hidet.symbol([2, 3], "float32", "cpu")
    y = hidet.ops.relu(x)
    assert y.op.compiled_task is not None
    with pytest.raises((AttributeError, TypeError, ValueError)):
        pickle.dumps(Identity(y).task)  # if it succeeds, drop the task of native_call.py
    pickle.dumps(CommunicationOp(y, "all_reduce", [0], 2, "sum").task)


def test_a_reshaped_tensor_that_is_read_twice_is_kept(tmp_path):
    """A product that is reshaped and read at the start and at the end, with other buffers made and freed between."""
    rng = np.random.default_rng(0)
    x = hidet.symbol([2, 5, 16], "float32", "cpu")
    w = [hidet.asarray(rng.standard_normal((16, 16)).astype(np.float32) / 4) for _ in range(4)]
    first = hidet.ops.matmul(x, w[0])
    between = hidet.ops.transpose(hidet.ops.softmax(first, 2), [1, 0, 2])
    for weight in w[1:]:
        between = hidet.ops.transpose(hidet.ops.softmax(hidet.ops.matmul(between, weight), 2), [1, 0, 2])
    graph = hidet.trace_from([first * 2.0 + between, between], [x])
    data = rng.standard_normal((2, 5, 16)).astype(np.float32)
    hidet.distributed.auto_parallel(graph, {"mesh_shape": [1]}, {}, tmp_path / "out")
    with hidet.distributed.load_partition(tmp_path / "out", 0) as model:
        results = model.run([data])
    for result, whole in zip(results, evaluate_graph(graph, [data]), strict=True):
        np.testing.assert_allclose(result, whole, atol=1e-5)


def test_hidet_still_cannot_make_scalars():
    from hidet_dist.compat.scalars import scalar_tensors

    with pytest.raises(ValueError, match="NULL"):
        hidet.asarray(1.0)  # when it can: drop scalars.py
    with scalar_tensors():
        x = hidet.asarray(0.5, dtype="float32")
        assert (tuple(x.shape), x.dtype.name, float(x.torch())) == ((), "float32", 0.5)
        assert hidet.asarray(2).dtype.name == "int64"
        assert hidet.asarray([1.0, 2.0]).shape == (2,)
    with pytest.raises(ValueError, match="NULL"):
        hidet.asarray(1.0)


@pytest.mark.parametrize("seed", range(20))
def test_graphs_are_analysed_as_hidet_does(seed):
    rng = np.random.default_rng(seed)
    inputs = [hidet.symbol([4], "float32", "cpu") for _ in range(2)]
    known = [*inputs, hidet.ones([4], device="cpu")]
    for _ in range(30):
        a, b = (known[number] for number in rng.integers(0, len(known), 2))
        known += hidet.ops.split(a + b, 2, 0) if rng.random() < 0.2 and a.shape == b.shape == (4,) else []
        known += [a * b] if a.shape == b.shape else []
    outputs = [known[number] for number in rng.integers(3, len(known), 3)]
    cut = [] if seed % 2 else [known[int(rng.integers(3, len(known)))]]  # a result at which the graph begins
    for stop in (None, [*inputs, *cut]):
        ours, hidets = named_weights.analyze(outputs, stop), named_weights.hidet_analyze(outputs, stop)
        for mine, its in zip(ours, hidets, strict=True):
            assert list(map(id, mine)) == list(map(id, its))
        assert list(ours[2].values()) == list(hidets[2].values())


def test_hidet_still_takes_weights_without_data_for_inputs():
    x = hidet.symbol([4, 8], "float32", "cpu")
    y = hidet.ops.matmul(x, hidet.distributed.weight("w", [8, 6]))
    free, _, _ = named_weights.hidet_analyze([y], stop_tensors=[x])
    assert len(free) == 1, "hidet lets weights be: drop compat/named_weights.py"
    assert hidet.trace_from(y, [x]).inputs == [x]
    with pytest.raises(ValueError, match="not given in inputs"):
        hidet.trace_from(y + hidet.symbol([6], "float32", "cpu"), [x])


def test_hidet_still_has_no_infinite_constants():
    from hidet_dist.compat import infinities

    with pytest.warns(UserWarning, match="Truncated"):
        assert infinities.hidet_constant(hidet.float32, -np.inf).value > -np.inf, "hidet's is right: drop infinities.py"
    assert hidet.float32(-np.inf).value == -np.inf
    assert np.isnan(hidet.float16(np.nan).value)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_infinite_constants_are_written_as_cpp_has_them(dtype):
    from hidet.backend.codegen import CPUCodegen

    from hidet_dist.compat import infinities

    kind = hidet.ir.data_type(dtype)
    assert "inf" in str(infinities.hidet_literal(CPUCodegen(), -np.inf, kind)), "hidet's is right: drop infinities.py"
    for value, text in ((-np.inf, "(-INFINITY)"), (np.inf, "INFINITY"), (np.nan, "NAN")):
        written = str(CPUCodegen().scalar_literal(value, kind))
        assert written.endswith(text)
        assert "." not in written


@pytest.mark.parametrize("name", ["isnan", "isinf", "isfinite"])
def test_hidet_still_cannot_pickle_tasks_that_ask_for_nan(name):
    import pickle

    from hidet_dist.compat import predicates

    with pytest.raises(AttributeError, match="pickle"):
        pickle.dumps(predicates.hidet_result_types[name])  # if it can: drop predicates.py
    x = hidet.symbol([3], "float32", "cpu")
    assert len(pickle.dumps(getattr(ops, name)(x).op.task)) > 0


@pytest.mark.usefixtures("quick")
def test_hidet_still_builds_its_simplification_rules_anew(monkeypatch):
    from hidet.ir.expr import var
    from hidet.transforms.rule_based_simplifier import RuleBasedSimplifier

    from hidet_dist.compat import float_algebra, simplifier_rules

    i, j = var("i"), var("j")

    def simplified():
        expressions = [(i + 1) + j, (i * 8 + j % 8) // 8, (i * 8) // 8, (i % 8) % 8, i + 3 < 7, (i + j) // 4]
        return [str(RuleBasedSimplifier()(expression)) for expression in expressions]

    assert RuleBasedSimplifier().patterns is RuleBasedSimplifier().patterns
    ours, names = simplified(), vars(RuleBasedSimplifier()).keys()
    assert ours == simplified(), "an instance changed the rules"
    monkeypatch.setattr(RuleBasedSimplifier, "__init__", simplifier_rules.hidet_init)
    monkeypatch.setattr(RuleBasedSimplifier, "apply_rule", float_algebra.apply_rule)
    monkeypatch.setattr(RuleBasedSimplifier, "apply_bound_aware_rule", simplifier_rules.hidet_apply_bound_aware_rule)
    assert ours == simplified()
    one, other = RuleBasedSimplifier(), RuleBasedSimplifier()
    assert vars(one).keys() == names
    assert one.patterns is not other.patterns, "hidet shares its rules now: drop simplifier_rules.py"


def test_hidet_still_keeps_dims_that_are_squeezed_from_the_end(monkeypatch):
    from hidet.graph.ops.transform import SqueezeOp

    from hidet_dist.compat import squeezed_dims

    x = hidet.symbol([4, 8, 1], "float32", "cpu")
    assert [int(n) for n in ops.squeeze(x, [-1]).shape] == [4, 8]
    assert [int(n) for n in ops.squeeze(hidet.symbol([1, 4, 1], "float32", "cpu"), [-1, 0]).shape] == [4]
    monkeypatch.setattr(SqueezeOp, "__init__", squeezed_dims.hidet_init)
    assert len(ops.squeeze(x, [-1]).shape) == 3, "hidet counts from the end now: drop squeezed_dims.py"


@pytest.mark.parametrize("function", [ops.sum, ops.mean, ops.max, ops.prod])
def test_dims_are_reduced_in_any_order(function):
    x = hidet.symbol([2, 3, 5], "float32", "cpu")
    data = np.random.default_rng(0).standard_normal((2, 3, 5))
    for keep in (False, True):
        outputs = [function(x, dims, keep_dim=keep) for dims in ([2, 0], [0, 2], [-1, 0])]
        first, *others = evaluate_graph(hidet.trace_from(outputs, [x]), [data])
        for own in others:
            np.testing.assert_array_equal(own, first)


def test_hidet_still_takes_dims_that_are_reduced_in_the_order_given(monkeypatch):
    from hidet.graph.ops.reduce.reduce import ReduceBaseOp

    from hidet_dist.compat import reduced_dims
    from hidet_dist.soundness.oracle import OutOfRange

    monkeypatch.setattr(ReduceBaseOp, "__init__", reduced_dims.hidet_init)
    x = hidet.symbol([2, 3, 5], "float32", "cpu")
    with pytest.raises(OutOfRange):  # otherwise: drop reduced_dims.py
        evaluate_graph(hidet.trace_from(ops.sum(x, [2, 0]), [x]), [np.ones((2, 3, 5))])
