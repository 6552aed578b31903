"""The graph of one micro-batch: the same operators on a part of the batch, if they are proven not to mix it.

The proof is that of sharding. A micro-batch is like a rank that holds a part of the batch and does not communicate. So
the batch is split over a mesh with one device per micro-batch, and every operator must have a choice by its rule
(:mod:`hidet_dist.rules`) without a reduce function, a conversion, or a use of the device's coordinate.

A symbolic batch is cut into parts of any sizes, and the graph of a micro-batch is the graph itself, for a smaller size.
The proof splits the batch over two devices. Besides, each operator on a shard must have the definition of the operator
itself for a batch of the shard's size. The batch is then the major digit of each dim that it splits, and no operator
reads it other than at the index of its result; so what holds for two equal parts holds for any consecutive parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hidet.graph import Operator, Tensor
from hidet.graph.tensor import symbol_like
from hidet.ir.expr import SymbolVar

from hidet_dist.errors import ConfigError
from hidet_dist.normalize import NormalGraph
from hidet_dist.rewriting import uses_of
from hidet_dist.rules.local import localize
from hidet_dist.rules.rule import RuleTable
from hidet_dist.spec import DeviceMesh, OpShardSpec, TensorShardSpec
from hidet_dist.spec.symbols import SymbolPlan, SymbolSize
from hidet_dist.symbolic.planning import SymbolicRules, TwinView, planning_view
from hidet_dist.view import GraphView, check_symbols, graph_symbols
from hidet_dist.weights.named import is_weight
from hidet_dist.weights.states import is_value_of_state, state_mark_of


@dataclass(frozen=True)
class MicroBatchGraph:
    """The graph of one micro-batch.

    Attributes
    ----------
    graph: the graph, with the same operator numbers and the same weights as the whole graph.
    count: the number of micro-batches; the most that there may be of a symbolic batch.
    input_dims, output_dims: the dim of each graph input and output that micro-batches split, or None.
    symbols: the symbolic dims, with the sizes of the largest micro-batch to plan for.
    """

    graph: NormalGraph
    count: int
    input_dims: tuple[int | None, ...]
    output_dims: tuple[int | None, ...]
    symbols: tuple[SymbolPlan, ...] = ()

    @property
    def declared(self) -> dict[str, SymbolSize]:
        """The declarations of the symbolic dims of one micro-batch."""
        return {symbol.name: symbol.declared for symbol in self.symbols}


def refuse_states(graph: NormalGraph, why: str) -> None:
    """Refuse a graph with states. Raises ConfigError, which names one, and says ``why``."""
    leaves = itertools.chain(graph.outputs, *(node.inputs for node in graph.nodes))
    mark = next((mark for x in leaves if (mark := state_mark_of(x)) is not None), None)
    if mark is not None:
        raise ConfigError(f"The graph has states, such as {mark.name!r}, and {why}")


def batch_dims(graph: NormalGraph) -> tuple[int | None, ...]:
    """Find the batch dim of each input: dim 0, if it has the size of dim 0 of the first input; else None."""
    sizes = [x.shape[0] if x.shape else None for x in _inputs(graph)]
    return tuple(0 if size is not None and str(size) == str(sizes[0]) else None for size in sizes)


def batch_symbol(graph: NormalGraph, dims: Sequence[int | None]) -> str | None:
    """Return the symbolic dim that micro-batches split; None if the split dims have fixed sizes.

    Raises
    ------
    ConfigError
        When one split dim is symbolic and another is not the same symbolic dim, or the symbolic dim is one of an input
        that is not split.
    """
    inputs = _inputs(graph)
    extents = [
        x.shape[dim] if dim is not None and dim < len(x.shape) else None for x, dim in zip(inputs, dims, strict=True)
    ]
    names = {extent.name for extent in extents if isinstance(extent, SymbolVar)}
    if not names:
        return None
    name = sorted(names)[0]
    for number, (x, dim) in enumerate(zip(inputs, dims, strict=True)):
        for place, extent in enumerate(x.shape):
            if (place == dim) != (isinstance(extent, SymbolVar) and extent.name == name):
                raise ConfigError(
                    f"The graph cannot be cut into micro-batches of its symbolic dim {name}: input {number} has the "
                    f"shape [{', '.join(map(str, x.shape))}], and micro-batches "
                    + ("split no dim of it." if dim is None else f"split its dim {dim}.")
                    + " Use one micro-batch."
                )
    return name


def micro_batch(
    graph: NormalGraph,
    count: int,
    dims: Sequence[int | None] | None = None,
    symbols: Sequence[SymbolPlan] = (),
    rules: RuleTable | None = None,
) -> MicroBatchGraph:
    """Cut the batch of a graph into ``count`` micro-batches, and make the graph of one.

    The parts of a batch of fixed size are equal; those of a symbolic one are as :func:`micro_sizes` says.

    Parameters
    ----------
    graph: NormalGraph
        The graph in normal form.
    count: int
        The number of micro-batches. If it is 1, the graph is returned as it is.
    dims: sequence of int or None, optional
        The dim of each graph input to split, None for an input that all micro-batches have whole; by default
        :func:`batch_dims`.
    symbols: sequence of SymbolPlan
        The symbolic dims of the graph, with the sizes of the whole batch to plan for.
    rules: RuleTable, optional
        A table, for any mesh, with which rules and proofs are shared.

    Raises
    ------
    ConfigError
        When a dim does not divide, the graph has symbolic dims but its batch is none of them, or an operator mixes the
        batch; it names the operator. When the graph has states, and there are several micro-batches.
    """
    dims = batch_dims(graph) if dims is None else tuple(dims)
    inputs = _inputs(graph)
    if count == 1:
        whole: tuple[int | None, ...] = (None,) * sum(not is_value_of_state(y) for y in graph.outputs)
        return MicroBatchGraph(graph, 1, (None,) * len(inputs), whole, tuple(symbols))
    refuse_states(graph, "a micro-batch would find what another one has written: use one micro-batch.")
    if len(dims) != len(inputs):
        raise ConfigError(f"The graph has {len(inputs)} inputs; {len(dims)} batch dims are given.")
    if graph_symbols(graph):
        return _symbolic_micro_batch(graph, count, dims, symbols, rules)
    for number, (x, dim) in enumerate(zip(inputs, dims, strict=True)):
        if dim is not None and not (0 <= dim < len(x.shape) and int(x.shape[dim]) % count == 0):
            raise ConfigError(
                f"Input {number} of the shape {[int(n) for n in x.shape]} cannot be cut into {count} micro-batches "
                f"along dim {dim}: that must divide it."
            )
    mesh = DeviceMesh((count,), ("micro_batch",))
    view = GraphView(graph)
    given = {name: _split(len(view.shape(name)), dim) for name, dim in zip(view.inputs, dims, strict=True)}
    chosen = _Choices(view, mesh, given, RuleTable(mesh, rules)).run()
    return _built(view, mesh, given, chosen, dims, count)


def recut(batch: MicroBatchGraph, count: int, symbols: Sequence[SymbolPlan]) -> MicroBatchGraph:
    """Cut a symbolic batch, which is proven to be cut into several micro-batches, into ``count`` of them.

    ``symbols`` are those of the whole batch. Raises ConfigError when the batch to plan for is too small.
    """
    name = batch_symbol(batch.graph, batch.input_dims)
    assert name is not None and batch.count > 1
    return replace(batch, count=count, symbols=_cut_symbols(symbols, name, count))


def _cut_symbols(symbols: Sequence[SymbolPlan], name: str, count: int) -> tuple[SymbolPlan, ...]:
    known = {symbol.name: symbol for symbol in symbols}
    units = known[name].size // known[name].multiple_of
    if units < count:
        raise ConfigError(
            f"A batch of {name} = {known[name].size}, the expected size, cannot be cut into {count} micro-batches of "
            f"a multiple of {known[name].multiple_of}. Expect a larger batch in optimization_config['symbols'], or "
            f"use at most {units} micro-batches."
        )
    return tuple(symbol.cut(count) if symbol.name == name else symbol for symbol in symbols)


def _symbolic_micro_batch(
    graph: NormalGraph,
    count: int,
    dims: tuple[int | None, ...],
    symbols: Sequence[SymbolPlan],
    rules: RuleTable | None,
) -> MicroBatchGraph:
    """Cut a symbolic batch. Raises ConfigError as :func:`micro_batch` does."""
    name = batch_symbol(graph, dims)
    if name is None:
        raise ConfigError(
            "Of a graph with symbolic dims, micro-batches can split only a symbolic dim, and the batch (dim 0 of the "
            f"first input) has a fixed size; the symbolic dims are {', '.join(graph_symbols(graph))}. Use one "
            "micro-batch, or make the batch symbolic."
        )
    known = {symbol.name: symbol for symbol in symbols}
    check_symbols(graph, list(known))
    cut = _cut_symbols(symbols, name, count)
    return MicroBatchGraph(graph, count, dims, _independent(graph, name, dims, known, rules), cut)


def _independent(
    graph: NormalGraph,
    batch: str,
    dims: Sequence[int | None],
    known: Mapping[str, SymbolPlan],
    like: RuleTable | None,
) -> tuple[int | None, ...]:
    """Prove that no operator mixes the symbolic dim ``batch``; return the dim of each output that it splits, or None.

    Raises ConfigError, with the operator's name, when one mixes it.
    """
    mesh = DeviceMesh((2,), ("micro_batch",))
    declared = {
        name: SymbolSize(2 * symbol.size, 2 * symbol.multiple_of) if name == batch else symbol.declared
        for name, symbol in known.items()
    }
    view = planning_view(graph, declared, mesh)
    assert isinstance(view, TwinView)
    given = {name: _split(len(view.shape(name)), dim) for name, dim in zip(view.inputs, dims, strict=True)}
    rules = SymbolicRules(view, mesh, like)
    chosen = _Choices(view, mesh, given, rules).run()
    split = dict(given)
    for number, (op, spec) in enumerate(zip(view.operators, chosen, strict=True)):
        if not rules.is_same_on_shards(number, spec, batch):
            raise ConfigError(
                f"The graph cannot be cut into micro-batches: operator {number}, {op.name}, depends on the size of the "
                "batch. Use one micro-batch, or put the whole batch into one stage."
            )
        split.update(zip((view.names[y] for y in op.outputs), spec.out_specs, strict=True))
    axes = [split[name].mesh_axes_per_dim if name in split else () for name in view.outputs]
    return tuple(next((dim for dim, of_dim in enumerate(one) if of_dim), None) for one in axes)


def _inputs(graph: NormalGraph) -> list[Tensor]:
    """The inputs of a graph that are no weights."""
    return [x for x in graph.inputs or [] if not is_weight(x)]


def _split(ndim: int, dim: int | None) -> TensorShardSpec:
    whole = TensorShardSpec.replicated(ndim)
    return whole if dim is None else whole.with_dim(dim, (0,))


class _Choices:
    """The choice of a spec for each operator without conversions on edges: by arc consistency, then by trial."""

    def __init__(
        self,
        view: GraphView,
        mesh: DeviceMesh,
        given: Mapping[str, TensorShardSpec],
        rules: RuleTable,
    ):
        self._view = view
        self._specs: list[list[OpShardSpec]] = []
        for op in view.operators:
            shapes = [view.shape_of(x) for x in (*op.inputs, *op.outputs)]
            self._specs.append(
                [
                    choice.spec
                    for choice in rules(op)[1]
                    if not any(choice.spec.reduce_fns)
                    and not any(
                        spec.is_padded(shape, mesh)
                        for spec, shape in zip((*choice.spec.in_specs, *choice.spec.out_specs), shapes, strict=True)
                    )
                ]
            )
        self._possible: dict[str, frozenset[TensorShardSpec]] = {
            name: frozenset([given.get(name, TensorShardSpec.replicated(len(view.shape(name))))])
            for name in (*view.inputs, *view.weights)
        }
        uses = uses_of(view.graph)  # of a twin, the graph of its operators
        place = {op: number for number, op in enumerate(view.operators)}
        self._near = [
            sorted(
                {place[x.op] for x in op.inputs if x.op in place}
                | {place[user] for y in op.outputs for user in uses.get(y, ()) if user is not None}
            )
            for op in view.operators
        ]

    def run(self) -> list[OpShardSpec]:
        """Choose the spec of each operator. Raises ConfigError, with the operator's name, when one mixes the batch."""
        view = self._view
        for number, op in enumerate(view.operators):  # forward first, so that the operator at fault is known
            if not self._narrow(number):
                raise ConfigError(
                    f"The graph cannot be cut into micro-batches: operator {number}, {op.name}, mixes the batch (its "
                    "result depends on other micro-batches, or on which one it is). Use one micro-batch, or put the "
                    "whole batch into one stage."
                )
        self._settle(range(len(view.operators)))
        for number, op in enumerate(view.operators):
            for spec in sorted(self._allowed(number), key=lambda one: -_splits(one)):
                before = dict(self._possible)
                for y, out_spec in zip(op.outputs, spec.out_specs, strict=True):
                    self._possible[view.names[y]] = frozenset([out_spec])
                if self._settle(self._near[number]):
                    break
                self._possible = before
            else:
                raise ConfigError(
                    f"The graph cannot be cut into micro-batches: what operator {number}, {op.name}, computes is "
                    "needed both for one micro-batch and for all of them."
                )
        return [self._allowed(number)[0] for number in range(len(view.operators))]

    def _allowed(self, number: int) -> list[OpShardSpec]:
        view, op = self._view, self._view.operators[number]
        names = [view.names[x] for x in (*op.inputs, *op.outputs)]
        return [
            spec
            for spec in self._specs[number]
            if all(
                name not in self._possible or tensor_spec in self._possible[name]
                for name, tensor_spec in zip(names, (*spec.in_specs, *spec.out_specs), strict=True)
            )
        ]

    def _narrow(self, number: int) -> set[str]:
        """Keep those specs of the operator's tensors that its choices allow.

        Returns the names of changed tensors, and an empty name; an empty set when no choice is left.
        """
        view, op = self._view, self._view.operators[number]
        specs = self._allowed(number)
        if not specs:
            return set()
        changed = {""}
        tensors = (*op.inputs, *op.outputs)
        for place, tensor in enumerate(tensors):
            name = view.names[tensor]
            left = frozenset((*spec.in_specs, *spec.out_specs)[place] for spec in specs)
            if self._possible.get(name) != left:
                self._possible[name] = left
                changed.add(name)
        return changed

    def _settle(self, operators: Iterable[int]) -> bool:
        """Narrow until nothing changes. False if an operator has no choice left."""
        waiting = dict.fromkeys(operators)
        while waiting:
            number = next(iter(waiting))
            del waiting[number]
            changed = self._narrow(number)
            if not changed:
                return False
            if len(changed) > 1:
                waiting.update(dict.fromkeys(self._near[number]))
        return True


