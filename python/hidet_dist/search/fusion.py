"""Which operators hidet will run in the kernel of a neighbour, so that they cost no launch and no pass of their own.

This follows hidet 0.6.1's ``fuse_operator_pass`` (hidet/graph/transforms/fuse_operator.py) on the unsharded graph. An
operator that is no element-wise (injective) one is an *anchor*. The only reader of an anchor's output becomes its
epilogue where that output's elements map to elements of the reader's output one to one; then what is read by one kernel
only becomes its prologue; what is left over fuses among itself. A conversion or a reduce function between two such
operators is a barrier: then the one that would have been absorbed pays for a launch and a pass over memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from hidet.graph import Operator
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.ops.transform import (
    FlattenOp,
    PermuteDimsOp,
    RearrangeOp,
    ReshapeOp,
    SqueezeOp,
    StridedSliceOp,
    UnsqueezeOp,
)
from hidet.graph.transforms.fuse_operator import NOT_FUSIBLE

from hidet_dist.view import GraphView

_RENAMED = (FlattenOp, PermuteDimsOp, RearrangeOp, ReshapeOp, SqueezeOp, StridedSliceOp, UnsqueezeOp)


@dataclass(frozen=True)
class Fused:
    """An operator absorbed by a neighbour's kernel: ``tensor`` passes between the two without touching memory.

    ``prologue``: the operator makes the tensor, and its reader absorbs it; otherwise it reads the tensor, and the maker
    absorbs it.
    """

    tensor: str
    prologue: bool


def fused_operators(view: GraphView, library_matmuls: bool = False) -> dict[int, Fused]:
    """The absorbed operators of a graph, by number.

    ``library_matmuls``: float32 matrix products are calls of a library, which absorb nothing but renamings of their
    operands' memory.
    """
    return _Fusion(view, library_matmuls).run()


class _Fusion:
    def __init__(self, view: GraphView, library_matmuls: bool):
        self.view = view
        self.library_matmuls = library_matmuls
        self.readers: dict[str, list[tuple[int | None, int]]] = {}
        for name, use in view.uses():
            self.readers.setdefault(name, []).append((use.operator, use.position))
        self.maker = {view.names[y]: i for i, op in enumerate(view.operators) for y in op.outputs}
        self.group: dict[int, int] = {}  # of each operator its anchor
        self.members: dict[int, list[int]] = {}
        self.fused: dict[int, Fused] = {}
        self.parent: dict[int, int] = {}  # the operator next to an absorbed one, towards the anchor

    def run(self) -> dict[int, Fused]:
        operators = self.view.operators
        anchors = [i for i, op in enumerate(operators) if not op.task.is_injective()]
        for i in anchors:
            self._join(i, i)
        for anchor in anchors:
            if operators[anchor].task.allow_epilogue() and not self._fixed(anchor):
                self._epilogue(anchor)
        for anchor in anchors:
            self._prologue(anchor)
        for i in reversed(range(len(operators))):
            if i not in self.group:
                self._join(i, i)
                self._prologue(i)
                self._move_head(i)
        return self._that_cost()

    def _join(self, number: int, anchor: int) -> None:
        self.group[number] = anchor
        self.members.setdefault(anchor, []).append(number)

    def _library(self, number: int) -> bool:
        op = self.view.operators[number]
        return self.library_matmuls and isinstance(op, MatmulOp) and op.inputs[0].dtype.name == "float32"

    def _fixed(self, number: int) -> bool:
        return isinstance(self.view.operators[number], NOT_FUSIBLE) or self._library(number)

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
        """The operator that can be absorbed through a tensor."""
        readers = self.readers.get(name, [])
        if len(readers) != 1:
            return None
        ((reader, position),) = readers
        if reader is None or reader in self.group:
            return None
        op = self.view.operators[reader]
        if isinstance(op, NOT_FUSIBLE) or op.task.inputs[position] not in op.task.inverse_map:
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
            if maker is None or maker in self.group or not self._can_prologue(self.view.operators[maker], library):
                continue
            readers = [reader for reader, _ in self.readers[name]]
            if any(reader is None or self.group.get(reader) != anchor for reader in readers):
                continue
            self._join(maker, anchor)
            self.fused[maker] = Fused(name, True)
            self.parent[maker] = next(reader for reader in readers if reader is not None)
            # Absorbing one reader more may be what another tensor was waiting for.
            waiting.extend(self.view.names[x] for x in self.view.operators[maker].inputs)

    def _can_prologue(self, op: Operator, library: bool) -> bool:
        return not isinstance(op, NOT_FUSIBLE) and (not library or isinstance(op, _RENAMED))

    def _free(self, number: int) -> bool:
        """Whether an operator costs nothing alone: its output is its input's memory."""
        return bool(self.view.operators[number].task.share_map)

    def _move_head(self, anchor: int) -> None:
        """A view pays for no kernel: the first operator behind it that needs one does."""
        head = anchor
        while self._free(head):
            behind = [i for i in self.members[anchor] if self.parent.get(i) == head]
            if not behind:
                return
            (head,) = behind  # a view has one input
            del self.fused[head], self.parent[head]

    def _that_cost(self) -> dict[int, Fused]:
        """Without the views that absorb nothing: these cost nothing when they are cut off either."""
        needed: set[int] = set()
        for number in self.fused:
            above = number
            if not self._free(number):
                while above in self.fused and above not in needed:
                    needed.add(above)
                    above = self.parent[above]
        return {number: fused for number, fused in sorted(self.fused.items()) if number in needed}
