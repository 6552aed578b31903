"""The weights that ranks may hold in a lower precision: the right operands of products.

What else reads such a weight may be lookups alone, as where a table of embeddings is the matrix of the logits, too.
They keep the table in its own dtype, of which they read few rows; the products get a weight of their own beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.ops.transform import PermuteDimsOp

from hidet_dist.normalize.normal_form import NormalGraph
from hidet_dist.operators.sorting import ArgsortOp
from hidet_dist.rewriting import Uses, copy_operator, uses_of
from hidet_dist.spec.storage import WeightStorage
from hidet_dist.traits import RoutedMatrices, routed_of, traits_of
from hidet_dist.weights.named import is_weight
from hidet_dist.weights.storage import stored_as


@dataclass(frozen=True)
class StoredGraph:
    """A graph whose weights have storages.

    Attributes
    ----------
    graph: the graph.
    weights: the new tensor of each weight that products read in a storage.
    tables: those of them that lookups read as before.
    """

    graph: NormalGraph
    weights: dict[Tensor, Tensor]
    tables: Collection[Tensor] = frozenset()


def storable_weights(graph: FlowGraph, dtypes: Collection[str]) -> dict[Tensor, bool]:
    """Find the weights of some ``dtypes`` that products read, as the same matrices, and else nothing but lookups.

    Say which of them have the transposed matrices.

    Weights of routers are left out: a small error of theirs changes which experts compute a token.
    """
    uses, routers, inputs = uses_of(graph), _operands_of_routers(graph), set(graph.inputs or [])
    found = {}
    for x in uses:
        held = is_weight(x) or (x.storage is not None and x not in inputs)
        if held and x.dtype.name in dtypes and len(x.shape) > 1 and x not in routers:
            orders = _orders(x, uses, False)
            if len(orders) == 1 and None not in orders:
                found[x] = bool(orders.pop())
    return found


def tables_of(graph: FlowGraph) -> tuple[set[Tensor], set[Tensor]]:
    """Find the tensors that lookups read rows of, then those of them that nothing else reads."""
    uses = uses_of(graph)
    tables = {op.inputs[0] for op in graph.nodes if op.inputs and _looks_up(op, op.inputs[0])}
    return tables, {x for x in tables if all(_looks_up(op, x) for op in uses[x])}


def _orders(x: Tensor, uses: Uses, transposed: bool) -> set[bool | None]:
    """Say how products read a weight, or its transposed matrices; None stands for any other use."""
    orders: set[bool | None] = set()
    for op in uses.get(x, ()):
        if _looks_up(op, x):
            continue
        if isinstance(op, MatmulOp) and op.inputs[1] is x and op.inputs[0] is not x:
            orders.add(transposed != bool(op.attrs["transpose_b"]))
        elif (matrices := _routed_by(op, x)) is not None:
            orders.add(transposed != matrices.transposed)
        elif isinstance(op, PermuteDimsOp) and _swaps_last(op):
            swapped = op.outputs[0]
            orders |= _orders(swapped, uses, not transposed)
            if any(_looks_up(user, swapped) for user in uses.get(swapped, ())):
                orders.add(None)
        else:
            orders.add(None)
    return orders


def _routed_by(op: Operator, x: Tensor) -> RoutedMatrices | None:
    """The matrices of a tensor from which rows choose theirs, if an operator reads it once; None if there are none."""
    routed = routed_of(op)
    places = [place for place, y in enumerate(op.inputs) if y is x]
    if routed is None or len(places) > 1:
        return None
    return next((one for one in routed.matrices if one.weight == places[0]), None)


def _looks_up(op: Operator, x: Tensor) -> bool:
    """Whether an operator takes rows of a tensor, and reads nothing else of it."""
    return traits_of(op).kernel == "lookup" and [place for place, y in enumerate(op.inputs) if y is x] == [0]


def _swaps_last(op: Operator) -> bool:
    axes, count = [int(axis) for axis in op.attrs["axes"]], len(op.inputs[0].shape)
    return axes == [*range(count - 2), count - 1, count - 2]


def _operands_of_routers(graph: FlowGraph) -> set[Tensor]:
    """List the operands of products whose results are sorted before another product reads them."""
    sorted_ones: set[Tensor] = set()
    found: set[Tensor] = set()
    for op in reversed(graph.nodes):
        if isinstance(op, ArgsortOp) or any(y in sorted_ones for y in op.outputs):
            (found if traits_of(op).kernel == "matmul" else sorted_ones).update(op.inputs)
        elif isinstance(op, PermuteDimsOp) and op.outputs[0] in found:
            found.add(op.inputs[0])
    return found


def with_storages(
    graph: NormalGraph,
    dtypes: Collection[str],
    choose: Callable[[Tensor, bool], WeightStorage | None],
    excluded: Collection[Tensor] = (),
    tables: Collection[Tensor] | None = None,
) -> StoredGraph:
    """Give weights storages.

    Parameters
    ----------
    graph: NormalGraph
        The graph; it is not changed.
    dtypes: collection of str
        Those of weights that may have one.
    choose: callable
        Returns the storage of a weight, given whether it has transposed matrices; None for its own dtype.
    excluded: collection of Tensor
        Weights that keep their own dtype.
    tables: collection of Tensor, optional
        The weights that are held in their own dtype, too: by default those that lookups read.
    """
    tables = tables_of(graph)[0] if tables is None else tables
    weights: dict[Tensor, Tensor] = {}
    for x, transposed in storable_weights(graph, dtypes).items():
        storage = None if x in excluded else choose(x, transposed)
        if storage is not None:
            weights[x] = stored_as(x, storage, beside=x in tables)
    if not weights:
        return StoredGraph(graph, {})
    return StoredGraph(_with_others(graph, weights), weights, tables_of(graph)[0] & weights.keys())


def _with_others(graph: NormalGraph, others: Mapping[Tensor, Tensor]) -> NormalGraph:
    """Put other tensors in the place of weights, for all operators but lookups in them."""
    new = dict(others)
    for op in graph.nodes:
        inputs = [x if x in others and _looks_up(op, x) else new.get(x, x) for x in op.inputs]
        if any(x is not y for x, y in zip(inputs, op.inputs, strict=True)):
            new.update(zip(op.outputs, copy_operator(op, inputs), strict=True))
    given, tables = graph.inputs or [], tables_of(graph)[0]
    inputs = [*(new.get(x, x) for x in given), *(x for x in given if x in others and x in tables)]
    result = NormalGraph.of(FlowGraph([new.get(y, y) for y in graph.outputs], inputs), graph.symbols)
    result.update_nodes()
    return result
