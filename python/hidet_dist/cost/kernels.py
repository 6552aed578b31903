"""Operators that programs compute together, by one kernel: attention, and on GPUs softmax and norms.

``hidet_dist.compile`` replaces the same patterns. Here they are found in the unsharded graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from hidet.graph import Operator, Tensor
from hidet.graph.ops.transform import PermuteDimsOp

from hidet_dist.machine import GPU, LIBRARY
from hidet_dist.machine.kernels import ATTENTION
from hidet_dist.patterns.attention import Attention, attention_of, has_cpu_kernel
from hidet_dist.patterns.rows import rows_of
from hidet_dist.rewriting import Uses, uses_of
from hidet_dist.view import GraphView


@dataclass(frozen=True)
class KernelOfSeveral:
    """A kernel of several operators.

    Attributes
    ----------
    operators: the numbers of its operators, in ascending order. Only the last one's output is written to memory.
    in_memory: the tensors that it reads from memory only, so that hidet cannot fuse their computation.
    rows: the tensors along whose last dim the kernel computes; this dim must not be sharded.
    work: the class of kernels whose measured costs its operators have; None for those of the operators by themselves.
    fuses_epilogue: whether hidet can fuse the readers of its output into it.
    """

    operators: tuple[int, ...]
    in_memory: frozenset[str]
    rows: frozenset[str]
    work: str | None
    fuses_epilogue: bool


def kernels_of_several(view: GraphView, fusion: str) -> list[KernelOfSeveral]:
    """Find the kernels of several operators in a graph; no two of them have an operator in common.

    ``fusion`` is one of :data:`hidet_dist.machine.FUSIONS`.
    """
    if fusion not in _FINDERS:
        return []
    view.graph.update_nodes()
    uses = uses_of(view.graph)
    number = {op: n for n, op in enumerate(view.operators)}
    taken: set[Operator] = set()
    kernels = []
    for find in _FINDERS[fusion]:
        for op in view.operators:
            match = find(op, uses) if len(op.outputs) == 1 and op not in taken else None
            if match is None or match.members & taken:
                continue
            members = match.members
            taken |= members
            ends = {x for member in members for x in (*member.inputs, *member.outputs)}
            shape = view.shape_of(match.along)
            rows = {name for x in ends - match.across if view.shape(name := view.names[x]) == shape}
            operators = tuple(sorted(number[member] for member in members))
            names = frozenset(view.names[x] for x in match.in_memory)
            kernels.append(KernelOfSeveral(operators, names, frozenset(rows), match.work, match.fuses_epilogue))
    return kernels


@dataclass(frozen=True)
class _Match:
    """The operators of a kernel; see :class:`KernelOfSeveral`.

    ``along`` is one of the tensors along whose rows it computes, and those of its shape are others, but for ``across``.
    """

    members: set[Operator]
    along: Tensor
    across: frozenset[Tensor] = frozenset()
    in_memory: Sequence[Tensor] = ()
    work: str | None = None
    fuses_epilogue: bool = True


def _rows(op: Operator, uses: Uses) -> _Match | None:
    match = rows_of(op, uses)
    return None if match is None else _Match(_behind(op, [match.x], uses), op.outputs[0])


def _attention(op: Operator, uses: Uses) -> _Match | None:
    match = attention_of(op, uses)
    if match is None:
        return None
    keys = match.k if match.k_axes is None else _permuted(match, uses)
    in_memory = [keys, match.v, *([match.q] if match.q_in_memory else [])]
    across = frozenset([*in_memory, *op.outputs])
    return _Match(_behind(op, [keys, *match.inputs], uses), op.inputs[0], across, in_memory)


def _cpu_attention(op: Operator, uses: Uses) -> _Match | None:
    """Match attention on CPUs. Its kernel reads queries, keys, values and a bias through the views before them."""
    match = attention_of(op, uses)
    if match is None or not has_cpu_kernel(match):
        return None
    across = frozenset([match.q, match.k, match.v, *op.outputs])
    members = _behind(op, match.inputs, uses)
    return _Match(members, op.inputs[0], across, work=ATTENTION, fuses_epilogue=False)


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


_FINDERS: dict[str, tuple[Callable[[Operator, Uses], _Match | None], ...]] = {
    LIBRARY: (_cpu_attention,),
    GPU: (_attention, _rows),  # a softmax within attention is not a kernel of its own
}
