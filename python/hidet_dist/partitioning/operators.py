"""The operators that a partition adds to a graph: collectives, and operators that cut and join shards around them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hidet.graph import Operator, Tensor
from hidet.graph.ops.utils import Task, compute, input_like
from hidet.ir.expr import if_then_else, is_constant

from hidet_dist import native
from hidet_dist.compat.native_call import NativeCall, NativeCallOp
from hidet_dist.partitioning.collective_op import CollectiveOp, Reduce, product_of
from hidet_dist.partitioning.once import MadeOnce
from hidet_dist.spec.collectives import COLLECTIVES, REDUCED_DTYPES
from hidet_dist.spec.extents import Extent, extents_of
from hidet_dist.traits import Moves, has_traits

Placement = tuple[int, Extent]
"""A dim along which the ranks' blocks are contiguous to each other, and an extent along it."""


@dataclass(frozen=True)
class GroupParts:
    """The parts of unequal size that the ranks of a group send and receive, one after the other in group order.

    Attributes
    ----------
    split, joined: the sizes of the ranks' parts of the dims that are split and joined, in units; empty for a collective
        that does not split or join.
    unit: the elements of one unit of both.
    count: the elements that this rank receives.
    """

    split: tuple[int, ...]
    joined: tuple[int, ...]
    unit: Extent
    count: Extent

    def cut(self, x: np.ndarray) -> Sequence[np.ndarray]:
        """Cut what a rank sends into the part of each rank."""
        unit, ends = x.size // sum(self.split), itertools.accumulate(self.split)
        return np.split(x.reshape(-1), [unit * end for end in ends][:-1])

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Join the parts that a rank receives."""
        return np.concatenate([part.reshape(-1) for part in parts])


class CommunicationOp(CollectiveOp):
    """A collective over the ranks that differ only along ``mesh_axes``.

    Parameters
    ----------
    x: Tensor
        The local tensor. If blocks are sent, its first dim has one entry per rank of the group.
    kind: str
        The name of a collective that communicates. One that joins blocks, such as an all-gather, adds a first dim with
        one entry per rank; one that cuts blocks, such as a reduce-scatter, removes it; an all-to-all does both.
    mesh_axes: sequence of int
        The mesh axes that the group spans.
    group_size: int
        The number of ranks in the group.
    reduce_op: str
        ``sum``, ``max``, ``min``, ``product`` or ``mean``; empty for a collective that does not reduce.
    only_starts: bool
        Whether the collective is only started; a :class:`WaitOp` precedes its first reader.
    sent: (int, int or expression), optional
        For a reduce-scatter or all-to-all: the ranks' blocks are parts of ``x`` along this dim, each of this extent,
        and there is no first dim for them. In host memory only, as is ``received``.
    received: (int, int or expression), optional
        For an all-gather or all-to-all: the ranks' blocks are joined along this dim of the output, up to this extent,
        and there is no first dim for them.
    parts: GroupParts, optional
        The parts of the ranks, where their sizes are unequal: ``x`` has those that are sent one after the other, and
        the output, of one dim, those that are received.

    Raises
    ------
    ValueError
        When the dim that a reduce-scatter or all-to-all divides among the ranks does not fit the group size.
    """

    can_start = True

    def __init__(
        self,
        x: Tensor,
        kind: str,
        mesh_axes: Sequence[int],
        group_size: int,
        reduce_op: str = "",
        only_starts: bool = False,
        sent: Placement | None = None,
        received: Placement | None = None,
        parts: GroupParts | None = None,
    ):
        self.kind = kind
        self.collective = collective = COLLECTIVES[kind]
        self.only_starts = only_starts
        self.mesh_axes = tuple(mesh_axes)
        self.group_size = group_size
        self.reduce_op = reduce_op
        self.sent = sent
        self.received = received
        self.parts = parts
        shape = block = list(extents_of(x))
        if parts is not None:
            shape = [parts.count]
        else:
            if collective.sends_blocks:
                shape = block = _block(kind, shape, group_size, sent)
            if collective.receives_blocks:
                shape = [group_size, *block] if received is None else _with_extent(block, *received)
        moves_bytes = not reduce_op and x.dtype.name not in REDUCED_DTYPES
        codes = [native.dtype_code("uint8" if moves_bytes else x.dtype.name)]
        unit = [int(x.dtype.nbytes)] if moves_bytes else []  # what an element has of what is counted below
        if reduce_op:
            codes.append(native.reduce_op_code(reduce_op))
        group = native.group_code(self.mesh_axes)
        memory = ("send", "recv") if only_starts else ("{}", "{}")
        declared, arguments, values, form = self._arguments(memory, extents_of(x), block, unit)
        function = collective.symbol(form)
        statement = f"{declared}{function}({', '.join([*arguments, *map(str, codes), str(group)])});"
        if only_starts:
            statement = (
                "const void *send = {}; void *recv = {}; hidet_dist_start(recv); "
                f"{statement} hidet_dist_started(recv);"
            )
        words = [
            "start" if only_starts else "",
            kind,
            reduce_op,
            f"from{sent[0]}" if sent else "",
            f"to{received[0]}" if received else "",
            *(() if parts is None else (f"split{_word(parts.split)}", f"joined{_word(parts.joined)}")),
            f"axes{group}",
            f"of{group_size}",
            f"abi{native.ABI_VERSION}",
        ]
        super().__init__(
            "_".join(["hidet_dist", *filter(None, words)]),
            {"x": x},
            shape,
            NativeCall.of_library(statement, ("hidet_dist/collectives.h", "hidet_dist/overlap.h"), values),
            {
                "kind": kind,
                "mesh_axes": list(self.mesh_axes),
                "group_size": group_size,
                "reduce_op": reduce_op,
                "only_starts": only_starts,
                "sent": sent,
                "received": received,
                "parts": parts,
            },
        )
        self.name = ("Start" if only_starts else "") + "".join(word.capitalize() for word in kind.split("_"))

    def _arguments(
        self, memory: tuple[str, str], extents: Sequence[Extent], block: Sequence[Extent], unit: Sequence[int]
    ) -> tuple[str, list[str], dict[str, Extent], str]:
        """Write what the call sends and receives.

        ``memory`` is the text of both buffers; ``extents`` are those of the local tensor, ``block`` those that each
        rank sends, and ``unit`` what an element has of what is counted.

        Returns
        -------
        The declarations before the call, its first arguments, the numbers that they name, and the form of the function.
        """
        if self.parts is not None:
            sizes = {name: of for name, of in (("split", self.parts.split), ("joined", self.parts.joined)) if of}
            declared = "".join(f"const int64_t {name}[] = {{{{ {str(of)[1:-1]} }}}}; " for name, of in sizes.items())
            return declared, [*memory, *sizes, "unit"], {"unit": product_of([self.parts.unit, *unit])}, "parts"
        if self.sent is None and self.received is None:
            return "", [*memory, "count"], {"count": product_of([*block, *unit])}, ""
        values: dict[str, Extent] = {}
        declared = ""
        for name, place in (("sent", self.sent), ("received", self.received)):
            if place is not None:
                dim = place[0]
                whole = extents[dim] if name == "sent" else place[1]
                values[f"{name}_rows"] = product_of(block[:dim])
                values[f"{name}_row"] = product_of([*block[dim:], *unit])
                values[f"{name}_whole"] = product_of([whole, *block[dim + 1 :], *unit])
                declared += f"const hidet_dist_blocks {name} = {{{{ {name}_rows, {name}_row, {name}_whole }}}}; "
        blocks = ("&sent" if self.sent else "nullptr", "&received" if self.received else "nullptr")
        return declared, list(self.collective.arguments(*memory, *blocks)), values, "blocks"

    def whole_nbytes(self, sent_nbytes: int) -> int:
        """Count the bytes of the whole tensor within the group; see :class:`CollectiveOp`."""
        if self.parts is None:
            return self.collective.whole(sent_nbytes, self.group_size)
        joined = self.parts.joined
        most = sent_nbytes * sum(joined) // max(joined) if joined else sent_nbytes
        return self.collective.even_nbytes(most, self.parts.split, joined)

    def result(self, inputs: Sequence[Sequence[np.ndarray]], group_rank: int, reduce: Reduce) -> np.ndarray:
        """Compute what one rank of the group receives; see :meth:`CollectiveOp.result`."""
        return self.collective.result([x for (x,) in inputs], group_rank, reduce, self._cut, self._join)

    def _cut(self, x: np.ndarray) -> Sequence[np.ndarray]:
        """Cut what a rank sends into the blocks of the ranks, by group rank."""
        if self.parts is not None:
            return self.parts.cut(x)
        return list(x) if self.sent is None else np.split(x, self.group_size, axis=self.sent[0])

    def _join(self, blocks: Sequence[np.ndarray]) -> np.ndarray:
        """Join the blocks that a rank receives, without padding."""
        if self.parts is not None:
            return self.parts.join(blocks)
        if self.received is None:
            return np.stack(blocks)
        dim, _ = self.received
        whole = np.concatenate(blocks, axis=dim)
        extent = self.outputs[0].shape[dim]
        return whole.take(range(int(extent)), axis=dim) if isinstance(extent, int) else whole


def _word(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _block(kind: str, shape: list[Extent], group_size: int, sent: Placement | None) -> list[Extent]:
    """Compute the shape of the block that a rank sends to each rank, from the shape of its tensor."""
    if sent is None:
        if not shape or shape[0] != group_size:
            raise ValueError(f"{kind} over {group_size} ranks got the shape {shape}")
        return shape[1:]
    dim, extent = sent
    whole = shape[dim]
    if isinstance(whole, int) and isinstance(extent, int) and whole != group_size * extent:
        raise ValueError(f"{kind} of blocks of {extent} over {group_size} ranks got the extent {whole}")
    return _with_extent(shape, dim, extent)


def _with_extent(shape: list[Extent], dim: int, extent: Extent) -> list[Extent]:
    return [*shape[:dim], extent, *shape[dim + 1 :]]


class WaitOp(NativeCallOp):
    """Wait for a collective that was only started; the output shares the memory of ``received``.

    ``sent`` is the tensor that the collective sends. It is an input so that its memory is not reused before.
    """

    def __init__(self, received: Tensor, *sent: Tensor):
        super().__init__(
            "_".join(["hidet_dist", "wait", f"for{len(sent)}", f"abi{native.ABI_VERSION}"]),
            {"received": received, **{f"sent{number}": x for number, x in enumerate(sent)}},
            list(extents_of(received)),
            NativeCall.of_library("hidet_dist_wait({});", ("hidet_dist/overlap.h",)),
            {},
            share_map={0: 0},
        )
        self.name = "Wait"


class ShardSliceTask(Task, metaclass=MadeOnce):
    """Cut the device's shard out of dim ``dim``, with zeros beyond its end; the device's coordinate is an input."""

    def __init__(  # type: ignore[no-untyped-def]
        self, x, coordinate, dim: int, mesh_axes: Sequence[int], sizes: Sequence[int], extent: Extent
    ):
        shape = list(x.shape)
        shape[dim] = extent
        # A symbolic dim divides evenly: it is declared to be a multiple of the number of shards.
        padded = is_constant(extent, x.shape[dim]) and int(extent) * math.prod(sizes) > int(x.shape[dim])

        def element(*indices):  # type: ignore[no-untyped-def]
            shard = coordinate[mesh_axes[0]]
            for axis, size in zip(mesh_axes[1:], sizes[1:], strict=True):
                shard = shard * size + coordinate[axis]
            index = list(indices)
            index[dim] = shard * extent + index[dim]
            return if_then_else(index[dim] < x.shape[dim], x[index], x.type.dtype.zero) if padded else x[index]

        y = compute("y", shape, element)
        attributes = {"dim": dim, "mesh_axes": list(mesh_axes), "sizes": list(sizes), "extent": extent}
        super().__init__("shard_slice", [x, coordinate], [y], attributes=attributes)


@has_traits(kernel="copy", moves=Moves.SPREAD)
class ShardSliceOp(Operator):
    """The device's shard of ``x`` along ``dim``, split by ``mesh_axes`` (major to minor) of these ``sizes``.

    Every shard has ``extent``; the last ones have zeros beyond the end of the dim.
    """

    def __init__(
        self, x: Tensor, coordinate: Tensor, dim: int, mesh_axes: Sequence[int], sizes: Sequence[int], extent: Extent
    ):
        task = ShardSliceTask(input_like(x, "x"), input_like(coordinate, "coordinate"), dim, mesh_axes, sizes, extent)
        attributes = {"dim": dim, "mesh_axes": list(mesh_axes), "sizes": list(sizes), "extent": extent}
        super().__init__(inputs=[x, coordinate], attributes=attributes, task=task)


@dataclass(frozen=True)
class SplitOrder:
    """The mesh axes that split a dim, major to minor, and their sizes.

    The parts of a dim are numbered in this order; group ranks are row-major over ascending mesh axes.
    """

    mesh_axes: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of parts."""
        return math.prod(self.sizes)

    def part(self, rank):  # type: ignore[no-untyped-def]
        """The part of the rank with this group rank (an int or an expression)."""
        return self._renumbered(rank, sorted(self.mesh_axes), self.mesh_axes)

    def rank(self, part):  # type: ignore[no-untyped-def]
        """The group rank of the rank that has this part (an int or an expression)."""
        return self._renumbered(part, self.mesh_axes, sorted(self.mesh_axes))

    def _renumbered(self, number, old: Sequence[int], new: Sequence[int]):  # type: ignore[no-untyped-def]
        if tuple(old) == tuple(new):
            return number
        size = dict(zip(self.mesh_axes, self.sizes, strict=True))
        digits = {}
        for axis in reversed(old):
            digits[axis] = number % size[axis]
            number = number // size[axis]
        result = digits[new[0]]
        for axis in new[1:]:
            result = result * size[axis] + digits[axis]
        return result

    def attributes(self) -> dict[str, list[int]]:
        """Convert to attributes of a hidet task."""
        return {"mesh_axes": list(self.mesh_axes), "sizes": list(self.sizes)}


