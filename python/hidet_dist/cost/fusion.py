"""Prediction of the operators that hidet fuses into a neighbour's kernel, which saves a launch and a pass over memory.

This follows hidet 0.6.1's ``fuse_operator_pass`` (hidet/graph/transforms/fuse_operator.py) on the unsharded graph. An
operator that is not element-wise (injective) is an *anchor*. The sole reader of an anchor's output becomes its epilogue
if the elements of that output map one to one to elements of the reader's output. Then operators that a single kernel
reads become its prologue. The remaining operators fuse with one another. A conversion or a reduce function between two
fused operators is a barrier: the operator that would have been absorbed then pays for a launch and a pass over memory.

On CPUs, products and convolutions are kernels around a library's calls (``hidet_dist.compile.cpu``), which read through
renamings of their operands and through the padding before a convolution, and write through element-wise operators.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from hidet.graph.ops.conv1d.conv1d import Conv1dOp
from hidet.graph.ops.conv2d.conv2d import Conv2dOp
from hidet.graph.ops.conv3d.conv3d import Conv3dOp
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.ops.transform import (
    PadOp,
    StridedSliceOp,
)
from hidet.graph.transforms.fuse_operator import NOT_FUSIBLE

from hidet_dist.elementwise import ELEMENTWISE
from hidet_dist.renaming import RENAMINGS
from hidet_dist.rules.rule import signature_of
from hidet_dist.view import GraphView

_CONVOLUTIONS = (Conv1dOp, Conv2dOp, Conv3dOp)
_VIEWS = (*RENAMINGS, StridedSliceOp)


@dataclass(frozen=True)
class Fused:
    """An operator absorbed by a neighbour's kernel: ``tensor`` passes between the two without touching memory.

    ``prologue``: the operator produces the tensor, and the consumer absorbs it. Otherwise the operator consumes the
    tensor, and the producer absorbs it.
    """

    tensor: str
    prologue: bool


def fused_operators(view: GraphView, library_products: bool = False) -> dict[int, Fused]:
    """Map the number of each absorbed operator of a graph to its :class:`Fused`.

    ``library_products``: matrix products and convolutions are kernels around a library's calls.
    """
    return _Fusion(view, library_products).run()


class _Fusion:
    def __init__(self, view: GraphView, library_products: bool):
        self.view = view
        self.library_products = library_products
        self.readers: dict[str, list[tuple[int | None, int]]] = {}  # operator (None: an output) and position of uses
        for name, use in view.uses():
            self.readers.setdefault(name, []).append((use.operator, use.position))
        self.maker = {view.names[y]: i for i, op in enumerate(view.operators) for y in op.outputs}
        self.group: dict[int, int] = {}  # the anchor of each operator
        self.members: dict[int, list[int]] = {}  # the operators of each anchor
        self.fused: dict[int, Fused] = {}
        self.parent: dict[int, int] = {}  # the operator next to an absorbed one, towards the anchor

    def run(self) -> dict[int, Fused]:
        operators = self.view.operators
        injective: dict[Hashable, bool] = {}  # hidet walks the whole definition: once for equal operators
        anchors = []
        for i, op in enumerate(operators):
            key = signature_of(op)
            if key not in injective:
                injective[key] = op.task.is_injective()
            if not injective[key]:
                anchors.append(i)
        for i in anchors:
            self._join(i, i)
        for anchor in anchors:
            if operators[anchor].task.allow_epilogue() and not isinstance(operators[anchor], NOT_FUSIBLE):
                self._epilogue(anchor)
        for anchor in anchors:
            self._prologue(anchor)
        for i in reversed(range(len(operators))):
            if i not in self.group:
                self._join(i, i)
                self._prologue(i)
                self._move_head(i)
        return self._without_idle_views()

    def _join(self, number: int, anchor: int) -> None:
        self.group[number] = anchor
        self.members.setdefault(anchor, []).append(number)

    def _library(self, number: int) -> bool:
        return self.library_products and isinstance(self.view.operators[number], (MatmulOp, *_CONVOLUTIONS))

    def _epilogue(self, anchor: int) -> None:
        open_ = [self.view.names[y] for y in self.view.operators[anchor].outputs]
        while True:
            for name in open_:
                reader = self._only_reader(name, open_)
                if reader is not None:
                    break
            else:
                return
            open_.remove(name)
            open_.append(self.view.names[self.view.operators[reader].outputs[0]])
            self._join(reader, anchor)
            self.fused[reader] = Fused(name, False)
            self.parent[reader] = self.maker[name]

    def _only_reader(self, name: str, open_: list[str]) -> int | None:
        """Return the operator that can be absorbed as the sole reader of a tensor; None if there is none."""
        readers = self.readers.get(name, [])
        if len(readers) != 1:
            return None
        ((reader, position),) = readers
        if reader is None or reader in self.group:
            return None
        op = self.view.operators[reader]
        if isinstance(op, NOT_FUSIBLE) or op.task.inputs[position] not in op.task.inverse_map:
            return None
        if self._library(self.group[self.maker[name]]):
            same = self.view.shape(self.view.names[op.outputs[0]]) == self.view.shape(name)
            if not isinstance(op, ELEMENTWISE) or not same:
                return None
        others = {self.view.names[x] for x in op.inputs} - {name}
        return None if others & set(open_) else reader

    def _prologue(self, anchor: int) -> None:
        if not self.view.operators[anchor].task.allow_prologue() or isinstance(
            self.view.operators[anchor], NOT_FUSIBLE
        ):
            return
        library = self._library(anchor)
        waiting = [self.view.names[x] for i in self.members[anchor] for x in self.view.operators[i].inputs]
        while waiting:
            name = waiting.pop(0)
            maker = self.maker.get(name)
            if maker is None or maker in self.group or not self._can_prologue(maker, anchor if library else None):
                continue
            readers = [reader for reader, _ in self.readers[name]]
            if any(reader is None or self.group.get(reader) != anchor for reader in readers):
                continue
            self._join(maker, anchor)
            self.fused[maker] = Fused(name, True)
            self.parent[maker] = next(reader for reader in readers if reader is not None)
            # Its inputs may now have all of their readers in the group.
            waiting.extend(self.view.names[x] for x in self.view.operators[maker].inputs)

    def _can_prologue(self, maker: int, library: int | None) -> bool:
        """Tell whether an operator can be a prologue of an anchor; ``library`` is the anchor if it calls a library."""
        op = self.view.operators[maker]
        if library is None:
            return not isinstance(op, NOT_FUSIBLE)
        return isinstance(op, PadOp if isinstance(self.view.operators[library], _CONVOLUTIONS) else _VIEWS)

    def _free(self, number: int) -> bool:
        """Tell whether an operator is a view, which costs nothing alone: its output shares its input's memory."""
        return bool(self.view.operators[number].task.share_map)

    def _move_head(self, anchor: int) -> None:
        """Move the cost of a kernel from a view, which needs none, to the next operator that needs one."""
        head = anchor
        while self._free(head):
            behind = [i for i in self.members[anchor] if self.parent.get(i) == head]
            if not behind:
                return
            (head,) = behind  # a view has one input
            del self.fused[head], self.parent[head]

    def _without_idle_views(self) -> dict[int, Fused]:
        """Drop the views that absorb nothing: splitting them off costs nothing either."""
        needed: set[int] = set()
        for number in self.fused:
            above = number
            if not self._free(number):
                while above in self.fused and above not in needed:
                    needed.add(above)
                    above = self.parent[above]
        return {number: fused for number, fused in sorted(self.fused.items()) if number in needed}
