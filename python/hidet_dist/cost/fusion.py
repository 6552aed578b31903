"""Prediction of the operators that share a kernel, which saves launches and passes over memory.

This follows hidet 0.6.1's ``fuse_operator_pass`` (hidet/graph/transforms/fuse_operator.py) on the unsharded graph. An
operator that is not element-wise (injective) is an *anchor*. The sole reader of an anchor's output becomes its epilogue
if the elements of that output map one to one to elements of the reader's output. Then operators that a single kernel
reads become its prologue. The remaining operators fuse with one another. A conversion or a reduce function between two
fused operators is a barrier: the operator that would have been absorbed then pays for a launch and a pass over memory.

On CPUs, products and convolutions are kernels around a library's calls (``hidet_dist.compile.cpu``), which read through
renamings of their operands and through the padding before a convolution, and write through element-wise operators.

Attention, and on GPUs a softmax or a norm, is an anchor of several operators (:mod:`hidet_dist.cost.kernels`). On GPUs,
kernels of products in half precision compute no prologue. Products of one left operand, each with its epilogue, are one
launch (:mod:`hidet_dist.patterns.joint_products`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError
from weakref import WeakKeyDictionary

from hidet.graph.transforms.fuse_operator import NOT_FUSIBLE

from hidet_dist.compat.half_products import is_taken
from hidet_dist.cost.kernels import KernelOfSeveral, kernels_of_several
from hidet_dist.machine import GPU, LIBRARY
from hidet_dist.patterns.joint_products import in_memory, kept_in_memory, of_one_operand
from hidet_dist.rewriting import longest_paths, uses_of
from hidet_dist.spec import OpShardSpec, TensorShardSpec
from hidet_dist.traits import Moves, traits_of
from hidet_dist.view import GraphView
from hidet_dist.weights.storage import storage_of


@dataclass(frozen=True)
class Fused:
    """An operator absorbed by a neighbour's kernel: ``tensor`` passes between the two without touching memory.

    ``prologue``: the operator produces the tensor, and the consumer absorbs it. Otherwise the operator consumes the
    tensor, and the producer absorbs it.
    """

    tensor: str
    prologue: bool


@dataclass(frozen=True)
class Member:
    """An operator of a kernel of several operators (:class:`hidet_dist.cost.kernels.KernelOfSeveral`).

    Tensors are given by their positions among the inputs and the outputs of the operator.

    Attributes
    ----------
    is_last: whether the kernel writes its output to memory. This operator pays for the launch.
    spared: the inputs and outputs that it neither reads from memory nor writes to it: those that pass within the
        kernel, and those that another operator of the kernel reads.
    inner: the outputs that pass within the kernel.
    rows: the inputs and outputs whose last dim must be whole in the kernel.
    otherwise: how it is fused where its sharding breaks the kernel up, or None.
    beside: for one of several products in one launch, the last of them; None for any other.
    work: the class of kernels whose measured costs it has; None for that of the operator by itself.
    """

    is_last: bool
    spared: tuple[tuple[int, ...], tuple[int, ...]]
    inner: tuple[int, ...]
    rows: tuple[tuple[int, ...], tuple[int, ...]]
    otherwise: Fused | None
    beside: int | None = None
    work: str | None = None

    def is_broken(self, spec: OpShardSpec) -> bool:
        """Whether an operator of this spec cannot be part of the kernel: its rows are sharded."""
        return any(spec.reduce_fns[o] for o in self.inner) or any(
            splits_rows(specs[position])
            for specs, positions in zip((spec.in_specs, spec.out_specs), self.rows, strict=True)
            for position in positions
        )


def splits_rows(spec: TensorShardSpec) -> bool:
    """Whether a spec shards the last dim."""
    return bool(spec.mesh_axes_per_dim[-1])


Fusions = Mapping[int, Fused | Member]
"""How operators share kernels, by number. Operators without an entry, and no others, begin a kernel of their own."""


def sharing(entry: Fused | Member | None, spec: OpShardSpec) -> Fused | Member | None:
    """Return how an operator of an entry shares a kernel in a spec; None if it begins one of its own."""
    return entry.otherwise if isinstance(entry, Member) and entry.is_broken(spec) else entry


@dataclass(frozen=True)
class Between:
    """A tensor between two operators of one kernel.

    Attributes
    ----------
    plain: how one of the two is fused by hidet's pass; None if it is not.
    inner: whether the tensor passes within a kernel of several operators; ``rows``: if its last dim is one of its rows.
    """

    prologue: bool | None
    inner: bool = False
    rows: bool = False


def tensors_between(view: GraphView, fusions: Fusions) -> dict[str, tuple[int, Between]]:
    """Map each tensor between operators of one kernel to its :class:`Between`, and the operator that pays for a split.

    The split makes another kernel begin.
    """
    result = {}
    for number, entry in fusions.items():
        if isinstance(entry, Fused):
            result[entry.tensor] = number, Between(entry.prologue)
            continue
        for o in entry.inner:
            name = view.names[view.operators[number].outputs[o]]
            result[name] = number, Between(None, True, o in entry.rows[1])
    for entry in fusions.values():
        if isinstance(entry, Member) and entry.otherwise is not None:
            name = entry.otherwise.tensor
            payer, between = result[name]
            result[name] = payer, replace(between, prologue=entry.otherwise.prologue)
    return result


def fused_operators(view: GraphView, fusion: str = GPU, multiprocessors: int = 0) -> Fusions:
    """Map the numbers of operators to how they share a kernel with others.

    ``fusion`` is one of :data:`hidet_dist.machine.FUSIONS`. ``multiprocessors`` are those of a GPU; 0 for a device that
    has none, or is not known.
    """
    known = _known.setdefault(view, {})
    if (fusion, multiprocessors) not in known:
        known[fusion, multiprocessors] = _fused(view, fusion, multiprocessors)
    return known[fusion, multiprocessors]


_known: WeakKeyDictionary[GraphView, dict[tuple[str, int], dict[int, Fused | Member]]] = WeakKeyDictionary()
"""What was found of views that are in use: a search formulates the choices of one view several times."""


def _fused(view: GraphView, fusion: str, multiprocessors: int) -> dict[int, Fused | Member]:
    kernels = kernels_of_several(view, fusion)
    library = fusion == LIBRARY
    injective: dict[Hashable, bool] = {}
    whole = _Fusion(view, library, kernels, fusion != GPU, injective, multiprocessors)
    fused: dict[int, Fused | Member] = dict(whole.run())
    if fusion == GPU and multiprocessors:
        fused.update(_joint(view, whole.group))
    if any(len(kernel.operators) > 1 for kernel in kernels):
        alone = _Fusion(view, library, (), fusion != GPU, injective).run()
        for kernel in kernels:
            fused.update(_members(view, kernel, alone))
    return dict(sorted(fused.items()))


def _joint(view: GraphView, group: Mapping[int, int]) -> dict[int, Member]:
    """Map products of one left operand that are one launch, but for the last, to how they share it.

    ``group`` maps each operator to the anchor of its kernel. Each but the first reads the operand from a cache.
    """
    before: dict[int, set[int]] = {anchor: set() for anchor in group.values()}
    computes = dict.fromkeys(before, 0)  # of kernels; 0 for those of views only
    maker = {y: number for number, op in enumerate(view.operators) for y in op.outputs}
    for number, op in enumerate(view.operators):
        anchor = group[number]
        computes[anchor] |= not op.task.share_map
        before[anchor].update(group[maker[x]] for x in op.inputs if x in maker and group[maker[x]] != anchor)
    try:
        depth = longest_paths(before, computes)
    except CycleError:  # hidet does not fuse operators if one depends on the other through a third
        return {}
    groups: dict[tuple[Hashable, ...], list[int]] = {}
    number_of = {op: number for number, op in enumerate(view.operators)}
    for products in of_one_operand(view.operators):
        for op in products:
            number = number_of[op]
            key = in_memory(op.inputs[0]), op.outputs[0].dtype.name, storage_of(op.inputs[1]), depth[group[number]]
            if group[number] == number:
                groups.setdefault(key, []).append(number)
    return {
        number: Member(False, ((0,), ()), (), ((), ()), None, numbers[-1])
        for numbers in groups.values()
        for number in numbers[:-1]
    }


def _members(view: GraphView, kernel: KernelOfSeveral, alone: Mapping[int, Fused]) -> dict[int, Member]:
    """Describe the operators of a kernel; ``alone`` is how hidet's pass fuses them."""
    last = kernel.operators[-1]
    inner = {view.names[y] for number in kernel.operators[:-1] for y in view.operators[number].outputs}
    read: set[str] = set()
    members = {}
    for number in kernel.operators:
        op = view.operators[number]
        inputs, outputs = ([view.names[x] for x in tensors] for tensors in (op.inputs, op.outputs))
        spared = []
        for position, name in enumerate(inputs):
            if name in inner or name in read:
                spared.append(position)
            read.add(name)
        made = tuple(o for o, name in enumerate(outputs) if name in inner)
        ins, outs = (tuple(n for n, name in enumerate(names) if name in kernel.rows) for names in (inputs, outputs))
        entry = alone.get(number)
        otherwise = entry if entry is not None and entry.tensor in inner else None
        spares = tuple(spared), made
        members[number] = Member(number == last, spares, made, (ins, outs), otherwise, work=kernel.work)
    return members


