"""Operators that programs for GPUs compute together, by one kernel: softmax, norms and attention.

``hidet_dist.compile.cuda`` replaces the same patterns. Here they are found in the unsharded graph.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hidet.graph import Operator, Tensor
from hidet.graph.ops.transform import PermuteDimsOp

from hidet_dist.patterns.attention import Attention, attention_of
from hidet_dist.patterns.rows import rows_of
from hidet_dist.rewriting import Uses, uses_of
from hidet_dist.view import GraphView


@dataclass(frozen=True)
class GpuKernel:
    """A kernel of several operators.

    Attributes
    ----------
    operators: the numbers of its operators, in ascending order. Only the last one's output is written to memory.
    in_memory: the tensors that it reads from memory only, so that hidet cannot fuse their computation.
    rows: the tensors along whose last dim the kernel computes; this dim must not be sharded.
    """

    operators: tuple[int, ...]
    in_memory: frozenset[str]
    rows: frozenset[str]


def gpu_kernels(view: GraphView) -> list[GpuKernel]:
    """Find the kernels of several operators in a graph; no two of them have an operator in common."""
    view.graph.update_nodes()
    uses = uses_of(view.graph)
    number = {op: n for n, op in enumerate(view.operators)}
    taken: set[Operator] = set()
    kernels = []
    for find in (_attention, _rows):  # a softmax within attention is not a kernel of its own
        for op in view.operators:
            match = find(op, uses) if len(op.outputs) == 1 and op not in taken else None
            if match is None:
                continue
            members, in_memory, along = match
            if members & taken:
                continue
            taken |= members
            ends = {x for member in members for x in (*member.inputs, *member.outputs)}
            shape = view.shape(view.names[along])
            rows = {name for x in ends if view.shape(name := view.names[x]) == shape}
            if find is _attention:
                rows -= {view.names[x] for x in (*in_memory, *op.outputs)}
            operators = tuple(sorted(number[member] for member in members))
            kernels.append(GpuKernel(operators, frozenset(view.names[x] for x in in_memory), frozenset(rows)))
    return kernels


_Match = tuple[set[Operator], list[Tensor], Tensor]
"""The operators of a kernel, the tensors that it reads from memory only, and one along whose rows it computes."""


def _rows(op: Operator, uses: Uses) -> _Match | None:
    match = rows_of(op, uses)
    return None if match is None else (_behind(op, [match.x], uses), [], op.outputs[0])


def _attention(op: Operator, uses: Uses) -> _Match | None:
    match = attention_of(op, uses)
    if match is None:
        return None
    keys = match.k if match.k_axes is None else _permuted(match, uses)
    in_memory = [keys, match.v, *([match.q] if match.q_in_memory else [])]
    return _behind(op, [keys, *match.inputs], uses), in_memory, op.inputs[0]


def _permuted(match: Attention, uses: Uses) -> Tensor:
    """Return the keys in the order of dims that the kernel reads, or one as good, if the graph has it."""
    readers = [op for op in uses.get(match.k, ()) if isinstance(op, PermuteDimsOp)]
    return readers[0].outputs[0] if readers else match.k


def _behind(last: Operator, inputs: Collection[Tensor], uses: Uses) -> set[Operator]:
    """Collect the operators that compute the output of ``last`` from the kernel's inputs, without outside readers."""
    found, waiting = {last}, [last]
    while waiting:
        for x in waiting.pop().inputs:
            if x.op is not None and x not in inputs and x.op not in found:
                found.add(x.op)
                waiting.append(x.op)
    while outside := {
        op for op in found - {last} if any(user not in found for y in op.outputs for user in uses.get(y, ()))
    }:
        found -= outside
    return found