class StackShardsTask(Task, metaclass=MadeOnce):
    """``y[r, ...]`` is the part along ``dim`` of ``x`` for group rank r."""

    def __init__(self, x, dim: int, order: SplitOrder):  # type: ignore[no-untyped-def]
        part = x.shape[dim] // order.count
        shape = [order.count, *x.shape]
        shape[dim + 1] = part

        def element(r, *indices):  # type: ignore[no-untyped-def]
            index = list(indices)
            index[dim] = order.part(r) * part + index[dim]
            return x[index]

        y = compute("y", shape, element)
        super().__init__("stack_shards", [x], [y], attributes={"dim": dim, **order.attributes()})


@has_traits(kernel="copy", moves=Moves.SPREAD)
class StackShardsOp(Operator):
    """Stack the parts of ``x`` along ``dim`` in a new first dim, as reduce-scatters and all-to-alls send them."""

    def __init__(self, x: Tensor, dim: int, order: SplitOrder):
        task = StackShardsTask(input_like(x, "x"), dim, order)
        super().__init__(inputs=[x], attributes={"dim": dim, "order": order}, task=task)


class JoinShardsTask(Task, metaclass=MadeOnce):
    """``y`` joins ``x[0], x[1], ...``, one per group rank, along ``dim``, and ends at ``extent``."""

    def __init__(self, x, dim: int, order: SplitOrder, extent: Extent):  # type: ignore[no-untyped-def]
        part = x.shape[dim + 1]
        shape = list(x.shape[1:])
        shape[dim] = extent

        def element(*indices):  # type: ignore[no-untyped-def]
            index = list(indices)
            index[dim] = indices[dim] % part
            return x[[order.rank(indices[dim] // part), *index]]

        y = compute("y", shape, element)
        super().__init__("join_shards", [x], [y], attributes={"dim": dim, "extent": extent, **order.attributes()})


@has_traits(kernel="copy", moves=Moves.SPREAD)
class JoinShardsOp(Operator):
    """Join the stacked shards that all-gathers and all-to-alls receive along ``dim``, up to ``extent``."""

    def __init__(self, x: Tensor, dim: int, order: SplitOrder, extent: Extent):
        task = JoinShardsTask(input_like(x, "x"), dim, order, extent)
        super().__init__(inputs=[x], attributes={"dim": dim, "order": order, "extent": extent}, task=task)


class CopyTask(Task, metaclass=MadeOnce):
    """``y`` is a copy of ``x`` in separate memory."""

    def __init__(self, x):  # type: ignore[no-untyped-def]
        super().__init__("copy", [x], [compute("y", x.shape, lambda *indices: x[indices])])


@has_traits(kernel="copy", moves=Moves.SPREAD)
class CopyOp(Operator):
    """A copy, for a graph output that would share memory with a graph input, a weight or another output."""

    def __init__(self, x: Tensor):
        super().__init__(inputs=[x], attributes={}, task=CopyTask(input_like(x, "x")))
