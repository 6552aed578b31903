"""Search for the cheapest conversion between two layouts: a shortest path over the layouts of a tensor on the mesh."""

from __future__ import annotations

import heapq
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

from hidet_dist.errors import SpecError
from hidet_dist.machine import Cluster
from hidet_dist.reshard.buffers import StepBytes, step_bytes
from hidet_dist.reshard.cost import Element, Shard, StepWork, itemsize, seconds_of_work, step_work
from hidet_dist.reshard.steps import Moves, Offered, Step
from hidet_dist.spec import TensorShardSpec
from hidet_dist.spec.buffers import buffer_nbytes
from hidet_dist.spec.partial import Layout, PartialSpec, partial_axes, split_of
from hidet_dist.spec.parts import Parts

T = TypeVar("T")
_Sizes: TypeAlias = tuple[tuple[int, ...], int]  # a shape, and the bytes of what it counts

# Paths are compared in whole ticks of 2**-100 s. A tick count holds the 53 bits of any float from 1e-14 s up, so that
# sums are exact in any order: equal costs compare equal, and ties are broken as defined.
_TICKS_LOG2 = 100

# A tensor of five dims has 316 layouts over three mesh axes, 2721 over four and 25946 over five. On a mesh with more
# axes than this, a path uses only the axes of its source and target.
_DETOUR_AXES = 4

_MOST_KEPT = 2**21  # edges and nodes of trees, of about 100 bytes each


@dataclass(frozen=True)
class Conversion:
    """The steps from one layout to another, and their predicted time in seconds."""

    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    seconds: float

    def __str__(self) -> str:
        steps = "; ".join(map(str, self.steps)) or "nothing"
        return f"{self.source} -> {self.target}: {steps}, {self.seconds * 1e6:.1f} µs"


def cheapest_conversion(
    shape: Sequence[int], dtype: Element, source: Layout, target: Layout, cluster: Cluster
) -> Conversion:
    """Find the cheapest steps that convert a tensor of ``shape`` (whole, in elements) from ``source`` to ``target``.

    Dijkstra's algorithm runs over the layouts that fit the shape. :func:`hidet_dist.reshard.moves` lists the steps,
    :func:`hidet_dist.reshard.step_seconds` prices them. Among paths of equal cost, the path with the fewest collectives
    wins, then that with the fewest steps, then the first one in the order of ``moves``. On a mesh of more than four
    axes a path uses only the axes of the source and the target; on smaller meshes it may detour over any axis.

    Raises
    ------
    SpecError
        When a spec does not fit the shape or the mesh, or the target is partial where the source is not.
    """
    ((path,),) = _tabulate(_paths, shape, dtype, (source,), (target,), cluster)
    return Conversion(source, target, *path)


def conversion_seconds(
    shape: Sequence[int],
    dtype: Element,
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    cluster: Cluster,
) -> tuple[tuple[float, ...], ...]:
    """Predict the seconds of :func:`cheapest_conversion`, from each source (rows) to each target (columns).

    Raises SpecError as it does.
    """
    return _tabulate(_seconds, shape, dtype, sources, targets, cluster)


def conversion_collectives(
    shape: Sequence[int],
    dtype: Element,
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    cluster: Cluster,
) -> tuple[tuple[int, ...], ...]:
    """Count the collectives of :func:`cheapest_conversion`, from each source (rows) to each target (columns).

    Raises SpecError as it does.
    """
    return _tabulate(_collectives, shape, dtype, sources, targets, cluster)


def conversion_communication(
    shape: Sequence[int],
    dtype: Element,
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    cluster: Cluster,
) -> tuple[tuple[float, ...], ...]:
    """Predict the seconds of the collectives of :func:`cheapest_conversion`, without the copies before and after them.

    From each source (rows) to each target (columns). Raises SpecError as it does.
    """
    return _tabulate(_communication, shape, dtype, sources, targets, cluster)


