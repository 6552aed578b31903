"""The buffers of an optimized graph: which tensors share one, when it is live, and its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hidet.graph import FlowGraph, Operator, Tensor

from hidet_dist.compile.blocks import BlockOp
from hidet_dist.cost.work import local_nbytes
from hidet_dist.errors import CompileError
from hidet_dist.spec.buffers import buffer_nbytes
from hidet_dist.targets import KINDS_OF_MEMORY


class Buffers:
    """The numbers of a graph's tensors; tensors that share memory have the same.

    An operator that only renames its input's memory, such as a reshape, has one tensor more than it has buffers. If one
    of the two is an input, output or weight of the graph, both are. ``start_bytes`` are those before a tensor in its
    buffer, for blocks of other tensors.
    """

    def __init__(self, graph: FlowGraph, inputs: Sequence[Tensor], weights: Sequence[Tensor]):
        fixed = [*inputs, *graph.outputs, *weights]
        self.first_local = len(fixed)
        # Of a tensor in several places the last counts.
        self.number: dict[Tensor, int] = {x: number for number, x in enumerate(fixed)}
        self.locals: list[Tensor] = []
        for node in graph.nodes:
            for y in node.outputs:
                if y not in self.number:
                    self.number[y] = self.first_local + len(self.locals)
                    self.locals.append(y)
        self._unite_aliases(graph.nodes)
        self.start_bytes: dict[Tensor, int] = {}
        for node in graph.nodes:
            for i, o in _aliases(node):
                x, y = node.inputs[i], node.outputs[o]
                if self.number[x] == self.number[y]:
                    start = self.start_bytes.get(x, 0) + (node.start_bytes if isinstance(node, BlockOp) else 0)
                    self.start_bytes[y] = start

    def is_local(self, number: int) -> bool:
        """Whether a buffer is for activations: neither an input, an output nor a weight."""
        return number >= self.first_local

    def _unite_aliases(self, nodes: Sequence[Operator]) -> None:
        shared = [(node.inputs[i], node.outputs[o]) for node in nodes for i, o in _aliases(node)]
        changed = True
        while changed:
            changed = False
            for x, y in shared:
                a, b = self.number[x], self.number[y]
                if a == b or not (self.is_local(a) or self.is_local(b)):
                    continue  # two fixed tensors stay apart
                if self.is_local(b):
                    self.number[y] = a
                else:
                    self.number[x] = b
                changed = True


def _aliases(node: Operator) -> Iterable[tuple[int, int]]:
    return ((int(i), int(o)) for i, o in node.task.share_map.items())


@dataclass(frozen=True)
class ActivationBuffer:
    """A buffer for activations.

    Attributes
    ----------
    made: the tensor whose operator needs the buffer first.
    first, last: the numbers of the first and the last node that use it.
    nbytes: its bytes at given sizes of symbolic dims, rounded up as :func:`hidet_dist.spec.buffers.buffer_nbytes` does.
    memory: the kind of memory, by its number in ``KINDS_OF_MEMORY``.
    """

    made: Tensor
    first: int
    last: int
    nbytes: int
    memory: int


def activations(
    nodes: Sequence[Operator], outputs: Sequence[Tensor], buffers: Buffers, sizes: Mapping[str, int]
) -> dict[int, ActivationBuffer]:
    """Map the numbers of the buffers for activations to the buffers, in the order in which ``nodes`` first use them.

    A buffer that no operator reads is live to the end. ``sizes`` are those of symbolic dims.

    Raises
    ------
    CompileError
        When a size is not arithmetic of symbolic dims.
    """
    made: dict[int, tuple[Tensor, int]] = {}
    last: dict[int, int] = {}
    for at, node in enumerate(nodes):
        for y in node.outputs:
            number = buffers.number[y]
            if buffers.is_local(number):
                made.setdefault(number, (y, at))
        last.update((buffers.number[x], at) for x in node.inputs)
    last.update((buffers.number[y], len(nodes)) for y in outputs)
    return {
        number: ActivationBuffer(
            y,
            first,
            last.get(number, len(nodes)),
            _aligned_nbytes(y, sizes),
            KINDS_OF_MEMORY.index(y.device.kind),
        )
        for number, (y, first) in made.items()
    }


def _aligned_nbytes(x: Tensor, sizes: Mapping[str, int]) -> int:
    try:
        nbytes = local_nbytes(x, sizes)
    except ValueError as error:
        raise CompileError(f"A tensor of the program has no size: {error}.") from error
    return buffer_nbytes(nbytes)
