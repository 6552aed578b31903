"""The order of an optimized graph's operators in which its activations take little memory.

hidet orders operators by breadth: what depends on weights alone comes first, and stays in memory until it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from hidet.graph import FlowGraph, Operator, Tensor

from hidet_dist.compile.buffers import Buffers, activations
from hidet_dist.compile.placement import live_peak
from hidet_dist.errors import CompileError


def order_for_memory(
    graph: FlowGraph,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    sizes: Mapping[str, int],
    earlier: Mapping[Operator, Sequence[Operator]] = MappingProxyType({}),
) -> None:
    """Put the operators of a graph into the order of least peak memory among some, in place.

    The graph must not be analysed anew, which would lose the order. ``inputs`` and ``weights`` are the tensors that are
    in memory anyway, ``sizes`` those of symbolic dims. ``earlier`` has, for some operators, those that must run before
    them although they make nothing that these read.

    Raises
    ------
    CompileError
        When there is no such order.
    """
    nodes = list(graph.nodes)
    backwards = _Backwards(graph, Buffers(graph, inputs, weights), sizes, earlier)
    orders = [
        nodes,
        backwards.order(lambda change, at: (min(0, change), -at)),  # as they are, but no sooner than needed
        backwards.order(lambda change, at: (change, -at)),
    ]
    if len(orders[-1]) < len(nodes):
        late = next(one for one in earlier if one not in set(orders[-1]))
        raise CompileError(
            f"{late.name} writes into memory that {', '.join(one.name for one in earlier[late])} must read before, and "
            "one of these depends on its result."
        )
    place = {node: number for number, node in enumerate(nodes)}
    if any(place[one] > place[node] for node, ones in earlier.items() for one in ones):
        del orders[0]
    graph._nodes = min(orders, key=backwards.peak)


class _Backwards:
    """Orders of a graph's operators that are chosen from the last to the first."""

    def __init__(
        self,
        graph: FlowGraph,
        buffers: Buffers,
        sizes: Mapping[str, int],
        earlier: Mapping[Operator, Sequence[Operator]],
    ):
        self.nodes = list(graph.nodes)
        self.outputs = graph.outputs
        self.buffers, self.sizes = buffers, sizes
        self.nbytes = {
            number: one.nbytes for number, one in activations(self.nodes, self.outputs, buffers, sizes).items()
        }
        maker = {y: number for number, node in enumerate(self.nodes) for y in node.outputs}
        self.makers = [list(dict.fromkeys(maker[x] for x in node.inputs if x in maker)) for node in self.nodes]
        number = {node: at for at, node in enumerate(self.nodes)} if earlier else {}
        for node, ones in earlier.items():
            makers = self.makers[number[node]]
            makers += [number[one] for one in ones if number[one] not in makers]
        self.read = [self._local(node.inputs) for node in self.nodes]
        self.made = [self._local(node.outputs) for node in self.nodes]

    def _local(self, tensors: Sequence[Tensor]) -> set[int]:
        return {number for x in tensors if self.buffers.is_local(number := self.buffers.number[x])}

    def peak(self, order: Sequence[Operator]) -> int:
        """Compute the most bytes of activations that are live at the same time."""
        return live_peak(list(activations(order, self.outputs, self.buffers, self.sizes).values()))

    def order(self, rank: Callable[[int, int], tuple[int, int]]) -> list[Operator]:
        """Choose operators, the last first: the one of least rank among those whose readers are all chosen.

        ``rank`` takes the change in live bytes from after the operator to before it, and the operator's number.
        """
        readers = [0] * len(self.nodes)
        for makers in self.makers:
            for number in makers:
                readers[number] += 1
        ready = [number for number, count in enumerate(readers) if not count]
        live = self._local(self.outputs)
        chosen = []

        def rank_of(number: int) -> tuple[int, int]:
            read, made = self.read[number], self.made[number]
            grows = sum(self.nbytes[buffer] for buffer in read - live)
            return rank(grows - sum(self.nbytes[buffer] for buffer in made - read), number)

        while ready:
            number = min(ready, key=rank_of)
            ready.remove(number)
            chosen.append(self.nodes[number])
            live = (live - self.made[number]) | self.read[number]
            for maker in self.makers[number]:
                readers[maker] -= 1
                if not readers[maker]:
                    ready.append(maker)
        return chosen[::-1]
