"""The placement of buffers in a workspace, whose live intervals are all known before the program runs.

Buffers are placed one by one, each at the lowest offset where no buffer lies that was placed before and is live at the
same time. Only the order decides what the workspace takes: the greatest first, as a rule (Pisarchyk and Lee, Efficient
Memory Management for Deep Neural Net Inference, arXiv:2001.03288). From there a local search goes on to the least bytes
that are possible, or until its work is done. The order is found for given sizes of symbolic dims, and right for all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hidet_dist.compile.buffers import ActivationBuffer

_TRIES = 400  # orders tried from each start
_WORK = 200_000  # pairs of buffers looked at from each start
_UPHILL = 0.2  # fraction of the orders that are gone on from though they take more


@dataclass(frozen=True)
class Placement:
    """An order in which buffers are placed.

    Attributes
    ----------
    order: the numbers of the buffers.
    before: for each buffer, by number, those that are live at the same time, in the same memory, and placed before it.
    nbytes: the bytes of the workspaces together.
    """

    order: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]
    nbytes: int


def place_buffers(buffers: Sequence[ActivationBuffer]) -> Placement:
    """Find an order that takes a small workspace of each kind of memory; ``buffers`` are in the order of ``first``."""
    order: list[int] = []
    before: list[tuple[int, ...]] = [()] * len(buffers)
    nbytes = 0
    for memory in sorted({one.memory for one in buffers}):
        numbers = [n for n, one in enumerate(buffers) if one.memory == memory]
        workspace = _Workspace([buffers[n] for n in numbers])
        found, needed = workspace.search()
        nbytes += needed
        rank = {n: at for at, n in enumerate(found)}
        for n in found:
            before[numbers[n]] = tuple(numbers[m] for m in workspace.beside[n] if rank[m] < rank[n])
        order += [numbers[n] for n in found]
    return Placement(tuple(order), tuple(before), nbytes)


def placed_nbytes(buffers: Sequence[ActivationBuffer], placement: Placement) -> int:
    """Compute the bytes of the workspaces for the same buffers in other sizes, placed in the order that was found."""
    offsets = [0] * len(buffers)
    needed: dict[int, int] = {}
    for number in placement.order:
        one = buffers[number]
        offsets[number] = _lowest(one.nbytes, [(offsets[n], buffers[n].nbytes) for n in placement.before[number]])
        needed[one.memory] = max(needed.get(one.memory, 0), offsets[number] + one.nbytes)
    return sum(needed.values())


def _lowest(size: int, others: Sequence[tuple[int, int]]) -> int:
    """Return the lowest offset for a buffer of ``size`` bytes beside others, whose offsets and sizes are given."""
    at = 0
    if size:
        for begin, nbytes in sorted(others):
            if begin - at >= size:
                break
            at = max(at, begin + nbytes)
    return at


def live_peak(buffers: Sequence[ActivationBuffer]) -> int:
    """Compute the most bytes of buffers that are live at the same time."""
    return max(_loads(buffers), default=0)


def _loads(buffers: Sequence[ActivationBuffer]) -> list[int]:
    """Compute the bytes of live buffers by node."""
    change = [0] * (2 + max((one.last for one in buffers), default=-1))
    for one in buffers:
        change[one.first] += one.nbytes
        change[one.last + 1] -= one.nbytes
    return list(accumulate(change))


class _Workspace:
    """The buffers of one kind of memory, and for each those that are live at the same time (``beside``)."""

    def __init__(self, buffers: Sequence[ActivationBuffer]):
        self.buffers = buffers
        self.beside: list[list[int]] = [[] for _ in buffers]
        live: list[int] = []
        for number, one in enumerate(buffers):
            live = [n for n in live if buffers[n].last >= one.first]
            for n in live:
                self.beside[n].append(number)
            self.beside[number] += live
            live.append(number)

    def search(self) -> tuple[list[int], int]:
        """Find an order of a small workspace; return it with the bytes of the workspace."""
        buffers, load = self.buffers, _loads(self.buffers)
        crowd = [max(load[one.first : one.last + 1]) for one in buffers]
        numbers = range(len(buffers))
        starts = [
            list(numbers),  # as an allocator would that does not know what follows
            sorted(numbers, key=lambda n: (-buffers[n].nbytes, n)),
            sorted(numbers, key=lambda n: (-crowd[n], -buffers[n].nbytes, n)),
            sorted(numbers, key=lambda n: (-crowd[n], buffers[n].first - buffers[n].last, n)),
        ]
        best, least = starts[0], self._placed(starts[0])[0]
        for start in starts[1:]:
            if least <= max(load):
                break
            found, nbytes = self._improved(start, max(load))
            if nbytes < least:
                best, least = found, nbytes
        return best, least

    def _improved(self, order: list[int], bound: int) -> tuple[list[int], int]:
        """Place the buffer at the end of the workspace earlier, again and again; return the best order."""
        choices = random.Random(0)
        nbytes, offsets = self._placed(order)
        best, least = order, nbytes
        for _ in range(min(_TRIES, _WORK // (1 + sum(map(len, self.beside))))):
            if least <= bound:
                break
            last = next(n for n in order if offsets[n] + self.buffers[n].nbytes == nbytes)
            at = order.index(last)
            earlier = set(order[:at])
            to = order.index(choices.choice([n for n in self.beside[last] if n in earlier]))
            tried = [*order[:to], last, *order[to:at], *order[at + 1 :]]
            needed, places = self._placed(tried)
            if needed <= nbytes or choices.random() < _UPHILL:
                order, nbytes, offsets = tried, needed, places
            if nbytes < least:
                best, least = order, nbytes
        return best, least

    def _placed(self, order: Sequence[int]) -> tuple[int, list[int]]:
        """Place buffers in an order; return the bytes of the workspace, and the offset of each buffer."""
        offsets, most = [-1] * len(self.buffers), 0
        for number in order:
            size = self.buffers[number].nbytes
            at = _lowest(size, [(offsets[n], self.buffers[n].nbytes) for n in self.beside[number] if offsets[n] >= 0])
            offsets[number] = at
            most = max(most, at + size)
        return most, offsets
