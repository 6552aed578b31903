"""The program that a plan becomes: what is injected, that it is injected once, and that it computes the same."""

import dataclasses
import math
from collections import Counter

import hidet
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.compile import optimize_program
from hidet_dist.compile.cuda.target import CudaTarget
from hidet_dist.errors import PlanError
from hidet_dist.machine import builtin
from hidet_dist.machine.gpu import GPUS
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import CommunicationOp, partition_graph
from hidet_dist.partitioning.proof import with_conversions
from hidet_dist.reshard import moves
from hidet_dist.search import search
from hidet_dist.simulate import simulate
from hidet_dist.soundness.plans import check_stage, evaluate_graph
from hidet_dist.spec import DeviceMesh, OpShardSpec, Plan, TensorShardSpec
from hidet_dist.spec.plan import ConversionPlan, OperatorPlan, StagePlan, TensorPlan
from hidet_dist.targets import TARGETS
from hidet_dist.view import GraphView


def constant(*shape, seed=0):
    return hidet.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def plan_for(graph, mesh, operators, weights=None, inputs=None, outputs=None):
    """A plan written by hand: operator specs as text, and specs of tensors where they are not replicated.

    Conversions take the steps that are cheapest on the machine ``cpu``.
    """
    view = GraphView(graph)

    def tensors(names, written):
        specs = {name: TensorShardSpec.replicated(len(view.shape(name))) for name in names}
        specs.update({name: TensorShardSpec.parse(text) for name, text in (written or {}).items()})
        return tuple(
            TensorPlan(
                name,
                view.shape(name),
                view.tensors[name].dtype.name,
                view.nbytes(name),
                specs[name],
            )
            for name in names
        )

    own = tuple(
        OperatorPlan(i, view.operators[i].name, OpShardSpec.parse(s), 0.0, 0.0) for i, s in enumerate(operators)
    )
    stage = StagePlan(
        mesh,
        view.fingerprint(),
        own,
        tensors(view.weights, weights),
        tensors(view.inputs, inputs),
        tensors(view.outputs, outputs),
    )
    return Plan((with_conversions(view, stage, builtin("cpu", mesh)),))


def kinds(graph):
    return [op.kind for op in graph.nodes if isinstance(op, CommunicationOp)]


X = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)


def two_layers():
    x = hidet.symbol([4, 8], "float32", "cpu")
    hidden = hidet.ops.relu(hidet.ops.matmul(x, constant(8, 12)))
    return normalize(hidet.trace_from(hidet.ops.matmul(hidden, constant(12, 6, seed=2)), [x]))


