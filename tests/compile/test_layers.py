"""Equal layers are optimized once: they share tasks and kernels, and each computes on its own tensors."""

from __future__ import annotations

import pickle

import hidet
import numpy as np
from hidet import ops
from hidet.graph.transforms import fuse_operator

from hidet_dist.compat.definitions import bound_in, renamed_task
from hidet_dist.compat.passes import layered_passes
from hidet_dist.compat.shared_tasks import shared_tasks
from hidet_dist.compile import optimize_program
from hidet_dist.compile.blocks import BlockOp
from hidet_dist.compile.cpu.kernels.operators import KernelOp
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import Program, partition_graph
from hidet_dist.rewriting import copy_operator
from hidet_dist.search import search
from hidet_dist.simulate import simulate
from hidet_dist.spec import DeviceMesh

RNG = np.random.default_rng(0)
HIDDEN, TOKENS = 8, 4


def numbers(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def symbol(*shape):
    return hidet.symbol(list(shape), "float32", "cpu")


def program(layers: int) -> tuple[Program, np.ndarray, list[np.ndarray]]:
    """Layers with a cache each, which is a block of one input; and what they compute."""
    x, caches = symbol(TOKENS, HIDDEN), symbol(layers, TOKENS, HIDDEN)
    given, cached = numbers(TOKENS, HIDDEN), numbers(layers, TOKENS, HIDDEN)
    y, expected = x, given
    for layer in range(layers):
        weight = numbers(HIDDEN, HIDDEN)
        y = ops.exp(ops.relu(y @ hidet.asarray(weight)) * -1.0) + ops.exp(ops.squeeze(caches[layer : layer + 1], [0]))
        expected = np.exp(-np.maximum(expected @ weight, 0)) + np.exp(cached[layer])
    graph = normalize(hidet.trace_from(y, [x, caches]))
    plan = search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0]
    return partition_graph(graph, plan), expected, [given, cached]


def test_more_layers_have_no_more_tasks_and_compute_what_they_should():
    few, many = (optimize_program(program(layers)[0]) for layers in (3, 6))
    assert len(many.nodes) >= len(few.nodes) + 3
    assert len({str(node.task) for node in many.nodes}) == len({str(node.task) for node in few.nodes})
    (shared,) = {node.task for node in many.nodes if isinstance(node, KernelOp)}
    assert sum(node.task is shared for node in many.nodes) == 6
    made, expected, given = program(3)
    optimized = optimize_program(made)
    assert [node.start_bytes for node in optimized.nodes if isinstance(node, BlockOp)] == [0, 128, 256]
    np.testing.assert_allclose(simulate(made, given, optimized)[0], expected, rtol=2e-5)


def test_hidet_still_builds_the_task_of_a_copied_operator_anew():
    op, other = ops.relu(symbol(2, 3)).op, symbol(2, 3)
    assert op.reforward([other])[0].op.task is not op.task, "hidet shares tasks now: drop shared_tasks.py"
    with shared_tasks():
        (same,) = op.reforward([other])
        (wider,) = op.reforward([symbol(2, 4)])
        slices = ops.strided_slice(symbol(4, 3), [0], [2], axes=[0], strides=[1]).op
        (changed,) = slices.reforward([symbol(4, 3)], {"ends": [3]})
    assert same.op.task is op.task and same.op.inputs == [other] and same.op is not op
    assert wider.op.task is not op.task and wider.shape == (2, 4)
    assert changed.shape == (3, 3)


def test_hidet_still_derives_the_definition_of_each_of_equal_groups():
    x, other = symbol(4, 4), symbol(4, 4)
    first = ops.sum(ops.relu(x), 1)
    (second,) = copy_operator(first.op, copy_operator(first.op.inputs[0].op, [other]))
    graph = hidet.trace_from([first, second], [x, other])

    def tasks():
        return {node.task for node in fuse_operator.fuse_operator_pass()(graph).nodes}

    assert len(tasks()) == 2, "hidet fuses equal groups once now: drop it from passes.py"
    with layered_passes():
        assert len(tasks()) == 1


def test_a_renamed_task_has_axes_and_parameters_of_its_own():
    task = ops.softmax(symbol(4, 4), 1).op.task
    copied = renamed_task(task)
    assert str(copied) == str(task)
    assert bound_in([*copied.inputs, *copied.outputs]).isdisjoint(bound_in([*task.inputs, *task.outputs]))


def test_a_copy_of_an_operator_that_has_run_can_be_sent_to_other_processes():
    x = hidet.symbol([4, 8], "float32", "cpu")
    op = ops.exp(x).op
    assert op.compiled_task  # builds and loads the kernel
    (y,) = copy_operator(op, op.inputs)
    assert pickle.loads(pickle.dumps(y.op)).task.name == op.task.name
