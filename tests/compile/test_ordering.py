"""The order in which operators run, and reshapes that take no memory of their own."""

from __future__ import annotations

import hidet
from hidet import ops
from hidet.graph import FlowGraph, Tensor

from hidet_dist.compile.launcher import Workspace
from hidet_dist.compile.ordering import order_for_memory
from hidet_dist.compile.renamings import renamings_in_place


def symbol(*shape: int | str) -> Tensor:
    return hidet.symbol(list(shape), "float32", "cpu")


def bytes_in_order(graph: FlowGraph, inputs: list[Tensor], weights: list[Tensor], **sizes: int) -> tuple[int, int]:
    """The bytes for activations in hidet's order, and in ours."""
    before = Workspace(graph, inputs, weights, sizes).nbytes
    nodes = set(graph.nodes)
    order_for_memory(graph, inputs, weights, sizes)
    assert set(graph.nodes) == nodes
    made = {*inputs, *weights}
    for node in graph.nodes:
        assert made.issuperset(node.inputs)
        made.update(node.outputs)
    return before, Workspace(graph, inputs, weights, sizes).nbytes


def test_what_depends_on_weights_alone_is_computed_when_it_is_read() -> None:
    x, weights = symbol(32), [symbol(8, 32) for _ in range(4)]
    y = x
    for w in weights:
        y = ops.relu(y + ops.sum(ops.exp(w), [0]))
    graph = hidet.trace_from(y, [x, *weights])
    of_weights = [node for node in graph.nodes if node.name == "Exp"]
    graph._nodes = [*of_weights, *(node for node in graph.nodes if node not in of_weights)]  # as hidet orders them
    before, after = bytes_in_order(graph, [x], weights)
    assert after <= 1024 + 4 * 128 < 4 * 1024 <= before


def test_what_waits_while_most_is_live_is_made_later() -> None:
    """Two weights are read one after the other; what is made of the second is not there while the first takes most."""
    x, w = symbol(4, 32), symbol(64, 32)
    large = ops.concat([ops.concat([x] * 8, 0)] * 8, 0)
    late = ops.transpose(w)
    graph = hidet.trace_from(ops.matmul(ops.sum(large, [0], keep_dim=True), late), [x, w])
    before = list(graph.nodes)
    at = next(n for n, node in enumerate(before) if node.outputs[0] is late)
    graph._nodes = [before[at], *before[:at], *before[at + 1 :]]
    most, least = bytes_in_order(graph, [x], [w])
    assert most - least >= 64 * 32 * 4


def test_an_order_is_found_for_the_planned_sizes_of_symbolic_dims() -> None:
    x, w = symbol("rows", 32), symbol(8, 32)
    y = ops.relu(ops.exp(ops.relu(x)))
    graph = hidet.trace_from(y + ops.sum(ops.exp(w), [0]), [x, w])
    before, after = bytes_in_order(graph, [x], [w], rows=4)
    assert after <= before


def test_reshapes_that_are_fused_share_the_memory_of_their_input() -> None:
    x = symbol(4, 8)
    y = ops.reshape(ops.reshape(x, [2, 2, 8]), [2, 16])
    with hidet.option.context():
        graph = hidet.graph.optimize(hidet.trace_from(y, [x]))
    (node,) = renamings_in_place(graph).nodes
    assert node.share_map == {0: 0}
    assert [int(n) for n in node.outputs[0].shape] == [2, 16]
