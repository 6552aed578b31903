"""The view of a normal graph as numbered operators and named tensors, for search and partitioning."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import hidet
from hidet.graph import FlowGraph, Operator
from hidet.ir.expr import SymbolVar

from hidet_dist.errors import ConfigError
from hidet_dist.normalize import NormalGraph
from hidet_dist.reshard import Element
from hidet_dist.rewriting import Subgraph, subgraph
from hidet_dist.rules.rule import signature_of
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.extents import Extent, divisor_of, evaluate, even_parts, extents_of, symbols_in
from hidet_dist.spec.symbols import SymbolPlan, multiples_of
from hidet_dist.weights.header import ITEMSIZE
from hidet_dist.weights.named import is_weight
from hidet_dist.weights.states import is_state, new_values, state_mark_of, updates_of


@dataclass(frozen=True)
class Use:
    """A use of a tensor: as input ``position`` of ``operator``, or as graph output ``position`` if operator is None.

    The new value of a state is no graph output. :class:`GraphView` has it in ``new_values``.
    """

    operator: int | None
    position: int


class GraphView:
    """The numbered operators and named tensors of a graph in normal form, and the uses of each tensor.

    Inputs are named ``x0, x1, ...``, weights (constants, and tensors that were made weights, in the order of their
    first use) ``w0, w1, ...``, states, likewise, ``s0, s1, ...``, and output o of operator i ``t{i}.{o}``.

    Parameters
    ----------
    graph: NormalGraph
        The graph, as :func:`hidet_dist.normalize.normalize` makes it.
    symbols: sequence of SymbolPlan
        The sizes for which :meth:`shape` gives shapes; every symbolic dim of the graph must be among them.
    mesh: DeviceMesh, optional
        The mesh, which :meth:`pieces` of a graph with symbolic dims needs.

    Raises
    ------
    ConfigError
        When the graph is not in normal form, the size of a symbolic dim is not given or cannot be known from the shapes
        of the inputs, a dim has the size 0, or a tensor has a dtype that artifacts cannot hold, such as a complex one;
        or when two states have the same name, or one has two new values.
    """

    def __init__(self, graph: NormalGraph, symbols: Sequence[SymbolPlan] = (), mesh: DeviceMesh | None = None):
        if not isinstance(graph, NormalGraph):
            raise ConfigError(
                f"A {type(graph).__name__} is not known to be in normal form. Normalize the graph first, once: "
                "hidet_dist.normalize.normalize(graph)."
            )
        self.graph = graph
        self.operators: list[Operator] = list(graph.nodes)
        self.names: dict[hidet.Tensor, str] = {}
        self.tensors: dict[str, hidet.Tensor] = {}
        self.inputs: list[str] = []
        self.weights: list[str] = []
        self.states: list[str] = []
        for x in graph.inputs or []:
            if not is_weight(x):
                self.inputs.append(self._add(x, f"x{len(self.inputs)}"))
        for op, node in enumerate(self.operators):
            for x in node.inputs:
                self._add_leaf(x)
            for number, y in enumerate(node.outputs):
                self._add(y, f"t{op}.{number}")
        for y in graph.outputs:
            self._add_leaf(y)
        new = new_values(graph.outputs)
        made = set(new.values())
        self.outputs: list[str] = [self.names[y] for y in graph.outputs if y not in made and not is_state(y)]
        # Of each state that is updated its new value, and the operators that make it from the old one, in order.
        self.new_values: dict[str, str] = {self.names[old]: self.names[y] for old, y in new.items()}
        number_of = {op: number for number, op in enumerate(self.operators)} if new else {}
        self.updates: dict[int, str] = {
            number_of[op]: self.names[old] for old, y in new.items() for op in updates_of(y)
        }
        self._check_states()
        self.symbols = tuple(symbols)
        self.mesh = mesh
        sizes = {symbol.name: symbol.size for symbol in symbols}
        check_symbols(graph, list(sizes))
        self._check_dtypes()
        self._extents = {name: extents_of(tensor) for name, tensor in self.tensors.items()}
        self._shapes = {name: self._shape(name, sizes) for name in self.tensors}
        self._pieces: dict[str, tuple[tuple[int, ...], Element]] = {}
        self._signatures: dict[int, Hashable] = {}
        self._uses: list[tuple[str, Use]] = []
        self._fingerprint: str | None = None
        self._check_shapes()

    def _check_dtypes(self) -> None:
        for name, tensor in self.tensors.items():
            if tensor.dtype.name not in ITEMSIZE:
                raise ConfigError(
                    f"The tensor {name} of the graph has the dtype {tensor.dtype.name}, which artifacts and messages "
                    f"between ranks cannot hold: use one of {', '.join(ITEMSIZE)}."
                )

    def _check_shapes(self) -> None:
        for name, shape in self._shapes.items():
            if 0 in shape:
                raise ConfigError(
                    f"The tensor {name} of the graph has the shape {list(shape)}, with a dim of size 0: remove the "
                    "empty tensor from the graph."
                )

    def _add(self, tensor: hidet.Tensor, name: str) -> str:
        if tensor in self.names:
            return self.names[tensor]
        self.names[tensor] = name
        self.tensors[name] = tensor
        return name

    def _add_leaf(self, tensor: hidet.Tensor) -> None:
        """Name a tensor that nothing computes: a state, or else a weight."""
        if tensor not in self.names:
            kind, names = ("s", self.states) if is_state(tensor) else ("w", self.weights)
            names.append(self._add(tensor, f"{kind}{len(names)}"))

    def _check_states(self) -> None:
        """Refuse different states of one name. Raises ConfigError."""
        marks = [state_mark_of(self.tensors[name]) for name in self.states]
        known = Counter(mark.name for mark in marks if mark is not None)
        for name, count in known.items():
            if count > 1:
                raise ConfigError(
                    f"The graph has {count} states of the name {name!r}: use one tensor of hidet.distributed.state for "
                    "all uses of a state, and another name for another state."
                )

    def extents(self, name: str) -> tuple[Extent, ...]:
        """The shape of a tensor: ints, and expressions of symbolic dims."""
        return self._extents[name]

    def written(self, name: str) -> tuple[int | str, ...]:
        """The shape of a tensor with symbolic dims, these as text; empty for a fixed shape."""
        extents = self.extents(name)
        return () if all(isinstance(extent, int) for extent in extents) else _written(extents)

    def shape_of(self, tensor: hidet.Tensor) -> tuple[int, ...]:
        """Return the shape of a tensor; see :meth:`shape`."""
        return self.shape(self.names[tensor])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, in elements."""
        return self._shapes[name]

    def pieces(self, name: str) -> tuple[tuple[int, ...], Element]:
        """The pieces into which a tensor may be split: a shape that specs must fit, and the dtype or bytes of a piece.

        For a fixed shape, pieces are elements. A symbolic dim has as many pieces as the number that it is declared to
        be a multiple of, as far as that matters on the mesh. So it is never split into more, never padded, and never
        split by axes with shares, whatever the size planned for. Its pieces are accordingly larger.
        """
        if name not in self._pieces:
            self._pieces[name] = self._pieces_of(name)
        return self._pieces[name]

    def _pieces_of(self, name: str) -> tuple[tuple[int, ...], Element]:
        extents, dtype = self.extents(name), self.tensors[name].dtype
        if all(isinstance(extent, int) for extent in extents):
            return self.shape(name), dtype
        assert self.mesh is not None
        multiples = multiples_of(self.symbols)
        pieces = tuple(
            extent if isinstance(extent, int) else even_parts(divisor_of(extent, multiples), self.mesh)
            for extent in extents
        )
        return pieces, self.nbytes(name) // math.prod(pieces)

    def _shape(self, name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        try:
            return tuple(evaluate(extent, sizes) for extent in self.extents(name))
        except ValueError as error:
            raise ConfigError(f"The tensor {name} cannot be partitioned: {error}.") from error

    def itemsize(self, name: str) -> int:
        """Bytes of one element of a tensor."""
        return int(self.tensors[name].dtype.nbytes)

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor."""
        size = self.itemsize(name)
        for extent in self.shape(name):
            size *= extent
        return size

    def subgraph(self, operators: Sequence[int]) -> Subgraph:
        """Cut out operators, in ascending order, as a normal graph, which can be planned and compiled by itself.

        Raises ConfigError when the view has no such operators.
        """
        part = subgraph(self.graph, operators)
        return replace(part, graph=NormalGraph.of(part.graph, graph_symbols(self.graph)))

    def signature(self, number: int) -> Hashable:
        """Make a key of an operator that is equal for operators of the same definition and shapes, symbolic or not."""
        if number not in self._signatures:
            self._signatures[number] = signature_of(self.operators[number])
        return self._signatures[number]

    @cached_property
    def kinds(self) -> int:
        """The number of unlike operators."""
        return len({self.signature(number) for number in range(len(self.operators))})

    def uses(self) -> Iterator[tuple[str, Use]]:
        """Iterate over the uses of tensors by name, in execution order, graph outputs last."""
        if not self._uses:
            self._uses = [
                *(
                    (self.names[x], Use(op, position))
                    for op, node in enumerate(self.operators)
                    for position, x in enumerate(node.inputs)
                ),
                *((name, Use(None, position)) for position, name in enumerate(self.outputs)),
            ]
        return iter(self._uses)

    def fingerprint(self) -> str:
        """Digest the graph's structure (not its weights' values): a plan fits graphs of the same fingerprint."""
        if self._fingerprint is None:
            self._fingerprint = self._digest()
        return self._fingerprint

    def _digest(self) -> str:
        lines = [
            f"{name} {self.tensors[name].dtype.name} {_written(self.extents(name))}"
            for name in (*self.inputs, *self.weights, *self.states)
        ]
        for op, node in enumerate(self.operators):
            ins = " ".join(self.names[x] for x in node.inputs)
            outs = " ".join(f"{y.dtype.name}{list(_written(extents_of(y)))}" for y in node.outputs)
            lines.append(f"{op} {type(node).__name__} {ins} -> {outs}")
        lines.append(" ".join(self.outputs))
        if self.states:
            lines.append(" ".join(f"{old} = {new}" for old, new in self.new_values.items()))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def graph_symbols(graph: FlowGraph) -> list[str]:
    """The symbolic dims of a graph's inputs, in the order of their first use; of a part, those of the whole graph."""
    if isinstance(graph, NormalGraph) and graph.symbols:
        return list(graph.symbols)
    return symbols_in([extent for x in graph.inputs or [] for extent in extents_of(x)])


def check_symbols(graph: FlowGraph, known: Sequence[str]) -> None:
    """Refuse symbolic dims whose size is not given, or could not be derived from inputs at run time.

    Raises
    ------
    ConfigError
        When there is such a dim.
    """
    in_inputs = graph_symbols(graph)
    is_part = isinstance(graph, NormalGraph) and bool(graph.symbols)
    for number, x in enumerate(graph.inputs or []):
        for extent in extents_of(x):
            if not isinstance(extent, int | SymbolVar) and not is_part:
                raise ConfigError(
                    f"Input {number} has the dim {extent}; a dim of an input must be a number or a single symbol."
                )
    for name in symbols_in([extent for node in graph.nodes for y in node.outputs for extent in extents_of(y)]):
        if name not in in_inputs:
            raise ConfigError(f"The symbolic dim {name} is not a dim of any input, so its size would be unknown.")
    for name in in_inputs:
        if name not in known:
            raise ConfigError(
                f"The graph has the symbolic dim {name}: say what size to plan for, as in "
                f"optimization_config['symbols'] = {{{name!r}: 128}}."
            )


def _written(extents: Sequence[Extent]) -> tuple[int | str, ...]:
    return tuple(extent if isinstance(extent, int) else str(extent) for extent in extents)
