"""The layouts of tensors of images, channels second or last, in which the fewest bytes change theirs."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import highspy
from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.transform import PermuteDimsOp

from hidet_dist.compile.cpu.relaid import channels_last_axes, channels_second_axes, is_defined
from hidet_dist.errors import CompileError
from hidet_dist.highs import RIGHT_PRESOLVE, new_model
from hidet_dist.partitioning.operators import CommunicationOp
from hidet_dist.rewriting import Uses, uses_of
from hidet_dist.spec.extents import Extent, extents_of
from hidet_dist.traits import Moves, traits_of

_IN_KERNEL = 0.01  # of a change of layout: what it saves to run an element-wise operator with the channels last


@dataclass(frozen=True)
class Layouts:
    """How an operator reads and writes tensors of images: with the channels last, or second."""

    reads: bool
    writes: bool


SECOND, LAST = Layouts(False, False), Layouts(True, True)
TO_LAST, TO_SECOND = Layouts(False, True), Layouts(True, False)


def _choices(op: Operator, rank: int) -> tuple[Layouts, ...]:
    """List the ways in which an operator can run without moving more elements than it has to."""
    (y, *others) = op.outputs
    if others or op.build_target != "cpu":
        return (SECOND,)
    if isinstance(op, PermuteDimsOp) and len(y.shape) == rank:
        axes, found = [int(axis) for axis in op.attrs["axes"]], [SECOND]
        if axes == channels_last_axes(rank):
            found.append(TO_SECOND)  # the result has the order of the input with channels last
        if axes == channels_second_axes(rank):
            found.append(TO_LAST)
        return tuple(found[1:] or found)
    if isinstance(op, CommunicationOp):
        plain = not (op.collective.sends_blocks or op.collective.receives_blocks) and not op.only_starts
        return (SECOND, LAST) if plain and len(y.shape) == rank else (SECOND,)
    if not is_defined(op):
        return (SECOND,)
    traits = traits_of(op)
    if traits.in_any_layout and len(op.inputs[0].shape) == rank:
        return SECOND, LAST
    moves = traits.moves in (Moves.SLICE, Moves.SPREAD, Moves.SELECT)
    return (SECOND, LAST) if len(y.shape) == rank and (traits.elementwise or moves) else (SECOND,)


def choose_layouts(graph: FlowGraph, convolutions: Collection[Operator]) -> dict[Operator, Layouts]:
    """Choose the layouts in which operators run so that the fewest bytes change theirs.

    Convolutions read and write with the channels last. The others are chosen at once, by an integer program: each
    operator has a variable if it has two choices, and each tensor one that is 1 if a reader reads it in another layout
    than it is written in. Where it is equal, the layout changes behind the element-wise operators that follow a
    convolution, which become part of its kernel then.
    """
    uses = uses_of(graph)
    ranks = _ranks(graph, convolutions, uses)
    choices = {
        node: (LAST,) if node in convolutions else _choices(node, ranks[node]) if node in ranks else (SECOND,)
        for node in graph.nodes
    }
    open_nodes = [node for node in graph.nodes if len(choices[node]) > 1]
    columns = {node: number for number, node in enumerate(open_nodes)}
    if not open_nodes:
        return {node: only for node, (only,) in choices.items()}
    model = new_model(threads=1, mip_rel_gap=0.0, presolve_rule_off=RIGHT_PRESOLVE)
    for number, node in enumerate(open_nodes):
        saved = _IN_KERNEL * _size(node.outputs[0]) if traits_of(node).elementwise else 0.0
        model.addCol(-saved, 0.0, 1.0, 0, [], [])
        model.changeColIntegrality(number, highspy.HighsVarType.kInteger)

    def layout(node: Operator | None, reads: bool) -> tuple[float, dict[int, float]]:
        """Express whether an operator reads, or writes, with the channels last, in the variables of operators."""
        if node is None:  # an input of the graph, or an output of it
            return 0.0, {}
        values = [float(each.reads if reads else each.writes) for each in choices[node]]
        return values[0], {columns[node]: values[1] - values[0]} if node in columns else {}

    for x in dict.fromkeys(x for node in graph.nodes for x in (*node.inputs, *node.outputs)):
        if len(x.shape) < 3:
            continue
        written, terms = layout(x.op, reads=False)
        changed = model.getNumCol()
        model.addCol(float(_size(x)), 0.0, 1.0, 0, [], [])
        for user in dict.fromkeys(uses.get(x, ())):
            read, others = layout(user, reads=True)
            difference = {column: terms.get(column, 0.0) - others.get(column, 0.0) for column in {**terms, **others}}
            for sign in (1.0, -1.0):
                row = {changed: 1.0} | {column: -sign * factor for column, factor in difference.items()}
                model.addRow(sign * (written - read), highspy.kHighsInf, len(row), list(row), list(row.values()))
    model.run()
    if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        status = model.modelStatusToString(model.getModelStatus())
        raise CompileError(f"No layouts were found for a graph with convolutions: the solver says '{status}'.")
    solution = model.getSolution().col_value
    return {node: choices[node][round(solution[columns[node]]) if node in columns else 0] for node in graph.nodes}


def _ranks(graph: FlowGraph, convolutions: Collection[Operator], uses: Uses) -> dict[Operator, int]:
    """Map the operators that may follow the layout of convolutions to the rank of these."""
    ranks: dict[Operator, int] = {}
    pending = [(node, len(node.outputs[0].shape)) for node in graph.nodes if node in convolutions]
    while pending:
        node, rank = pending.pop()
        if node in ranks:
            continue
        ranks[node] = rank
        if node not in convolutions and _choices(node, rank) == (SECOND,):
            continue
        images = [x for x in (*node.inputs, *node.outputs) if len(x.shape) == rank]
        for x in images:
            near = [x.op] if x.op is not None else []
            pending += [(op, rank) for op in (*near, *uses.get(x, ())) if op is not None and op not in ranks]
    return ranks


def _size(x: Tensor) -> int:
    """Count the bytes of a tensor of three dims and more that changes its layout. Symbols count as 1.

    Where the elements stay in order, it is 1: nothing moves, but a reshape keeps operators around it from being fused.
    """
    if keeps_order(x):
        return 1
    return int(x.dtype.nbytes) * math.prod(extent if isinstance(extent, int) else 1 for extent in extents_of(x))


def keeps_order(x: Tensor) -> bool:
    """Whether the elements of a tensor lie in the same order with the channels second and last."""
    _, channels, *inner = extents_of(x)
    return _is_one(channels) or all(map(_is_one, inner))


def _is_one(extent: Extent) -> bool:
    return isinstance(extent, int) and extent == 1