def _splits(spec: OpShardSpec) -> int:
    return sum(bool(one.mesh_axes) for one in (*spec.in_specs, *spec.out_specs))


def _built(
    view: GraphView,
    mesh: DeviceMesh,
    given: Mapping[str, TensorShardSpec],
    chosen: Sequence[OpShardSpec],
    dims: Sequence[int | None],
    count: int,
) -> MicroBatchGraph:
    """Build the graph of one micro-batch from the whole graph's operators."""
    specs = dict(given)
    made: dict[Tensor, Tensor] = {}
    for name in view.inputs:
        x = view.tensors[name]
        shape = list(given[name].local_shape(view.shape(name), mesh))
        made[x] = x if given[name].is_replicated else symbol_like(x, shape=shape)
    for number, (op, spec) in enumerate(zip(view.operators, chosen, strict=True)):

        def refuse(number: int = number, op: Operator = op) -> Tensor:
            raise ConfigError(
                f"The graph cannot be cut into micro-batches: operator {number}, {op.name}, depends on which one it is."
            )

        shapes = [out.local_shape(view.shape_of(y), mesh) for y, out in zip(op.outputs, spec.out_specs, strict=True)]
        outputs = localize(op, [made.get(x, x) for x in op.inputs], spec.in_specs, shapes, mesh, refuse)
        made.update(zip(op.outputs, outputs, strict=True))
        specs.update(zip((view.names[y] for y in op.outputs), spec.out_specs, strict=True))
    graph = NormalGraph([made.get(y, y) for y in view.graph.outputs], [made.get(x, x) for x in view.graph.inputs])
    graph.update_nodes()
    split = [specs[name].mesh_axes_per_dim if name in specs else () for name in view.outputs]
    output_dims = tuple(next((dim for dim, axes in enumerate(one) if axes), None) for one in split)
    return MicroBatchGraph(graph, count, tuple(dims), output_dims)