def conversion_buffers(
    shape: Sequence[int],
    dtype: Element,
    sources: Sequence[TensorShardSpec],
    targets: Sequence[TensorShardSpec],
    cluster: Cluster,
    elements: _Sizes | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Compute the bytes that :func:`cheapest_conversion` takes, from each source (rows) to each target (columns).

    They are the peak bytes while it runs besides the source and the result, as of
    :func:`hidet_dist.reshard.buffers.conversion_nbytes`. Raises SpecError as it does. Where ``shape`` counts pieces of
    symbolic dims, ``elements`` are the shape in elements and the bytes of one: whether a step packs its data depends on
    them.
    """
    return _tabulate(_buffers, shape, dtype, sources, targets, cluster, elements)


def _tabulate(
    read: _Read[T],
    shape: Sequence[int],
    dtype: Element,
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    cluster: Cluster,
    elements: _Sizes | None = None,
) -> tuple[tuple[T, ...], ...]:
    """Check the layouts, and read a value of the cheapest path from each source (rows) to each target (columns).

    ``read`` takes the tree of a source, and the nodes of targets.
    """
    axes = tuple(range(cluster.mesh.ndim))
    pieces = tuple(shape), itemsize(dtype)
    # Paths lead through the parts of their ends, and the mesh's shares.
    offered = tuple(sorted({pair for layout in (*sources, *targets) for pair in split_of(layout).parts}))

    def graph_over(usable: tuple[int, ...]) -> _LayoutGraph:
        return _GRAPHS.of(_Layouts(pieces, elements or pieces, cluster, offered, usable))

    def value(source: Layout, target: Layout) -> T:
        graph = graph_over(tuple(axis for axis in axes if axis in _axes(source) | _axes(target)))
        (one,) = read(graph.tree(graph.number(source)), [graph.number(target)])
        return one

    with _GRAPHS.lock:
        if len(axes) > _DETOUR_AXES:
            _check(shape, sources, targets, cluster)
            return tuple(tuple(value(source, target) for target in targets) for source in sources)
        graph = graph_over(axes)
        _check(shape, sources, targets, cluster, graph.has)
        nodes = [graph.number(target) for target in targets]
        return tuple(tuple(read(graph.tree(graph.number(source)), nodes)) for source in sources)


def _check(
    shape: Sequence[int],
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    cluster: Cluster,
    fits: Callable[[Layout], bool] = lambda _: False,
) -> None:
    """Check that all conversions exist. Layouts of which ``fits`` tells it are known to fit. Raises SpecError."""
    for layout in dict.fromkeys((*sources, *targets)):
        if not fits(layout):
            layout.validate(shape, cluster.mesh, padded=True)
    for target in targets:
        if not isinstance(target, PartialSpec):
            continue
        for source in sources:
            if not set(target.mesh_axes) <= set(partial_axes(source)) or getattr(source, "op", "") != target.op:
                raise SpecError(
                    f"A tensor in {source} cannot become {target}: it is not partial over these axes by this op."
                )


def _axes(layout: Layout) -> set[int]:
    return {*split_of(layout).mesh_axes, *partial_axes(layout)}


class _Layouts(NamedTuple):
    """The layouts of a tensor through which paths may lead: those that steps over ``usable`` mesh axes make.

    Layouts and steps are those of ``pieces``, bytes those of ``elements``.
    """

    pieces: _Sizes
    elements: _Sizes
    cluster: Cluster
    offered: Offered
    usable: tuple[int, ...]


class _LayoutGraph:
    """The graph of layouts, expanded on demand: nodes are numbered layouts, edges are priced steps."""

    def __init__(self, layouts: _Layouts):
        shape, self._element_bytes = layouts.pieces
        self._moves = Moves(shape, layouts.cluster.mesh, layouts.usable, layouts.offered)
        self._elements = layouts.elements
        self._cluster = layouts.cluster
        self._layouts: list[Layout] = []
        self._shards: list[Shard] = []
        self._numbers: dict[Layout, int] = {}
        self._prices: dict[tuple[str, tuple[int, ...], str, Parts, StepWork], int] = {}
        self._edges: dict[int, list[tuple[int, int, Step]]] = {}
        self._bytes: dict[tuple[int, int], StepBytes] = {}
        self._nbytes: dict[int, int] = {}
        self._trees: dict[int, _Tree] = {}
        self.size = 0
        """Its edges, and the nodes of its trees."""

    def number(self, layout: Layout) -> int:
        """Return the number of a layout's node."""
        number = self._numbers.setdefault(layout, len(self._layouts))
        if number == len(self._layouts):
            self._layouts.append(layout)
            self._shards.append(Shard.of(self._moves.local_shape(layout), self._element_bytes))
        return number

    def has(self, layout: Layout) -> bool:
        """Tell whether a layout has a node: then it fits the tensor."""
        return layout in self._numbers

    def edges(self, node: int) -> list[tuple[int, int, Step]]:
        """List the edges from a node as (target node, price, step)."""
        if node not in self._edges:
            edges = []
            for step, layout in self._moves(self._layouts[node]):
                after = self.number(layout)
                edges.append((after, self._price(step, node, after), step))
            self._edges[node] = edges
            self.size += len(edges)
        return self._edges[node]

    def _price(self, step: Step, node: int, after: int) -> int:
        """Return the price of a step from a node to another one; steps that do the same work share it."""
        work = step_work(step, self._shards[node], self._shards[after], self._cluster)
        key = step.kind, step.mesh_axes, step.op, step.parts, work
        price = self._prices.get(key)
        if price is None:
            price = self._prices[key] = _price(step, seconds_of_work(step, work, self._cluster).whole)
        return price

    def communicate(self, node: int, after: int, step: Step) -> float:
        """Predict the seconds of the collective of the cheapest step from a node to another one; 0 of a local step."""
        work = step_work(step, self._shards[node], self._shards[after], self._cluster)
        return seconds_of_work(step, work, self._cluster).communicate

    def nbytes(self, node: int) -> int:
        """Compute the bytes of a shard's buffer in a layout."""
        if node not in self._nbytes:
            spec = split_of(self._layouts[node])
            self._nbytes[node] = buffer_nbytes(spec.local_nbytes(*self._elements, self._cluster.mesh))
        return self._nbytes[node]

    def step_bytes(self, node: int, after: int, step: Step) -> StepBytes:
        """Compute the bytes of the cheapest step from a node to another one."""
        if (node, after) not in self._bytes:
            source, target = split_of(self._layouts[node]), split_of(self._layouts[after])
            mesh, places = self._cluster.mesh, self._cluster.device.places_shards
            self._bytes[node, after] = step_bytes(step, source, target, *self._elements, mesh, places)
        return self._bytes[node, after]

    def tree(self, source: int) -> _Tree:
        """Return the tree of cheapest paths from a node."""
        if source not in self._trees:
            self._trees[source] = _Tree(self, source)
        return self._trees[source]


# A price is (ticks * _MOST + number of collectives) * _MOST + number of steps, so that one comparison orders by cost,
# then by collectives, then by length.
_MOST = 2**16
_TICKS = 2**_TICKS_LOG2


def _price(step: Step, seconds: float) -> int:
    return (int(math.ldexp(seconds, _TICKS_LOG2)) * _MOST + step.collective.communicates) * _MOST + 1


class _Tree:
    """The cheapest paths from one layout (E. W. Dijkstra, Numerische Mathematik 1, 1959), expanded on demand."""

    def __init__(self, graph: _LayoutGraph, source: int):
        self._graph = graph
        self._source = source
        self._most_bytes = {source: 0}
        self._sent = {source: 0.0}
        self._price = {source: 0}
        self._predecessors: dict[int, tuple[int, Step]] = {}
        self._settled: set[int] = set()
        # The second entry, the order of discovery, breaks ties between equal prices.
        self._queue = [(0, 0, source)]
        self._discovered = 1

    def prices(self, targets: Sequence[int]) -> list[int]:
        """Return the prices of the cheapest paths to nodes. They exist: gathering and slicing reach every spec."""
        settled, price = self._settled, self._price
        return [price[target] if target in settled else self._reach(target) for target in targets]

    def path(self, target: int) -> tuple[Step, ...]:
        """Return the steps of the cheapest path to a node."""
        self._reach(target)
        steps: list[Step] = []
        node = target
        while node in self._predecessors:
            node, step = self._predecessors[node]
            steps.insert(0, step)
        return tuple(steps)

    def buffers(self, targets: Sequence[int]) -> list[int]:
        """Compute the peak bytes of the cheapest paths to nodes besides the ends. No step may reduce."""
        graph, most, source = self._graph, self._most_bytes, self._source
        source_nbytes = graph.nbytes(source)
        for before, after, step in self._edges_beyond(targets, most):
            during = graph.step_bytes(before, after, step)
            most[after] = max(most[before], during.beside(source_nbytes, before == source))
        return [max(0, most[target] - source_nbytes - graph.nbytes(target)) for target in targets]

    def communication(self, targets: Sequence[int]) -> list[float]:
        """Predict the seconds of the collectives of the cheapest paths to nodes."""
        for before, after, step in self._edges_beyond(targets, self._sent):
            self._sent[after] = self._sent[before] + self._graph.communicate(before, after, step)
        return [self._sent[target] for target in targets]

    def _edges_beyond(self, targets: Sequence[int], known: Mapping[int, Any]) -> Iterator[tuple[int, int, Step]]:
        """Yield the edges of the paths to nodes, from the last node that is known on, which the caller makes known."""
        for target in targets:
            self._reach(target)
            path = [target]
            while path[-1] not in known:
                path.append(self._predecessors[path[-1]][0])
            before = path.pop()
            for after in reversed(path):
                yield before, after, self._predecessors[after][1]
                before = after

    def _reach(self, goal: int) -> int:
        """Expand the tree until it contains a node, and return the price of the path to it."""
        price, predecessors, queue = self._price, self._predecessors, self._queue
        found = len(price)
        while goal not in self._settled:
            so_far, _, node = heapq.heappop(queue)
            if node in self._settled:
                continue
            self._settled.add(node)
            for after, more, step in self._graph.edges(node):
                total = so_far + more
                if after not in price or total < price[after]:
                    price[after] = total
                    predecessors[after] = (node, step)
                    heapq.heappush(queue, (total, self._discovered, after))
                    self._discovered += 1
        self._graph.size += len(price) - found
        return price[goal]


class _Graphs:
    """The graphs that were used last: as many as have no more than ``most`` edges and nodes of trees together.

    Planning asks for the seconds of all tensors, then for the bytes of those for which memory is short. ``lock`` is
    held while a graph is used, as it grows.
    """

    def __init__(self, most: int):
        self._most = most
        self.clear()
        os.register_at_fork(after_in_child=self.clear)  # another thread may have held the lock

    def clear(self) -> None:
        """Forget all graphs."""
        self.lock = threading.Lock()
        self._known: OrderedDict[_Layouts, _LayoutGraph] = OrderedDict()
        self._size = 0  # of all but the last graph, which grows

    def of(self, layouts: _Layouts) -> _LayoutGraph:
        """Return the graph of layouts."""
        if self._known:
            self._size += next(reversed(self._known.values())).size
        graph = self._known.pop(layouts, None) or _LayoutGraph(layouts)
        self._size -= graph.size
        while self._known and self._size + graph.size > self._most:
            self._size -= self._known.popitem(last=False)[1].size
        self._known[layouts] = graph
        return graph


_GRAPHS = _Graphs(_MOST_KEPT)
_Read: TypeAlias = Callable[[_Tree, Sequence[int]], Sequence[T]]


def _seconds(tree: _Tree, targets: Sequence[int]) -> list[float]:
    """Return the seconds of the cheapest paths to nodes."""
    known: dict[int, float] = {}  # most paths have the price of another one
    prices = tree.prices(targets)
    for price in prices:
        if price not in known:
            known[price] = (price // _MOST**2) / _TICKS
    return [known[price] for price in prices]


def _collectives(tree: _Tree, targets: Sequence[int]) -> list[int]:
    """Count the steps of the cheapest paths to nodes that communicate."""
    return [price // _MOST % _MOST for price in tree.prices(targets)]


def _communication(tree: _Tree, targets: Sequence[int]) -> list[float]:
    """Predict the seconds of the collectives of the cheapest paths to nodes."""
    return tree.communication(targets)


def _buffers(tree: _Tree, targets: Sequence[int]) -> list[int]:
    """Compute the peak bytes of the cheapest paths to nodes besides the ends."""
    return tree.buffers(targets)


def _paths(tree: _Tree, targets: Sequence[int]) -> list[tuple[tuple[Step, ...], float]]:
    """Return the steps of the cheapest paths to nodes, and their seconds."""
    return [(tree.path(target), seconds) for target, seconds in zip(targets, _seconds(tree, targets), strict=True)]