MEGATRON = ["(R, R), (R, S0) -> (R, S0)", "(R, S0) -> (R, S0)", "(R, S0), (S0, R) -> (R, R) | all_reduce(sum, axes=0)"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_column_then_row_parallel_needs_one_all_reduce(ranks):
    graph = two_layers()
    plan = plan_for(graph, DeviceMesh((ranks,)), MEGATRON, {"w0": "(R, S0)", "w1": "(S0, R)"})
    program = partition_graph(graph, plan.stages[0])
    assert kinds(program.graph) == ["all_reduce"]
    assert program.coordinate is None
    assert program.communications() == ["all_reduce(sum, axes=0) float32[4, 6] -> [4, 6]"]
    assert [tuple(x.shape) for x in program.graph.inputs] == [(4, 8), (8, 12 // ranks), (12 // ranks, 6)]
    assert check_stage(graph, plan.stages[0], [X], evaluate_graph(graph, [X])) == ""


def test_the_same_conversion_is_made_once():
    """Three consumers want x split by rows and one wants it whole again: one slice, one gather."""
    x = hidet.symbol([4, 8], "float32", "cpu")
    y = hidet.ops.relu(x)
    outputs = [hidet.ops.exp(y), hidet.ops.tanh(y), hidet.ops.sqrt(y)]
    graph = normalize(hidet.trace_from(outputs, [x]))
    split = "(S0, R) -> (S0, R)"
    plan = plan_for(graph, DeviceMesh((2,)), ["(R, R) -> (R, R)", split, split, split])
    program = partition_graph(graph, plan.stages[0])
    names = [node.name for node in program.graph.nodes]
    assert names.count("ShardSlice") == 1
    assert kinds(program.graph) == ["all_gather"] * 3
    assert check_stage(graph, plan.stages[0], [X], evaluate_graph(graph, [X])) == ""


@pytest.mark.parametrize(
    ("shape", "source", "target"),
    [
        ((2,), "(S0, R)", "(R, S0)"),
        ((4,), "(R, S0)", "(S0, R)"),
        ((2, 2), "(S01, R)", "(R, S01)"),
        ((2, 2), "(S10, R)", "(S01, R)"),
        ((2, 2), "(S0, S1)", "(S1, S0)"),
        ((2, 2), "(R, S10)", "(S1, R)"),
        ((2, 2), "(S01, R)", "(R, R)"),
    ],
)
def test_any_conversion_keeps_the_tensor(shape, source, target):
    x = hidet.symbol([4, 8], "float32", "cpu")
    graph = normalize(hidet.trace_from(hidet.ops.relu(hidet.ops.exp(x)), [x]))
    operators = [f"{source} -> {source}", f"{target} -> {target}"]
    plan = plan_for(graph, DeviceMesh(shape), operators, inputs={"x0": source}, outputs={"t1.0": target})
    assert check_stage(graph, plan.stages[0], [X], [np.exp(X)]) == ""


def converting(mesh, source, target, steps):
    """exp in one layout, negated in another, with these steps between them."""
    x = hidet.symbol([4, 8], "float32", "cpu")
    graph = normalize(hidet.trace_from(hidet.ops.negative(hidet.ops.exp(x)), [x]))
    operators = [f"{source} -> {source}", f"{target} -> {target}"]
    plan = plan_for(graph, mesh, operators, inputs={"x0": source}, outputs={"t1.0": target})
    conversion = ConversionPlan("t0.0", TensorShardSpec.parse(source), TensorShardSpec.parse(target), steps, 0.0)
    return graph, listing(plan, [conversion])


def listing(plan, conversions):
    """The plan with other conversions before its last operator."""
    *others, last = plan.stages[0].operators
    operators = (*others, dataclasses.replace(last, conversions=tuple(conversions)))
    return Plan((dataclasses.replace(plan.stages[0], operators=operators),))


@pytest.mark.parametrize(
    ("source", "target", "steps", "sent"),
    [
        ("(S0, R)", "(R, S0)", ["all_to_all(axes=0, dim=0, to_dim=1)"], ["all_to_all"]),
        ("(S0, R)", "(R, S0)", ["all_gather(axes=0, dim=0)", "slice(axes=0, dim=1)"], ["all_gather"]),
        ("(S01, R)", "(R, S10)", ["all_to_all(axes=01, dim=0, to_dim=1, to_axes=10)"], ["all_to_all"]),
        ("(R, S10)", "(S0, S1)", ["all_to_all(axes=0, dim=1, to_dim=0)"], ["all_to_all"]),
        ("(R, S10)", "(S10, R)", ["all_to_all(axes=10, dim=1, to_dim=0)"], ["all_to_all"]),
        ("(R, S10)", "(R, R)", ["all_gather(axes=10, dim=1)"], ["all_gather"]),
        ("(R, R)", "(S10, R)", ["slice(axes=10, dim=0)"], []),
    ],
)
def test_the_plan_s_own_steps_are_taken(source, target, steps, sent):
    """Whether or not they are the cheapest on any machine."""
    graph, plan = converting(DeviceMesh((2, 2)), source, target, steps)
    program = partition_graph(graph, Plan.from_json(plan.to_json()).stages[0])
    assert kinds(program.graph) == sent
    assert plan.collectives() == dict(Counter(sent))
    assert check_stage(graph, plan.stages[0], [X], [-np.exp(X)]) == ""


def test_an_all_to_all_stays_what_it_is_through_fusion():
    steps = ["all_to_all(axes=01, dim=1, to_dim=0, to_axes=10)"]
    graph, plan = converting(DeviceMesh((2, 2)), "(R, S01)", "(S10, R)", steps)
    program = partition_graph(graph, plan.stages[0])
    optimized = optimize_program(program)
    assert kinds(optimized) == ["all_to_all"]
    assert program.communications() == ["all_to_all(axes=01) float32[4, 1, 2] -> [4, 1, 2]"]
    np.testing.assert_allclose(simulate(program, [X], optimized)[0], evaluate_graph(graph, [X])[0], atol=1e-5)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_steps_lead_to_the_shards_that_they_say(data):
    """A random walk over the layouts, in whatever order axes split a dim, as the plan's conversion."""
    mesh = DeviceMesh(data.draw(st.sampled_from([(2,), (4,), (2, 2), (2, 3), (2, 2, 2)])))
    shape = data.draw(st.sampled_from([(24,), (4, 12), (1, 24), (4, 6, 8), (1, 12, 4)]))
    layouts, steps = [TensorShardSpec.replicated(len(shape))], []
    for _ in range(data.draw(st.integers(2, 6))):
        step, after = data.draw(st.sampled_from(list(moves(layouts[-1], shape, mesh))))
        steps.append(step)
        layouts.append(after)
    first = data.draw(st.integers(0, len(steps) - 1))
    source, target = layouts[first], layouts[-1]
    x = hidet.symbol(list(shape), "float32", "cpu")
    graph = normalize(hidet.trace_from(hidet.ops.negative(x), [x]))
    plan = plan_for(graph, mesh, [f"{target} -> {target}"], inputs={"x0": str(source)}, outputs={"t0.0": str(target)})
    if source != target:
        plan = listing(plan, [ConversionPlan("x0", source, target, tuple(map(str, steps[first:])), 0.0)])
    inputs = [np.arange(math.prod(shape), dtype=np.float64).reshape(shape)]
    assert check_stage(graph, plan.stages[0], inputs, [-inputs[0]]) == ""


@pytest.mark.parametrize("axes", ["01", "10"])
@pytest.mark.parametrize("dim", [0, 1])
def test_partial_results_are_scattered_in_any_order_of_axes(axes, dim):
    x = hidet.symbol([4, 4, 8], "float32", "cpu")
    graph = normalize(hidet.trace_from(hidet.ops.sum(x, [1]), [x]))
    out = f"(S{axes}, R)" if dim == 0 else f"(R, S{axes})"
    spec = f"(R, S01, R) -> {out} | reduce_scatter(sum, axes={axes}, dim={dim})"
    plan = plan_for(graph, DeviceMesh((2, 2)), [spec], outputs={"t0.0": out})
    data = np.random.default_rng(3).standard_normal((4, 4, 8))
    assert check_stage(graph, plan.stages[0], [data], [data.sum(1)]) == ""


def test_conversions_that_do_not_fit_are_refused():
    split, other, whole_spec = (TensorShardSpec.parse(text) for text in ("(S0, R)", "(R, S0)", "(R, R)"))
    graph, plan = converting(DeviceMesh((2,)), "(S0, R)", "(R, S0)", ("all_to_all(axes=0, dim=0, to_dim=1)",))
    (good,) = plan.stages[0].operators[1].conversions

    def refused(*conversions):
        with pytest.raises(PlanError) as error:
            partition_graph(graph, listing(plan, conversions).stages[0])
        return str(error.value)

    assert "leads to (R, R), not to (R, S0)" in refused(dataclasses.replace(good, steps=("all_gather(axes=0, dim=0)",)))
    assert "leads to (S0, R)" in refused(dataclasses.replace(good, steps=()))
    assert "in use" in refused(dataclasses.replace(good, steps=("slice(axes=0, dim=1)",)))
    assert "Not a step" in refused(dataclasses.replace(good, steps=("rm -rf",)))
    assert "its spec is (S0, R)" in refused(dataclasses.replace(good, source=whole_spec))
    assert "twice" in refused(good, dataclasses.replace(good, seconds=1.0))
    unasked = ConversionPlan("x0", split, whole_spec, ("all_gather(axes=0, dim=0)",), 0.0)
    assert "converts x0 to (R, R), but nothing requires it" in refused(good, unasked)
    assert other == good.target
    assert kinds(partition_graph(graph, listing(plan, [good]).stages[0]).graph) == ["all_to_all"]


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize("scatter", [None, 0, 1])
def test_partial_results_become_whole(op, scatter):
    x = hidet.symbol([4, 4, 6], "float32", "cpu")
    graph = normalize(hidet.trace_from(getattr(hidet.ops, op)(x, [1]), [x]))
    name = {"mean": "average", "prod": "product"}.get(op, op)
    out, fn = "(R, R)", f"all_reduce({name}, axes=0)"
    if scatter is not None:
        out = "(S0, R)" if scatter == 0 else "(R, S0)"
        fn = f"reduce_scatter({name}, axes=0, dim={scatter})"
    plan = plan_for(graph, DeviceMesh((2,)), [f"(R, S0, R) -> {out} | {fn}"], outputs={"t0.0": out})
    program = partition_graph(graph, plan.stages[0])
    assert kinds(program.graph) == ["all_reduce" if scatter is None else "reduce_scatter"]
    data = np.random.default_rng(3).standard_normal((4, 4, 6)).astype(np.float32)
    assert check_stage(graph, plan.stages[0], [data], [getattr(data, op)(1)]) == ""
    if scatter is None:  # in compiled kernels, too
        np.testing.assert_allclose(simulate(program, [data])[0], getattr(data, op)(1), rtol=1e-5, atol=1e-6)


def test_simulated_collectives_keep_bfloat16():
    x = hidet.symbol([4, 8], "float32", "cpu")
    total = hidet.ops.sum(hidet.ops.cast(x, "bfloat16"), [1])
    graph = normalize(hidet.trace_from(hidet.ops.cast(total, "float32"), [x]))
    operators = ["(S0, R) -> (S0, R)", "(R, S0) -> (R) | all_reduce(sum, axes=0)", "(R) -> (R)"]
    plan = plan_for(graph, DeviceMesh((2,)), operators, inputs={"x0": "(S0, R)"})
    program = partition_graph(graph, plan.stages[0])
    assert kinds(program.graph) == ["all_to_all", "all_reduce"]
    assert {op.inputs[0].dtype.name for op in program.graph.nodes if isinstance(op, CommunicationOp)} == {"bfloat16"}
    data = np.arange(32, dtype=np.float32).reshape(4, 8)  # bfloat16 has these, and their sums up to 256
    np.testing.assert_array_equal(simulate(program, [data])[0], data.sum(1))


def test_communication_is_never_fused_away():
    """exp -> all_gather -> relu: hidet's own collectives vanish here; these stay, and stay apart."""
    x = hidet.symbol([4, 8], "float32", "cpu")
    graph = normalize(hidet.trace_from(hidet.ops.relu(hidet.ops.exp(x)), [x]))
    plan = plan_for(graph, DeviceMesh((2,)), ["(S0, R) -> (S0, R)", "(R, R) -> (R, R)"])
    program = partition_graph(graph, plan.stages[0])
    optimized = optimize_program(program)
    assert kinds(optimized) == kinds(program.graph) == ["all_gather"]
    np.testing.assert_allclose(simulate(program, [X], optimized)[0], evaluate_graph(graph, [X])[0], atol=1e-5)


def test_not_even_filled_tensors_are_communicated_while_a_program_is_optimized():
    """hidet computes an operator at once where it knows the values of all inputs."""
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        x = hidet.symbol([4, 8], "float32", "cpu")
        y = hidet.ops.add(x, hidet.ops.full([4, 8], 2.0, "float32", "cpu"))
        graph = normalize(hidet.trace_from(y, [x]))
    plan = plan_for(graph, DeviceMesh((2,)), ["-> (S0, R)", "(R, R), (R, R) -> (R, R)"])
    program = partition_graph(graph, plan.stages[0])
    optimized = optimize_program(program)
    assert kinds(optimized) == kinds(program.graph) == ["all_gather"]
    np.testing.assert_array_equal(simulate(program, [X], optimized)[0], X + 2)


def test_a_filled_tensor_is_made_in_each_layout_that_is_needed():
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        x = hidet.symbol([4, 8], "float32", "cpu")
        filled = hidet.ops.full([4, 8], 2.0, "float32", "cpu")
        graph = normalize(hidet.trace_from([hidet.ops.add(x, filled), hidet.ops.exp(filled)], [x]))
    operators = {"Full": "-> (R, R)", "Add": "(S0, R), (S0, R) -> (S0, R)", "Exp": "(R, R) -> (R, R)"}
    plan = plan_for(graph, DeviceMesh((2,)), [operators[node.name] for node in graph.nodes], inputs={"x0": "(S0, R)"})
    program = partition_graph(graph, plan.stages[0])
    made = [node for node in program.graph.nodes if node.name == "Full"]
    assert sorted(tuple(map(int, node.outputs[0].shape)) for node in made) == [(2, 8), (4, 8)]
    assert "ShardSlice" not in {node.name for node in program.graph.nodes}
    assert check_stage(graph, plan.stages[0], [X], [X + 2, np.full_like(X, np.exp(np.float32(2)))]) == ""


def test_outputs_that_alias_inputs_weights_or_each_other_get_separate_memory():
    x = hidet.symbol([4, 8], "float32", "cpu")
    y = hidet.ops.relu(x)
    graph = normalize(
        hidet.trace_from([x, y, hidet.ops.reshape(y, [8, 4]), constant(2, 2), hidet.ops.reshape(x, [32])], [x])
    )
    program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0])
    produced = [tensor.op.name for tensor in program.graph.outputs]
    assert produced == ["Copy", "Relu", "Copy", "Copy", "Copy"]
    for result, expected in zip(simulate(program, [X]), evaluate_graph(graph, [X]), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_a_spec_that_the_operator_cannot_run_in_is_refused():
    graph = two_layers()
    mesh = DeviceMesh((2,))
    with pytest.raises(PlanError, match="Operator 0, Matmul, cannot run as"):
        partition_graph(graph, plan_for(graph, mesh, ["(R, S0), (R, R) -> (R, R)", *MEGATRON[1:]]).stages[0])
    good = plan_for(graph, mesh, MEGATRON)
    with pytest.raises(PlanError, match=r"Operator 1, Relu, cannot run as .* 1 inputs"):
        partition_graph(graph, good.edit({"op:1": "(R, R), (R, R) -> (R, R)"}).stages[0])


@pytest.mark.parametrize(
    ("shape", "mesh", "specs", "communication"),
    [
        ((4, 6), (2,), ["(R, S0) -> (R, S0)", "(R, R) -> (R, R)"], ["all_gather"]),
        ((4, 7), (2,), ["(R, S0) -> (R, S0)", "(R, R) -> (R, R)"], ["all_gather"]),  # the last shard is padded
        ((3, 7, 2), (2, 2), ["(R, S01, R) -> (R, S01, R)", "(R, S0, R) -> (R, S0, R)"], ["all_gather"] * 2),
        ((3, 4, 6), (2,), ["(R, S0, R) -> (R, S0, R)", "(R, R, S0) -> (R, R, S0)"], ["all_to_all", "all_gather"]),
        ((4, 6), (2,), ["(S0, R) -> (S0, R)", "(R, S0) -> (R, S0)"], ["all_to_all", "all_gather"]),
        ((6, 4), (2,), ["(R, S0) -> (R, S0)", "(S0, R) -> (S0, R)"], ["all_to_all", "all_gather"]),
    ],
)
def test_collectives_on_the_cpu_place_shards_without_another_pass(shape, mesh, specs, communication):
    x = hidet.symbol(list(shape), "float32", "cpu")
    graph = normalize(hidet.trace_from(hidet.ops.exp(hidet.ops.relu(x)), [x]))
    program = partition_graph(graph, plan_for(graph, DeviceMesh(mesh), specs).stages[0])
    optimized = optimize_program(program)
    assert kinds(optimized) == kinds(program.graph) == communication
    assert not [node.name for node in optimized.nodes if "Stack" in node.name or "Join" in node.name]
    data = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    expected = np.exp(np.maximum(data, 0))
    np.testing.assert_allclose(simulate(program, [data], optimized)[0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_reduce_scatter_on_the_cpu_reads_shards_in_place(ranks):
    x = hidet.symbol([4, 12], "float32", "cpu")
    graph = normalize(hidet.trace_from(hidet.ops.matmul(x, constant(12, 6)), [x]))
    specs = ["(R, S0), (S0, R) -> (R, S0) | reduce_scatter(sum, axes=0, dim=1)"]
    plan = plan_for(graph, DeviceMesh((ranks,)), specs)
    program = partition_graph(graph, plan.stages[0])
    optimized = optimize_program(program)
    assert kinds(optimized) == ["reduce_scatter", "all_gather"]
    assert not [node.name for node in optimized.nodes if "Stack" in node.name or "Join" in node.name]
    data = np.random.default_rng(3).standard_normal((4, 12)).astype(np.float32)
    whole = evaluate_graph(graph, [data])
    assert check_stage(graph, plan.stages[0], [data], whole) == ""
    np.testing.assert_allclose(simulate(program, [data], optimized)[0], whole[0], atol=1e-5)


def test_shards_of_a_dim_that_is_split_minor_axis_first_are_placed_in_order():
    x = hidet.symbol([3, 8], "float32", "cpu")
    graph = normalize(hidet.trace_from(hidet.ops.exp(hidet.ops.relu(x)), [x]))
    plan = plan_for(graph, DeviceMesh((2, 2)), ["(R, S10) -> (R, S10)", "(R, R) -> (R, R)"])
    program = partition_graph(graph, plan.stages[0])
    data = np.random.default_rng(3).standard_normal((3, 8)).astype(np.float32)
    whole = evaluate_graph(graph, [data])
    assert check_stage(graph, plan.stages[0], [data], whole) == ""
    np.testing.assert_allclose(simulate(program, [data], optimize_program(program))[0], whole[0], atol=1e-6)


class AsOnGpus:
    """Programs as for GPUs, of kernels for the CPU."""

    device = "cpu"
    record = dataclasses.replace(TARGETS["cpu"], keeps_nan=False)


def test_on_gpus_a_kernel_reduces_the_extremes_that_ranks_exchange():
    """NCCL's maxima drop NaN. Parts of the columns are unequal: 12 and 4."""
    mesh = DeviceMesh((2,), shares=((3, 1),))
    x = hidet.symbol([8, 16], "float32", "cpu")
    least = hidet.ops.min(x, [0])
    graph = normalize(hidet.trace_from([least, hidet.ops.max(least, [0], keep_dim=True)], [x]))
    pins = {"op:0": "(S0, R) -> (S0)", "op:1": "(S0) -> (R)"}
    stage = search(graph, builtin("dgx-h100", mesh), pins=pins).plan.stages[0]
    program = partition_graph(graph, stage, target=AsOnGpus())
    assert set(program.communications()) == {
        "all_to_all(axes=0) float32[16] -> [(part_of_axis0__3_1 * 8)]",
        "all_gather(axes=0) float32[(part_of_axis0__3_1 * 4)] -> [16]",  # of the output
        "all_gather(axes=0) float32[1] -> [2, 1]",
    }
    on_gpus = partition_graph(graph, stage, target=CudaTarget(GPUS["H100-SXM5-80GB"]))
    assert on_gpus.communications() == program.communications()
    kinds = {line.partition(",")[0] for line in partition_graph(graph, stage).communications()}
    assert {"reduce_scatter(min", "all_reduce(max"} < kinds
    values = np.random.default_rng(0).integers(-9, 9, (8, 16)).astype(np.float32)
    values[1, 3] = values[7, 14] = np.nan
    columns, whole = simulate(program, [values])
    np.testing.assert_array_equal(columns, values.min(0))
    assert np.isnan(whole).all()
