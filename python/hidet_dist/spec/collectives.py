"""The table of kinds of collectives, from which every layer derives their effects, costs and functions.

A kind has four properties. It may *join* the shards of a group's ranks along a dim that mesh axes split. It may *split*
a dim between them. It may *reduce* their partial results. And it *communicates*, or is local. Everything that depends
on the kind follows from these:

=========================  ============================================================  ===============================
subject                    derivation                                                    place
=========================  ============================================================  ===============================
its fields as a step       a dim where it joins or splits, two where it does both        ``Step``
a tensor's layout after    the dim it joins loses mesh axes, the dim it splits gets them ``Step.after``
bytes and seconds          the whole tensor goes around a ring, ``ring_passes`` times    ``Cluster.collective_seconds``
local shapes, copies       if it splits, blocks are cut before it; if it joins, joined   ``CommunicationOp``, ``Step``
                           after it
simulation                 ``Collective.result``                                         ``simulate``, ``soundness``
the C functions            ``Collective.symbol`` and ``arguments``                       ``CommunicationOp``
transports' functions      one function of the kind's name in each transport             ``runtime.transports``, C++
=========================  ============================================================  ===============================

A new kind therefore needs an entry here, a function in ``collectives.h`` with its row in ``native``, an entry in the
list of ``transport.hpp``, and a function in each transport. ``tests/spec/test_collectives.py`` checks that no layer
lacks a kind.

Exchanges of the rows that ranks want, whose counts are known when they run, are no kinds of this table:
``partitioning.row_exchange`` has their operators.

A kind that these properties do not distinguish from the others, such as one with a root, needs a new field of
``Collective``, and code for it in ``CommunicationOp`` and ``native.run``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class Collective:
    """One kind of collective.

    Attributes
    ----------
    name: str
        Its name in plans, and in C without the prefix.
    joins: bool
        Whether it joins the shards of a group's ranks along a dim.
    splits: bool
        Whether it splits a dim between the ranks of a group.
    reduces: bool
        Whether it reduces partial results.
    ring_passes: int
        The number of times the tensor goes around the ring of the group's ranks; 0 for a local kind.
    """

    name: str
    joins: bool = False
    splits: bool = False
    reduces: bool = False
    ring_passes: int = 1

    @property
    def communicates(self) -> bool:
        """True if it communicates; a local kind only cuts a tensor that every rank holds."""
        return self.ring_passes > 0

    @property
    def has_dim(self) -> bool:
        """True if it joins or splits a dim."""
        return self.joins or self.splits

    @property
    def moves(self) -> bool:
        """True if it moves mesh axes from the dim it joins to the dim it splits."""
        return self.joins and self.splits

    @property
    def exchange(self) -> Collective:
        """The kind by which a rank receives, side by side, the parts that it would get reduced by this one."""
        (kind,) = (kind for kind in COLLECTIVES.values() if kind.joins and kind.splits == self.splits)
        return kind

    @property
    def sends_blocks(self) -> bool:
        """True if a rank sends a block to each rank of the group."""
        return self.communicates and self.splits

    @property
    def receives_blocks(self) -> bool:
        """True if a rank receives a block from each rank of the group."""
        return self.communicates and self.joins

    def whole(self, sent: int, ranks: int) -> int:
        """Return the size of the whole tensor within a group of ``ranks``, given the size that one rank sends."""
        return sent * ranks if self.joins else sent

    def sent(self, whole: int, ranks: int) -> int:
        """Return the size that one rank sends, given the size of the ``whole`` tensor within a group of ``ranks``."""
        return whole // ranks if self.joins else whole

    def received(self, whole: int, ranks: int) -> int:
        """Return the size that one rank receives, given the size of the ``whole`` tensor in a group of ``ranks``."""
        return whole // ranks if self.splits else whole

    def block(self, whole: int, ranks: int) -> int:
        """Return the size argument of its C function: a block's size if there are blocks, else a rank's sent size."""
        sent = self.sent(whole, ranks)
        return sent // ranks if self.splits else sent

    def ring_nbytes(self, nbytes: int, ranks: int) -> float:
        """Return the bytes that go around the ring in one pass, for a tensor of ``nbytes`` within the group.

        If shards move from one dim to another, a rank sends 1/n of its shard to each other rank.
        """
        return nbytes / ranks if self.moves else nbytes

    def even_nbytes(self, nbytes: int, split: Sequence[int], joined: Sequence[int]) -> int:
        """Return the bytes of a tensor in equal parts that keeps its ranks as busy as these parts keep the busiest.

        ``nbytes`` are those of the tensor within the group. ``split`` and ``joined`` are the sizes of the ranks' parts
        of the dims that it splits and joins; they are empty where it does not. A rank receives what others have of what
        will be its part, and sends what it has of theirs.
        """
        factor, divisor = _busyness(self.moves, tuple(split), tuple(joined))
        return -(-nbytes * factor // divisor)

    def result(
        self,
        parts: Sequence[_T],
        group_rank: int,
        reduce: Callable[[Sequence[_T]], _T],
        cut: Callable[[_T], Sequence[_T]],
        join: Callable[[Sequence[_T]], _T],
    ) -> _T:
        """Compute the tensor that one rank of a group receives, by the definition of the kind.

        Parameters
        ----------
        parts: sequence
            The tensors that the ranks of the group send, by group rank.
        group_rank: int
            The group rank of the receiver.
        reduce, cut, join: Callable
            Reduce tensors to one; cut a tensor into the blocks of the ranks; join the blocks of the ranks.
        """
        if self.joins:
            return join([cut(part)[group_rank] for part in parts] if self.splits else parts)
        whole = reduce(parts) if self.reduces else parts[group_rank]
        return cut(whole)[group_rank] if self.splits else whole

    def symbol(self, form: str = "") -> str:
        """Return the name of its function in ``collectives.h``.

        There are others for strided ``blocks`` of a tensor, and for ``parts`` of unequal size.
        """
        return f"hidet_dist_{self.name}" + (f"_{form}" if form else "")

    def arguments(self, send: str, recv: str, sent: str, received: str) -> list[str]:
        """List the first arguments of its C function for blocks, from expressions for the buffers and their blocks."""
        if self.moves:
            return [send, sent, recv, received]
        return [send, recv, sent if self.splits else received]


@functools.lru_cache(maxsize=2**12)
def _busyness(moves: bool, split: tuple[int, ...], joined: tuple[int, ...]) -> tuple[int, int]:
    """The ratio of :meth:`Collective.even_nbytes` to the bytes of the tensor, as a fraction."""
    ranks = len(split or joined)
    splits, joins = ([Fraction(size, sum(sizes)) for size in sizes] for sizes in (split, joined))
    if moves:
        busiest = max(max(a * (1 - b), b * (1 - a)) for a, b in zip(splits, joins, strict=True))
        return (busiest * ranks**2 / (ranks - 1)).as_integer_ratio()
    return ((1 - min(splits or joins)) * ranks / (ranks - 1)).as_integer_ratio()


SLICE = Collective("slice", splits=True, ring_passes=0)
ALL_GATHER = Collective("all_gather", joins=True)
ALL_TO_ALL = Collective("all_to_all", joins=True, splits=True)
REDUCE_SCATTER = Collective("reduce_scatter", splits=True, reduces=True)
ALL_REDUCE = Collective("all_reduce", reduces=True, ring_passes=2)

COLLECTIVES: dict[str, Collective] = {
    kind.name: kind for kind in (SLICE, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, ALL_REDUCE)
}
"""The kinds by name. A slice is the local kind, the inverse of an all-gather."""

REDUCED_DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int32", "int64", "uint8", "bool")
"""The dtypes that collectives reduce. Tensors of other dtypes are moved as bytes."""

EXTREMES = ("max", "min")
"""The reductions in which NaN counts, as the result, that a transport of devices may drop: NCCL's take numbers only."""

COMMUNICATING = tuple(kind.name for kind in COLLECTIVES.values() if kind.communicates)
"""The names of the kinds that communicate."""

REDUCING = tuple(kind.name for kind in COLLECTIVES.values() if kind.reduces)
"""The names of the kinds that reduce partial results."""

REDUCING_WHOLE, SCATTERING = (
    tuple(kind for kind in REDUCING if COLLECTIVES[kind].splits is splits) for splits in (False, True)
)
"""Those of them after which each rank has the whole result, and those after which it has a block of it."""