class _Fusion:
    """hidet's pass on the operators of a graph, with ``kernels`` of several operators as anchors.

    Without ``half_prologues``, no prologue is fused into products in half precision. ``injective`` tells by signature
    whether operators are injective, as far as that is known: hidet walks their whole definitions to tell.
    """

    def __init__(
        self,
        view: GraphView,
        library_products: bool,
        kernels: Sequence[KernelOfSeveral] = (),
        half_prologues: bool = True,
        injective: dict[Hashable, bool] | None = None,
        multiprocessors: int = 0,
    ):
        self.view = view
        self.library_products = library_products
        self.half_prologues = half_prologues
        self.injective: dict[Hashable, bool] = {} if injective is None else injective
        self.kernels = {kernel.operators[-1]: kernel for kernel in kernels}
        self.readers: dict[str, list[tuple[int | None, int]]] = {}  # operator (None: an output) and position of uses
        for name, use in view.uses():
            self.readers.setdefault(name, []).append((use.operator, use.position))
        self.maker = {view.names[y]: i for i, op in enumerate(view.operators) for y in op.outputs}
        self.group: dict[int, int] = {}  # the anchor of each operator
        self.members: dict[int, list[int]] = {}  # the operators of each anchor
        self.fused: dict[int, Fused] = {}
        self.parent: dict[int, int] = {}  # the operator next to an absorbed one, towards the anchor
        # Tensors that no kernel passes on in registers, so that products are one launch.
        self.in_memory: set[str] = set()
        if multiprocessors:
            kept = kept_in_memory(view.graph, uses_of(view.graph), self.view.shape_of, multiprocessors)
            self.in_memory = {view.names[x] for x in kept}

    def run(self) -> dict[int, Fused]:
        operators = self.view.operators
        injective = self.injective
        anchors = []
        for anchor, kernel in self.kernels.items():
            for i in kernel.operators:
                self._join(i, anchor)
        for i, op in enumerate(operators):
            if i in self.group:
                anchors += [i] if i in self.kernels else []
                continue
            if i in self.view.updates:  # it writes to the memory of a state, by a kernel of its own
                self._join(i, i)
                continue
            key = self.view.signature(i)
            if key not in injective:
                injective[key] = op.task.is_injective()
            if not injective[key]:
                anchors.append(i)
                self._join(i, i)
        for anchor in anchors:
            if self._allows(anchor, "epilogue"):
                self._epilogue(anchor)
        for anchor in anchors:
            self._prologue(anchor)
        for i in reversed(range(len(operators))):
            if i not in self.group:
                self._join(i, i)
                self._prologue(i)
                self._move_head(i)
        return self._without_idle_views()

    def _allows(self, anchor: int, what: str) -> bool:
        """Whether the kernel of an anchor can compute a prologue or an epilogue."""
        op = self.view.operators[anchor]
        if anchor in self.kernels:
            return what == "prologue" or self.kernels[anchor].fuses_epilogue
        if isinstance(op, NOT_FUSIBLE):
            return False
        if what == "epilogue":
            return bool(op.task.allow_epilogue())
        return bool(op.task.allow_prologue()) and (self.half_prologues or not is_taken(op))

    def _join(self, number: int, anchor: int) -> None:
        self.group[number] = anchor
        self.members.setdefault(anchor, []).append(number)

    def _library(self, number: int) -> bool:
        return self.library_products and traits_of(self.view.operators[number]).is_product

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
        if len(readers) != 1 or name in self.in_memory:
            return None
        ((reader, position),) = readers
        if reader is None or reader in self.group:
            return None
        op = self.view.operators[reader]
        if isinstance(op, NOT_FUSIBLE) or op.task.inputs[position] not in op.task.inverse_map:
            return None
        if self._library(self.group[self.maker[name]]):
            same = self.view.shape_of(op.outputs[0]) == self.view.shape(name)
            if not traits_of(op).elementwise or not same:
                return None
        others = {self.view.names[x] for x in op.inputs} - {name}
        return None if others & set(open_) else reader

    def _prologue(self, anchor: int) -> None:
        if not self._allows(anchor, "prologue"):
            return
        library = self._library(anchor)
        in_memory = self.kernels[anchor].in_memory if anchor in self.kernels else frozenset()
        waiting = [self.view.names[x] for i in self.members[anchor] for x in self.view.operators[i].inputs]
        while waiting:
            name = waiting.pop(0)
            maker = self.maker.get(name)
            if maker is None or maker in self.group or not self._can_prologue(maker, anchor if library else None):
                continue
            if name in in_memory or name in self.in_memory:
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
        if traits_of(self.view.operators[library]).kernel == "convolution":
            return traits_of(op).pads
        traits = traits_of(op)
        return traits.renames or traits.moves is Moves.SLICE

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
