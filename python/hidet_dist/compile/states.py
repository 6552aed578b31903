"""States in the memory of a program: updates that write in place, and the order that this asks for.

In a program's graph, an update is a functional operator. Here it becomes one whose output is the memory of its first
input, and which writes only what changes. An operator that reads the old value must then run before the update. It may
not depend on the new value, and it may not be fused with an operator that does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from hidet.graph import FlowGraph, Operator, Tensor
from hidet.utils import prod

from hidet_dist import native
from hidet_dist.compat.native_call import NativeCall, NativeCallOp, Values
from hidet_dist.errors import CompileError
from hidet_dist.operators.states import ReplaceStateOp, ShiftStateOp, WriteRowsOp
from hidet_dist.partitioning import Program
from hidet_dist.rewriting import copy_operator
from hidet_dist.spec.extents import Extent, extents_of
from hidet_dist.targets import target_of_memory
from hidet_dist.weights.states import state_mark_of, updates_of

_IN_MEMORY = {0: 0}  # the output is the memory of the first input


class UpdateInPlaceOp(NativeCallOp):
    """An update of a state that writes into the memory of its first input, which its output shares.

    Parameters
    ----------
    update: Operator
        The functional update: one of :mod:`hidet_dist.operators.states`.
    inputs: sequence of Tensor
        The inputs to take instead of the update's.
    """

    def __init__(self, update: Operator, inputs: Sequence[Tensor]):
        name, call = _call_of(update, _header(inputs[0]))
        names = ["state", "values", *(f"slots{number}" for number in range(len(inputs) - 2))]
        super().__init__(
            f"hidet_dist_{name}_in_place_abi{native.ABI_VERSION}",
            dict(zip(names, inputs, strict=True)),
            list(extents_of(update.outputs[0])),
            call,
            {},
            share_map=_IN_MEMORY,
        )
        self.name = update.name

    def run(self) -> list[Tensor]:
        """Never write while a graph is built."""
        outputs: list[Tensor] = self.symbolic_run()
        return outputs


class KeepOp(NativeCallOp):
    """A tensor in memory: a barrier to fusion between what reads a state before its update and what runs after it."""

    def __init__(self, x: Tensor):
        call = _native("", _header(x))
        super().__init__("hidet_dist_keep", {"x": x}, list(extents_of(x)), call, {}, share_map=_IN_MEMORY)
        self.name = "Keep"

    def run(self) -> list[Tensor]:
        """Build the operator only."""
        outputs: list[Tensor] = self.symbolic_run()
        return outputs


def _header(x: Tensor) -> str:
    """The header with the kernels for the memory that a tensor is in."""
    return target_of_memory(x.device.kind).state_kernels


def _native(statement: str, header: str, values: Mapping[str, Extent] | None = None) -> NativeCall:
    """Make a call of functions of a header."""
    return NativeCall(statement, (header,), (str(native.include_dir()),), values=dict(values or {}))


def _call_of(update: Operator, header: str) -> tuple[str, NativeCall]:
    """Make the name and the call of an update's kernel. Together with the shapes, the name identifies the call."""
    shape = extents_of(update.inputs[0])
    element, text = int(update.inputs[0].dtype.nbytes), Values()

    def from_dim(dim: int) -> str:
        """Write the bytes of the state's dims from this one on."""
        return text(prod([element, *shape[dim:]]))

    if isinstance(update, ReplaceStateOp):
        statement = f"hd::replace({{}}, {{}}, {from_dim(0)});"
        return "replace_state", _native(statement, header, text.values)
    if isinstance(update, ShiftStateOp):
        dim = int(update.attrs["dim"])
        count = text(extents_of(update.inputs[1])[dim])
        statement = (
            "void *to = {}; const void *from = {}; "
            f"hd::shift(to, from, {text(prod([1, *shape[:dim]]))}, {from_dim(dim)}, {count} * {from_dim(dim + 1)});"
        )
        return f"shift_state_dim{dim}", _native(statement, header, text.values)
    assert isinstance(update, WriteRowsOp)
    dims = [int(dim) for dim in update.attrs["dims"]]
    strides = [from_dim(dim + 1) for dim in range(len(shape))]
    slots = [
        f"{{{{at{n}, {str(x.dtype.nbytes == 8).lower()}, {text(shape[dim])}, {strides[dim]}}}}}"
        for n, (x, dim) in enumerate(zip(update.inputs[2:], dims, strict=True))
    ]
    outer = [f"{{{{{text(shape[dim])}, {strides[dim]}}}}}" for dim in range(max(dims)) if dim not in dims]
    count = text(extents_of(update.inputs[1])[0])
    pointers = "".join(f"const void *at{n} = {{}}; " for n in range(len(dims)))
    statement = (
        f"void *to = {{}}; const void *from = {{}}; {pointers}"
        f"const hd::Slots at[] = {{{{{', '.join(slots)}}}}}; "
        f"const hd::OuterDim outer[] = {{{{{', '.join(outer or ['{{1, 0}}'])}}}}}; "
        f"hd::write_rows(to, from, {count}, {strides[max(dims)]}, at, {len(slots)}, outer, {len(outer)});"
    )
    name = "_".join(["write_rows", *(f"dim{dim}" for dim in dims)])
    return name, _native(statement, header, text.values)


