"""Planning of graphs with symbolic dims, by a twin with concrete sizes, with the choices that hold for all sizes.

Rules and costs need numbers. The graph is therefore planned as a twin in which every symbol has its expected size. A
second twin decides whether a choice holds for every size: its sizes are primes, times the declared multiples, that
divide no other extent of the graph. The symbolic operator, rebuilt on symbolic shards, must have the same definition as
the second twin's operator, rebuilt on its shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import hidet
from hidet.graph import Operator, Tensor
from hidet.ir.expr import Expr

from hidet_dist.errors import ConfigError, SpecError
from hidet_dist.normalize import NormalGraph
from hidet_dist.reshard import Element
from hidet_dist.rewriting import Subgraph
from hidet_dist.rules.access import Definition, UnsupportedDefinition, analyze, rename
from hidet_dist.rules.declared import definition_of
from hidet_dist.rules.local import localize
from hidet_dist.rules.rule import NO_PARTS, Choice, OfferedParts, Rule, RuleTable, signature_of, unlike_coordinates
from hidet_dist.spec import DeviceMesh, OpShardSpec, TensorShardSpec
from hidet_dist.spec.extents import Extent, evaluate, extents_of, local_extent, part_shape, symbols_in
from hidet_dist.spec.parts import part_sizes
from hidet_dist.spec.symbols import SymbolSize, local_symbols, multiples_of
from hidet_dist.symbolic.twin import concrete, prime_sizes
from hidet_dist.view import GraphView, check_symbols, graph_symbols


class TwinView(GraphView):
    """The view in which a graph with symbolic dims is planned: a twin's operators and shapes under the graph's names.

    Parameters
    ----------
    graph: NormalGraph
        The graph.
    declared: mapping
        The declared size of each symbolic dim, by name.
    mesh: DeviceMesh
        The mesh to plan for.

    Raises
    ------
    ConfigError
        When the declared symbolic dims differ from the graph's, or the graph admits only particular sizes.
    """

    def __init__(self, graph: NormalGraph, declared: Mapping[str, SymbolSize], mesh: DeviceMesh):
        check_symbols(graph, list(declared))
        names = graph_symbols(graph)
        for name in declared:
            if name not in names:
                raise ConfigError(
                    f"optimization_config['symbols'] declares {name!r}; the graph has the symbolic dims "
                    f"{', '.join(names) or 'none'}."
                )
        symbols = tuple(declared[name].of(name) for name in names)
        for local in local_symbols(symbols, mesh):
            if local.shards > 1 and local.name in names:
                raise ConfigError(
                    f"Rename the symbolic dim {local.name}: a shard of the symbolic dim {local.symbol} has that name."
                )
        self.symbolic = GraphView(graph, symbols, mesh)
        super().__init__(concrete(self.symbolic, {symbol.name: symbol.size for symbol in symbols}))
        self.symbols = symbols
        self.prime_sizes = prime_sizes(self.symbolic, mesh)
        self.primes = GraphView(concrete(self.symbolic, self.prime_sizes))
        # What symbolic operators say of themselves: their names, their inputs' types and their attributes.
        self.texts = [str(op) for op in self.symbolic.operators]
        for view in (self, self.primes):
            assert [type(op) for op in view.operators] == [type(op) for op in self.symbolic.operators]
        self.names.update(self.symbolic.names)  # the given graph's tensors have names, too

    def pieces(self, name: str) -> tuple[tuple[int, ...], Element]:
        """Return the pieces into which a tensor may be split; see :meth:`GraphView.pieces`."""
        return self.symbolic.pieces(name)

    def written(self, name: str) -> tuple[int | str, ...]:
        """Return the shape of a tensor with symbolic dims, these as text; empty for a fixed shape."""
        return self.symbolic.written(name)

    def subgraph(self, operators: Sequence[int]) -> Subgraph:
        """Cut operators out of the symbolic graph; see :meth:`GraphView.subgraph`."""
        return self.symbolic.subgraph(operators)

    def signature(self, number: int) -> Hashable:
        """Make a key of an operator; see :meth:`GraphView.signature`."""
        return super().signature(number), self.texts[number]

    def fingerprint(self) -> str:
        """Return the fingerprint of the symbolic graph, which identifies the graph of a plan."""
        return self.symbolic.fingerprint()


def planning_view(graph: NormalGraph, declared: Mapping[str, SymbolSize], mesh: DeviceMesh) -> GraphView:
    """Make the view in which a graph is planned: its shapes are numbers, with or without symbolic dims.

    Raises
    ------
    ConfigError
        When the declared symbolic dims are not those of the graph, or the graph admits only particular sizes.
    """
    if not declared and not graph_symbols(graph):
        return GraphView(graph)
    return TwinView(graph, declared, mesh)


def given_operator(view: GraphView, number: int) -> Operator:
    """Return an operator of the graph that was given, with its symbolic dims."""
    return (view.symbolic if isinstance(view, TwinView) else view).operators[number]


def part_view(view: GraphView, operators: Sequence[int], mesh: DeviceMesh) -> tuple[Subgraph, GraphView]:
    """Cut operators out of a graph, and make the view in which they are planned by themselves for ``mesh``."""
    part = view.subgraph(operators)
    graph = NormalGraph.of(part.graph, graph_symbols(part.graph))
    declared = {symbol.name: symbol.declared for symbol in view.symbols}
    return part, planning_view(graph, declared, mesh)


def rule_table(
    view: GraphView, mesh: DeviceMesh, like: RuleTable | None = None, offered: OfferedParts = NO_PARTS
) -> RuleTable:
    """Make the table of rules for a view's operators; with symbolic dims, only of choices that hold for all sizes.

    Rules and proofs are shared with the table ``like``, for any mesh and graph; choices too if it is for the same mesh
    and the same parts that are ``offered``.
    """
    if isinstance(view, TwinView):
        return SymbolicRules(view, mesh, like, offered)
    same = like is not None and like.mesh == mesh and like.offered == offered
    return like if same and like is not None else RuleTable(mesh, like, offered)


def check_specs(
    view: GraphView, mesh: DeviceMesh, what: str, names: Sequence[str], specs: Sequence[TensorShardSpec | None] | None
) -> None:
    """Check specs of inputs or outputs against the declared multiples of symbolic dims.

    Raises
    ------
    ConfigError
        When a spec splits a symbolic dim into more shards than its declared multiple allows, or by an axis with shares.
    """
    if not isinstance(view, TwinView):
        return
    multiples = multiples_of(view.symbols)
    for number, (name, spec) in enumerate(zip(names, specs or (), strict=False)):
        if spec is None or any(axis >= mesh.ndim for axis in spec.mesh_axes):
            continue
        for dim, (extent, axes) in enumerate(zip(view.symbolic.extents(name), spec.mesh_axes_per_dim, strict=False)):
            if isinstance(extent, Expr) and not spec.is_even(dim, mesh):
                raise ConfigError(
                    f"The spec {spec} of {what} {number} splits the symbolic dim {extent} into unequal parts on the "
                    f"mesh {mesh}, and symbolic dims are split equally only: split another dim by that axis."
                )
            shards = mesh.group_size(axes)
            if isinstance(extent, Expr) and local_extent(extent, shards, multiples) is None:
                raise ConfigError(
                    f"The spec {spec} of {what} {number} splits the symbolic dim {extent} into {shards}, which it is "
                    "not declared to be a multiple of: declare it in optimization_config['symbols'], as in "
                    f"{{{str(extent)!r}: {{'expected': {8 * shards}, 'multiple_of': {shards}}}}}."
                )


class SymbolicRules(RuleTable):
    """The rules of a twin's operators, with only the choices that hold for all sizes of the symbols."""

    def __init__(
        self, view: TwinView, mesh: DeviceMesh, like: RuleTable | None = None, offered: OfferedParts = NO_PARTS
    ):
        super().__init__(mesh, like, offered)
        self._view = view
        self._number = {id(op): number for number, op in enumerate(view.operators)}
        self._multiples = multiples_of(view.symbols)
        self._prime_table = RuleTable(mesh, like, offered)
        self._sizes = {
            local.name: view.prime_sizes[local.symbol] // local.shards for local in local_symbols(view.symbols, mesh)
        }
        self._at = mesh, tuple(view.prime_sizes.items()), tuple(self._multiples.items())
        self._sound: dict[tuple[int, str], tuple[Choice, ...]] = {}
        self._sound_choice: dict[tuple[str, OpShardSpec], Choice | None] = {}
        self._sound_joint: dict[tuple[int, str], tuple[Choice, ...]] = {}
        given = mesh, offered, view.symbols
        if isinstance(like, SymbolicRules) and (like.mesh, like.offered, like._view.symbols) == given:
            self._choices, self._choice_of = like._choices, like._choice_of
            self._prime_table, self._sound, self._sound_choice = like._prime_table, like._sound, like._sound_choice

    def __call__(self, op: Operator) -> tuple[Rule, tuple[Choice, ...]]:
        """Return the rule of an operator of the twin, and its choices that hold for all sizes."""
        rule, choices = super().__call__(op)
        symbolic, prime = self._twins(op)
        if symbolic is None:
            return rule, choices
        key = (id(choices), self._text(op))
        if key not in self._sound:
            specs = {choice.spec for choice in self._prime_table(prime)[1]}
            self._sound[key] = tuple(self._hold(op, choices, specs))
        return rule, self._sound[key]

    def joint(self, op: Operator, proven: bool = True) -> tuple[Choice, ...]:
        """Return the joint choices of an operator of the twin, those of symbolic dims if proven to hold for all sizes.

        Many of them do not hold.
        """
        choices = super().joint(op, proven)
        symbolic, _ = self._twins(op)
        if symbolic is None:
            return choices
        key = id(choices), self._text(op)
        if key not in self._sound_joint:
            self._sound_joint[key] = tuple(
                one for choice in choices if (one := self.choice(op, choice.spec)) is not None
            )
        return self._sound_joint[key]

    def choice(self, op: Operator, spec: OpShardSpec) -> Choice | None:
        """Return the choice of an operator of the twin with this spec; None if it does not hold for all sizes."""
        choice = super().choice(op, spec)
        symbolic, prime = self._twins(op)
        if choice is None or symbolic is None:
            return choice
        key = (self._text(op), spec)
        if key not in self._sound_choice:
            specs = {spec} if self._prime_table.choice(prime, spec) is not None else set()
            self._sound_choice[key] = next(self._hold(op, [choice], specs), None)
        return self._sound_choice[key]

    def is_same_on_shards(self, number: int, spec: OpShardSpec, symbol: str) -> bool:
        """Tell whether an operator on shards is the operator itself for a size of ``symbol`` that the shards have.

        Parameters
        ----------
        number: int
            The number of the operator.
        spec: OpShardSpec
            The spec of a choice of it without reduce functions, which splits dims of that symbol over all devices.
        symbol: str
            The symbolic dim.
        """
        op = self._view.symbolic.operators[number]
        parts = self.mesh.size
        sizes = {**self._view.prime_sizes, symbol: self._view.prime_sizes[symbol] // parts}
        specs = (*spec.in_specs, *spec.out_specs)
        for x, tensor_spec in zip((*op.inputs, *op.outputs), specs, strict=True):
            local = self._shape(x, tensor_spec)
            if local is None:
                return False
            if [evaluate(e, self._sizes) for e in local] != [evaluate(e, sizes) for e in extents_of(x)]:
                return False
        if not self._mentions(op, symbol):
            return True
        shards = [
            hidet.symbol(list(self._shape(x, one) or ()), x.dtype, x.device)
            for x, one in zip(op.inputs, spec.in_specs, strict=True)
        ]
        shapes = [self._shape(y, one) or () for y, one in zip(op.outputs, spec.out_specs, strict=True)]
        try:
            local_op = localize(op, shards, spec.in_specs, shapes, self.mesh, self._coordinate)[0].op
            smaller = rename(analyze(definition_of(op), sizes).canonical, {})
        except (UnsupportedDefinition, ValueError):
            return False
        return bool(self._definition(local_op) == smaller)

    @staticmethod
    def _mentions(op: Operator, symbol: str) -> bool:
        """Tell whether a shape or an attribute of an operator has a symbolic dim; an attribute may hide others."""
        extents = [extent for x in (*op.inputs, *op.outputs) for extent in extents_of(x)]
        return symbol in symbols_in(extents) or symbol in str(op)

    def _twins(self, op: Operator) -> tuple[Operator | None, Operator]:
        """Return the symbolic operator, None if all of its shapes are fixed, and the prime twin's operator."""
        number = self._number[id(op)]
        symbolic, prime = self._view.symbolic.operators[number], self._view.primes.operators[number]
        fixed = all(isinstance(size, int) for x in (*symbolic.inputs, *symbolic.outputs) for size in extents_of(x))
        return None if fixed else symbolic, prime

    def _text(self, op: Operator) -> str:
        """Return the text of an operator's symbolic twin."""
        return self._view.texts[self._number[id(op)]]

    def _hold(self, op: Operator, choices: Sequence[Choice], prime_specs: Collection[OpShardSpec]) -> Iterator[Choice]:
        """Yield the choices that hold for all sizes; ``prime_specs`` are the specs that the prime sizes allow."""
        symbolic, prime = self._twins(op)
        assert symbolic is not None
        own = signature_of(prime)
        key = prime if isinstance(own, int) else own, self._text(op)  # the operator itself where it is like no other
        same = self._known(lambda: self._definition(symbolic) == self._definition(prime) is not None, *key)
        for choice in choices:
            spec = choice.spec
            if spec.is_replicated:
                yield choice
            elif same and spec in prime_specs:
                partial = tuple(map(spec.partial_spec, range(len(spec.out_specs))))
                prove = functools.partial(self._proven, symbolic, prime, spec.local)
                holds = self._known(prove, *key, spec.local.in_specs, partial)
                if spec.dispatch is not None:  # the tokens of each rank
                    holds = holds and None not in map(self._shape, symbolic.inputs, spec.in_specs)
                if holds and None not in map(self._shape, symbolic.outputs, spec.out_specs):
                    yield choice

    def _known(self, prove: Callable[[], bool], *key: Hashable) -> bool:
        """Tell what ``prove`` tells, once for each key, these primes and multiples, and the mesh."""
        whole = (*self._at, *key)
        if whole not in self._proofs:
            self._proofs[whole] = prove()
        return self._proofs[whole]

    def _shape(self, tensor: Tensor, spec: TensorShardSpec) -> tuple[Extent, ...] | None:
        """Return the symbolic shape of a shard; None if the spec does not fit all sizes."""
        try:
            return part_shape(extents_of(tensor), spec, self.mesh, self._multiples)
        except SpecError:
            return None

    def _proven(self, symbolic: Operator, prime: Operator, spec: OpShardSpec) -> bool:
        """Tell whether the symbolic operator and the prime twin's have one definition on the shards of every device."""
        locals_ = []
        partial = [spec.partial_spec(o) for o in range(len(spec.out_specs))]
        for op in (symbolic, prime):
            ins = [self._shape(x, s) for x, s in zip(op.inputs, spec.in_specs, strict=True)]
            outs = [self._shape(y, s) for y, s in zip(op.outputs, partial, strict=True)]
            if None in (*ins, *outs):
                return False
            shards = [
                hidet.symbol(list(shape or ()), x.dtype, x.device) for shape, x in zip(ins, op.inputs, strict=True)
            ]
            shapes = [shape or () for shape in outs]
            try:
                local = localize(op, shards, spec.in_specs, shapes, self.mesh, self._coordinate)[0].op
            except ValueError:
                return False
            locals_.append(local)
        for sizes in self._parts_of_devices((*spec.in_specs, *partial)):
            ours, primes = (self._definition(local, sizes) for local in locals_)
            if not ours == primes is not None:
                return False
        return True

    def _parts_of_devices(self, specs: Sequence[TensorShardSpec]) -> Iterator[Mapping[str, int]]:
        """Yield the parts of devices whose parts differ, by the names of their symbols."""
        dims = ((spec, dim) for spec in specs for dim in range(len(spec.mesh_axes_per_dim)))
        splits = [spec.split(dim, self.mesh) for spec, dim in dims if not spec.is_even(dim, self.mesh)]
        names = {name for split in splits for name in split.symbols(self.mesh)}
        for coordinate in unlike_coordinates(self.mesh, splits):
            yield part_sizes(names, self.mesh, coordinate)

    def _coordinate(self) -> Tensor:
        return hidet.symbol([self.mesh.ndim], "int32", self._view.graph.outputs[0].device)

    def _definition(self, op: Operator, parts: Mapping[str, int] | None = None) -> Any:
        """Return the canonical definition of an operator at the prime sizes and these parts; None if it has none."""
        try:
            definition: Definition = analyze(definition_of(op), {**self._sizes, **(parts or {})})
        except (TypeError, UnsupportedDefinition, ValueError):  # TypeError: an expression's truth value
            return None
        return rename(definition.canonical, {})
