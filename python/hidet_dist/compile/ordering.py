"""The order of an optimized graph's operators in which its activations take little memory.

hidet orders operators by breadth: what depends on weights alone comes first, and stays in memory until it is read. Of
some orders the best is taken. Operators are then moved in it one by one away from the peak, as long as that lowers it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
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
    graph._nodes = backwards.lowered(min(orders, key=backwards.peak))


_MOST_WORK = 1_000_000  # operators looked at by moves from peaks: some seconds at most


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

    def lowered(self, order: Sequence[Operator]) -> list[Operator]:
        """Move operators away from the moment at which most bytes are live, as long as that lowers them there."""
        number = {node: n for n, node in enumerate(self.nodes)}
        numbers = [number[node] for node in order]
        outputs = self._local(self.outputs)
        readers: list[list[int]] = [[] for _ in self.nodes]
        for n, makers in enumerate(self.makers):
            for maker in makers:
                readers[maker].append(n)
        work = 0
        while work < _MOST_WORK:
            lives = _Lifetimes(self, numbers, outputs)
            moved = self._moved(lives, readers)
            work += lives.work
            if moved is None:
                break
            numbers = moved
        return [self.nodes[n] for n in numbers]

    def _moved(self, lives: _Lifetimes, readers: Sequence[Sequence[int]]) -> list[int] | None:
        """Move one operator away from the first peak; None if no move lowers it."""
        order, at = lives.order, lives.peak_at
        if not lives.peak:
            return None
        busy = self.read[order[at]] | self.made[order[at]]
        idle = [b for b, begin in lives.first.items() if begin < at <= lives.last[b] and b not in busy]
        place = {n: position for position, n in enumerate(order)}
        for buffer in sorted(idle, key=lambda b: (-self.nbytes[b], b)):
            maker, last = lives.first[buffer], lives.last[buffer]
            until = min((place[n] for n in readers[order[maker]]), default=len(order))
            if until > at:  # it can be made later
                other = [*order[maker + 1 : until], order[maker]]
                if lives.peak_within(other, maker) < lives.peak:
                    return [*order[:maker], *other, *order[until:]]
            if last < len(order):  # it may be read for the last time earlier
                since = max((place[n] for n in self.makers[order[last]]), default=-1) + 1
                if since <= at:
                    other = [order[last], *order[since:last]]
                    if lives.peak_within(other, since) < lives.peak:
                        return [*order[:since], *other, *order[last + 1 :]]
        return None


class _Lifetimes:
    """The live intervals of local buffers in an order of operators, which are given by number.

    Attributes
    ----------
    first, last: for each buffer, the positions of the operators that first make it and that last read it; ``last`` is
        the number of operators where it is held to the end.
    peak, peak_at: the most bytes that are live during an operator, and the position of the first such operator.
    work: the operators that were looked at.
    """

    def __init__(self, graph: _Backwards, order: Sequence[int], outputs: set[int]):
        self.graph, self.order = graph, order
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for position, n in enumerate(order):
            for buffer in graph.made[n]:
                self.first.setdefault(buffer, position)
            self.last.update(dict.fromkeys(graph.read[n], position))
        self.last.update(dict.fromkeys(outputs, len(order)))
        for buffer in self.first:
            self.last.setdefault(buffer, len(order))
        change = [0] * (len(order) + 2)
        for buffer, begin in self.first.items():
            change[begin] += graph.nbytes[buffer]
            change[self.last[buffer] + 1] -= graph.nbytes[buffer]
        self.live = list(accumulate(change))[: len(order)]
        self.peak = max(self.live, default=0)
        self.peak_at = self.live.index(self.peak) if self.live else 0
        self.work = len(order)

    def peak_within(self, other: Sequence[int], begin: int) -> int:
        """Compute the most bytes that are live if ``other`` takes the place of the operators from ``begin`` on.

        They are the same operators in another order. Elsewhere nothing changes.
        """
        graph, end = self.graph, begin + len(other)
        self.work += len(other)
        left: dict[int, int] = {}
        for n in other:
            for buffer in graph.read[n] | graph.made[n]:
                left[buffer] = left.get(buffer, 0) + 1
        held = {b for b in left if self.first[b] < begin}
        live = self.live[begin - 1] if begin else 0
        if begin:
            before = self.order[begin - 1]
            live -= sum(graph.nbytes[b] for b in graph.read[before] | graph.made[before] if self.last[b] == begin - 1)
        most = 0
        for n in other:
            own = graph.read[n] | graph.made[n]
            live += sum(graph.nbytes[b] for b in own - held)
            held |= own
            most = max(most, live)
            for buffer in own:
                left[buffer] -= 1
                if not left[buffer] and self.last[buffer] < end:
                    live -= graph.nbytes[buffer]
        return most