def updates_in_place(program: Program) -> Program:
    """Replace the updates of a program's states by operators that write in place.

    Raises
    ------
    CompileError
        When an operator reads the old value of a state and must run after its update, so that the state would have to
        be copied; it names the operator and the state.
    """
    if not program.new_values:
        return program
    graph = program.graph
    count = len(program.outputs)
    chains = [updates_of(y) for y in graph.outputs[count:]]
    updates = list(dict.fromkeys(op for chain in chains for op in chain))
    kept = _crossing(graph, updates)
    made: dict[Tensor, Tensor] = {}
    in_memory: dict[Tensor, Tensor] = {}
    for node in graph.nodes:
        inputs = []
        for x in node.inputs:
            y = made.get(x, x)
            if (x, node) in kept:
                y = in_memory.get(x) or in_memory.setdefault(x, KeepOp(y).outputs[0])
            inputs.append(y)
        if node in updates:
            made[node.outputs[0]] = UpdateInPlaceOp(node, inputs).outputs[0]
        elif inputs != list(node.inputs):
            made.update(zip(node.outputs, copy_operator(node, inputs), strict=True))
    result = FlowGraph([made.get(y, y) for y in graph.outputs], graph.inputs)
    result.update_nodes()
    return replace(program, graph=result)


def _crossing(graph: FlowGraph, updates: Sequence[Operator]) -> set[tuple[Tensor, Operator]]:
    """Collect what passes from operators that read a state before its update to operators that run after it.

    Each is a tensor and its reader. Raises CompileError for an operator that reads an old value after the update.
    """
    next_of = _next_of(graph, updates)
    after = {update: _reached(update, next_of) for update in updates}
    before = {update: _before(graph, update, updates, after[update]) for update in updates}
    if _may_wait_for_each_other(updates, before, after):
        # They get one order, and no kernel needs another one.
        order = [node for node in reversed([*TopologicalSorter(next_of).static_order()]) if node in after]
        for first, second in itertools.pairwise(order):
            next_of[first].append(second)
        after = {update: _reached(update, next_of) for update in updates}
        before = {update: _before(graph, update, updates, after[update]) for update in updates}
    return {
        (x, node)
        for update in updates
        for node in after[update].difference(updates)
        for x in node.inputs
        if x.op in before[update]
    }


def _next_of(graph: FlowGraph, updates: Iterable[Operator]) -> dict[Operator, list[Operator]]:
    """Map each operator to those that must run after it: readers of its results, and updates of states that it reads.

    Updates of other states count, too: an operator may have to run after one because it waits for another one.
    """
    following: dict[Operator, list[Operator]] = {node: [] for node in graph.nodes}
    for node in graph.nodes:
        for x in node.inputs:
            if x.op in following:
                following[x.op].append(node)
    for update in updates:
        old = aliases(graph, update.inputs[0])
        for node in graph.nodes:
            if node is not update and not old.isdisjoint(node.inputs):
                following[node].append(update)
    return following


def _reached(update: Operator, next_of: Mapping[Operator, Sequence[Operator]]) -> set[Operator]:
    """Collect the operators that must run after an update."""
    found, waiting = set[Operator](), [*next_of[update]]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += next_of[node]
    return found


def _before(graph: FlowGraph, update: Operator, updates: Sequence[Operator], after: set[Operator]) -> set[Operator]:
    """Collect the operators that depend on the old value that an update overwrites, and do not run after it.

    Raises CompileError where one that reads it does.
    """
    old = aliases(graph, update.inputs[0])
    before: set[Operator] = set()
    for node in graph.nodes:
        reads_old = node is not update and not old.isdisjoint(node.inputs)
        if reads_old and node in after:
            made = ", ".join(f"{y.dtype.name}{list(extents_of(y))}" for y in node.outputs)
            raise CompileError(
                f"The state {_name_of(update)} would have to be copied: {node.name}, which makes {made}, reads its old "
                f"value, and can run only after {update.name} has written the new one, as it depends on that, or on "
                "what must run later. Read the old value before, in an operator that does not depend on the new one."
            )
        if node not in after and node not in updates and not old.issuperset(node.outputs):
            depends = reads_old or not before.isdisjoint(x.op for x in node.inputs)
            before.update([node] if depends else ())
    return before


def _may_wait_for_each_other(
    updates: Sequence[Operator],
    before: Mapping[Operator, set[Operator]],
    after: Mapping[Operator, set[Operator]],
) -> bool:
    """Tell whether updates of several states could wait for each other, when operators become one kernel.

    A kernel that reads an old value has to run before that update. Together with what runs after another update it has
    to run after that one.
    """
    earlier = {
        update: [one for one in updates if update in after[one] or not before[update].isdisjoint(after[one])]
        for update in updates
    }
    try:
        TopologicalSorter(earlier).prepare()
    except CycleError:
        return True
    return False


def aliases(graph: FlowGraph, x: Tensor) -> set[Tensor]:
    """Collect the tensors that are the memory of ``x`` before it is written to: itself, and what renames it."""
    found = {x}
    for node in graph.nodes:
        if not isinstance(node, UpdateInPlaceOp):
            found.update(node.outputs[o] for o, i in node.task.share_map.items() if node.inputs[i] in found)
    return found


def _name_of(update: Operator) -> str:
    x = update
    while True:
        mark = state_mark_of(x.inputs[0])
        if mark is not None or x.inputs[0].op is None:
            return "" if mark is None else repr(mark.name)
        x = x.inputs[0].op


def run_before(graph: FlowGraph) -> dict[Operator, list[Operator]]:
    """Map each update in place to the operators that read what it overwrites, and so must run before it."""
    needed: dict[Operator, list[Operator]] = {}
    for update in graph.nodes:
        if isinstance(update, UpdateInPlaceOp):
            old = aliases(graph, update.inputs[0])
            needed[update] = [node for node in graph.nodes if node is not update and old.intersection(node.inputs)]
    return needed
