"""Products of one left operand as one launch: see :mod:`hidet_dist.patterns.joint_products`.

Operators are fused first, each product with what is computed of its result. Products that read the same left operand,
and do not depend on one another, then become one operator. Its kernel has the bodies of theirs; weights lie where they
lay, so those that other operators or programs read too are no exception, and each result has the bits that it had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.fusion.fused_operator import FusedTask
from hidet.graph.ops.opaque import OpaqueOperator
from hidet.graph.ops.special import barrier
from hidet.graph.ops.utils import Task, input_like, tensor_input
from hidet.graph.tensor import symbol_like
from hidet.ir.module import IRModule
from hidet.ir.task import Target

from hidet_dist.compat.cublas_products import cublas_dtypes, is_product, product_of
from hidet_dist.compat.joint_launches import launched_in_turn
from hidet_dist.compile.joining import depths, in_parts, join
from hidet_dist.compile.states import run_before
from hidet_dist.patterns.joint_products import in_memory, kept_in_memory
from hidet_dist.rewriting import copy_operator, uses_of
from hidet_dist.spec.extents import evaluate, extents_of


class JointTask(Task):
    """The task of :class:`JointProductsOp`.

    Parameters
    ----------
    graph: FlowGraph
        The products, as a graph.
    """

    def __init__(self, graph: FlowGraph):
        self.fused_graph = graph
        number = {x: place for place, x in enumerate((*graph.inputs, *graph.outputs))}
        kinds: dict[str, int] = {}
        self.tasks: list[Task] = []
        self.calls: list[tuple[int, list[int]]] = []
        for op in graph.nodes:
            text = str(op.task)
            if text not in kinds:
                kinds[text] = len(self.tasks)
                self.tasks.append(op.task)
            self.calls.append((kinds[text], [number[x] for x in (*op.inputs, *op.outputs)]))
        digest = hashlib.sha256("\0".join([*kinds, str(self.calls)]).encode()).hexdigest()[:16]
        super().__init__(
            f"hidet_dist_joint_{digest}",
            [input_like(x, f"x{place}") for place, x in enumerate(graph.inputs)],
            [tensor_input(f"y{place}", y.dtype, list(y.shape)) for place, y in enumerate(graph.outputs)],
            attributes={"is_opaque": True},
        )

    def allow_prologue(self) -> bool:
        """No fusion: operators are fused already."""
        return False

    def allow_epilogue(self) -> bool:
        """No fusion: operators are fused already."""
        return False

    def implement(self, target: Target | str, working_dir: str) -> list[IRModule]:
        """Build a candidate of each first candidate of the products, of each second one, and so on.

        Where all products have a candidate that calls cuBLAS, their last one, the last candidate has these calls.
        """
        modules = [task.implement(target, working_dir) for task in self.tasks]
        last = [own.pop() for own in modules] if calls_cublas(self, cublas_dtypes()) else []
        rows = [list(row) for row in zip(*modules, strict=False)] + ([last] if last else [])
        joint = [launched_in_turn(row, self.calls) for row in rows]
        for module in joint:
            module.task = self
        return joint


class JointProductsOp(OpaqueOperator):
    """Several products, each with the operators that are fused with it; see :class:`JointTask`."""

    def __init__(self, inputs: Sequence[Tensor], task: JointTask):
        Operator.__init__(self, inputs=list(inputs), attributes={}, task=task)
        self.name = "Joint" + "And".join(dict.fromkeys(op.name for op in task.fused_graph.nodes))


def calls_cublas(task: Task, dtypes: Collection[str]) -> bool:
    """Whether cuBLAS is a candidate for a task, or for each of several that are one, if it is for these dtypes."""
    products = map(product_of, task.tasks if isinstance(task, JointTask) else [task])
    return all(product is not None and product.dtype in dtypes for product in products)


def apart_for_joining(graph: FlowGraph, sizes: Mapping[str, int], multiprocessors: int) -> FlowGraph:
    """Put barriers where fusion would make products of one operand wait for each other.

    ``sizes`` are those of symbolic dims. Returns ``graph`` itself if no barrier is needed.
    """

    def shape(x: Tensor) -> list[int]:
        return [evaluate(extent, sizes) for extent in extents_of(x)]

    kept = set(kept_in_memory(graph, uses_of(graph), shape, multiprocessors))
    if not kept:
        return graph
    new: dict[Tensor, Tensor] = {}
    for op in graph.nodes:
        outputs = op.outputs
        if any(x in new for x in op.inputs):
            outputs = copy_operator(op, [new.get(x, x) for x in op.inputs])
        for before, after in zip(op.outputs, outputs, strict=True):
            if before in kept:
                new[before] = barrier(after)
            elif after is not before:
                new[before] = after
    result = FlowGraph([new.get(y, y) for y in graph.outputs], graph.inputs)
    result.update_nodes()
    return result


def joint_products(graph: FlowGraph) -> FlowGraph:
    """Let products of one left operand be one operator each; return ``graph`` itself if there are none.

    The operators of ``graph`` are fused.
    """
    depth = depths(graph, run_before(graph))
    groups: dict[Hashable, list[Operator]] = {}
    for op in graph.nodes:
        left = _left_operand(op)
        if left:
            key = (*map(in_memory, left), left[0].dtype.name, depth[op])
            groups.setdefault(key, []).append(op)
    known: dict[Hashable, JointProductsOp] = {}

    def make(group: Sequence[Operator], inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        # What is renamed alike several times is one tensor.
        same: dict[Hashable, Tensor] = {}
        for op, own in zip(group, inputs, strict=True):
            for x, given_x in zip(op.inputs, own, strict=True):
                same.setdefault((in_memory(x), tuple(map(str, x.shape))), given_x)
        inputs = [[same[in_memory(x), tuple(map(str, x.shape))] for x in op.inputs] for op in group]
        given = list(dict.fromkeys(x for own in inputs for x in own))
        places = {x: place for place, x in enumerate(given)}
        key = tuple((op.task, tuple(places[x] for x in own)) for op, own in zip(group, inputs, strict=True))
        if key not in known:
            outputs = JointProductsOp(given, JointTask(_graph_of(group, inputs, given))).outputs
            known[key] = outputs[0].op
        else:
            outputs = copy_operator(known[key], given)
        left = iter(outputs)
        return [[next(left) for _ in op.outputs] for op in group]

    return join(graph, in_parts(groups.values()), depth, make)


def _graph_of(group: Sequence[Operator], inputs: Sequence[Sequence[Tensor]], given: Sequence[Tensor]) -> FlowGraph:
    """Make a graph of operators on placeholders for the tensors that they read."""
    placeholders = {x: symbol_like(x) for x in given}
    outputs = [copy_operator(op, [placeholders[x] for x in own]) for op, own in zip(group, inputs, strict=True)]
    graph = FlowGraph([y for own in outputs for y in own], list(placeholders.values()))
    graph.update_nodes()
    order: dict[Any, int] = {own[0].op: number for number, own in enumerate(outputs)}
    graph._nodes = sorted(graph.nodes, key=lambda op: order[op])
    return graph


def _left_operand(op: Operator) -> list[Tensor]:
    """List the tensors that a product's left operand is read or computed from; none for any other operator."""
    task = op.task
    if not isinstance(task, FusedTask):
        return [op.inputs[0]] if is_product(task) else []
    anchor = task.fused_graph.nodes[task.anchor]
    if not is_product(anchor.task):
        return []
    outer = dict(zip(task.fused_graph.inputs, op.inputs, strict=True))
    found: dict[Tensor, None] = {}
    waiting = [anchor.inputs[0]]
    while waiting:
        x = waiting.pop()
        if x in outer:
            found[outer[x]] = None
        elif x.op is not None:
            waiting += x.op.inputs
    return list(found)
