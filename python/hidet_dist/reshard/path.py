"""Search for the cheapest conversion between two layouts: a shortest path over the layouts of a tensor on the mesh."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from hidet_dist.errors import SpecError
from hidet_dist.machine import Cluster
from hidet_dist.native.search.paths import NativePaths, Nodes, nodes_of
from hidet_dist.reshard.alike import AlikeLayouts, alike_dims
from hidet_dist.reshard.buffers import StepBytes, step_bytes
from hidet_dist.reshard.cost import Element, Shard, itemsize, seconds_of_work, step_work
from hidet_dist.reshard.steps import Offered, Step, StepMoves
from hidet_dist.spec import TensorShardSpec
from hidet_dist.spec.buffers import buffer_nbytes
from hidet_dist.spec.partial import Layout, PartialSpec, partial_axes, split_of
from hidet_dist.spec.parts import Parts

T = TypeVar("T")
_Sizes: TypeAlias = tuple[tuple[int, ...], int]  # a shape, and the bytes of what it counts

# A tensor of five dims has 316 layouts over three mesh axes, 2721 over four and 25946 over five. On a mesh with more
# axes than this, a path uses only the axes of its source and target.
_DETOUR_AXES = 4

_MOST_KEPT = 2**21  # edges and nodes of trees, of 48 to 100 bytes each


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
    ((path,),) = _tabulate(_LayoutGraph.paths, shape, dtype, (source,), (target,), cluster)
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
    return _tabulate(_LayoutGraph.seconds, shape, dtype, sources, targets, cluster)


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
    return _tabulate(_LayoutGraph.collectives, shape, dtype, sources, targets, cluster)


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
    return _tabulate(_LayoutGraph.communication, shape, dtype, sources, targets, cluster)


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
    return _tabulate(_LayoutGraph.buffers, shape, dtype, sources, targets, cluster, elements)


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

    ``read`` takes the graph of the layouts, and the nodes of the source and of the targets.
    """
    axes = tuple(range(cluster.mesh.ndim))
    pieces = tuple(shape), itemsize(dtype)

    def graph_over(offered: Offered, usable: tuple[int, ...]) -> _LayoutGraph:
        return _GRAPHS.of(_Layouts(pieces, elements or pieces, cluster, offered, usable))

    def value(source: Layout, target: Layout) -> T:
        usable = tuple(axis for axis in axes if axis in _axes(source) | _axes(target))
        graph = graph_over(_parts_of_ends(source, target), usable)
        (one,) = read(graph, graph.number(source), nodes_of([graph.number(target)]))
        return one

    def rows() -> Iterator[tuple[T, ...]]:
        within: dict[Parts, list[tuple[_LayoutGraph, Nodes, list[int]]]] = {}  # by the parts of a source
        for source in sources:
            parts = split_of(source).parts
            if parts not in within:
                numbers: dict[Offered, list[int]] = {}
                for number, target in enumerate(targets):
                    numbers.setdefault(_parts_of_ends(source, target), []).append(number)
                within[parts] = []
                for offered, own in numbers.items():
                    graph = graph_over(offered, axes)
                    within[parts].append((graph, nodes_of([graph.number(targets[number]) for number in own]), own))
            values: dict[int, T] = {}
            for graph, nodes, own in within[parts]:
                values.update(zip(own, read(graph, graph.number(source), nodes), strict=True))
            yield tuple([values[number] for number in range(len(targets))])

    with _GRAPHS.lock:
        if len(axes) > _DETOUR_AXES:
            _check(shape, sources, targets, cluster)
            return tuple(tuple(value(source, target) for target in targets) for source in sources)
        if not any(split_of(layout).parts for layout in (*sources, *targets)):
            graph = graph_over((), axes)
            _check(shape, sources, targets, cluster, graph.has)
            nodes = nodes_of([graph.number(target) for target in targets])
            return tuple(tuple(read(graph, graph.number(source), nodes)) for source in sources)
        _check(shape, sources, targets, cluster)
        return tuple(rows())


def _parts_of_ends(source: Layout, target: Layout) -> Offered:
    """List the parts through which a path leads, besides the mesh's shares: those of its ends.

    With parts of a third layout, a path would depend on what else is asked for.
    """
    return tuple(sorted({*split_of(source).parts, *split_of(target).parts}))


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
    """The graph of a tensor's layouts, expanded on demand: nodes are numbered layouts, edges are priced steps."""

    def __init__(self, layouts: _Layouts, alike: AlikeLayouts):
        shape, self._element_bytes = layouts.pieces
        self._alike = alike
        self._moves = StepMoves(shape, layouts.cluster.mesh)
        self._elements = layouts.elements
        self._cluster = layouts.cluster
        self._paths = NativePaths()
        self._shards: dict[int, Shard] = {}
        self._bytes: dict[tuple[int, int], StepBytes] = {}
        self._nbytes: dict[int, int] = {}
        self._most_bytes: dict[int, dict[int, int]] = {}
        self._sent: dict[int, dict[int, float]] = {}

    @property
    def size(self) -> int:
        """Its edges, and the nodes of its trees."""
        return self._paths.size

    def number(self, layout: Layout) -> int:
        """Return the number of a layout's node."""
        return self._alike.number(layout)

    def has(self, layout: Layout) -> bool:
        """Tell whether a layout has a node: then it fits the tensor."""
        return self._alike.has(layout)

    def _expand(self, node: int) -> None:
        """Give the prices of the steps that apply to a node's layout."""
        steps = self._alike.steps(node)
        sent = self._shard(node).nbytes
        seconds = [
            self._alike.seconds(kind, sent, self._shard(after).nbytes)
            for kind, after in zip(steps.kinds, steps.after, strict=True)
        ]
        self._paths.expand(node, steps.after, seconds, steps.communicates)

    def _shard(self, node: int) -> Shard:
        shard = self._shards.get(node)
        if shard is None:
            local_shape = self._moves.local_shape(self._alike.layouts[node])
            shard = self._shards[node] = Shard.of(local_shape, self._element_bytes)
        return shard

    def seconds(self, source: int, targets: Nodes) -> list[float]:
        """Predict the seconds of the cheapest paths to nodes. They exist: gathering and slicing reach every spec."""
        self._paths.reach(source, targets, self._expand)
        return self._paths.seconds(source, targets)

    def collectives(self, source: int, targets: Nodes) -> list[int]:
        """Count the steps of the cheapest paths to nodes that communicate."""
        self._paths.reach(source, targets, self._expand)
        return self._paths.communicating(source, targets)

    def paths(self, source: int, targets: Nodes) -> list[tuple[tuple[Step, ...], float]]:
        """Return the steps of the cheapest paths to nodes, and their seconds."""
        seconds = self.seconds(source, targets)
        steps = (tuple(step for _, _, step in self._edges(source, target, {source})) for target in targets)
        return list(zip(steps, seconds, strict=True))

    def buffers(self, source: int, targets: Nodes) -> list[int]:
        """Compute the peak bytes of the cheapest paths to nodes besides the ends. No step may reduce."""
        most = self._most_bytes.setdefault(source, {source: 0})
        source_nbytes = self._node_nbytes(source)
        self._paths.reach(source, targets, self._expand)
        for target in targets:
            for before, after, step in self._edges(source, target, most):
                during = self._step_bytes(before, after, step)
                most[after] = max(most[before], during.beside(source_nbytes, before == source))
        return [max(0, most[target] - source_nbytes - self._node_nbytes(target)) for target in targets]

    def communication(self, source: int, targets: Nodes) -> list[float]:
        """Predict the seconds of the collectives of the cheapest paths to nodes."""
        sent = self._sent.setdefault(source, {source: 0.0})
        self._paths.reach(source, targets, self._expand)
        for target in targets:
            for before, after, step in self._edges(source, target, sent):
                sent[after] = sent[before] + self._communicate(before, after, step)
        return [sent[target] for target in targets]

    def _edges(self, source: int, target: int, known: Container[int]) -> list[tuple[int, int, Step]]:
        """List the edges of the path to a node from the last node on that is known."""
        edges = []
        while target not in known:
            before, number = self._paths.last_edge(source, target)
            edges.append((before, target, self._alike.steps(before).steps[number]))
            target = before
        return edges[::-1]

    def _communicate(self, node: int, after: int, step: Step) -> float:
        """Predict the seconds of the collective of a step from a node to another one; 0 of a local step."""
        work = step_work(step, self._shard(node), self._shard(after), self._cluster)
        return seconds_of_work(step, work, self._cluster).communicate

    def _node_nbytes(self, node: int) -> int:
        """Compute the bytes of a shard's buffer in a layout."""
        if node not in self._nbytes:
            spec = split_of(self._alike.layouts[node])
            self._nbytes[node] = buffer_nbytes(spec.local_nbytes(*self._elements, self._cluster.mesh))
        return self._nbytes[node]

    def _step_bytes(self, node: int, after: int, step: Step) -> StepBytes:
        """Compute the bytes of a step from a node to another one."""
        if (node, after) not in self._bytes:
            source, target = (split_of(self._alike.layouts[number]) for number in (node, after))
            mesh, places = self._cluster.mesh, self._cluster.device.places_shards
            self._bytes[node, after] = step_bytes(step, source, target, *self._elements, mesh, places)
        return self._bytes[node, after]


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
        self._alike: WeakValueDictionary[Hashable, AlikeLayouts] = WeakValueDictionary()
        self._size = 0  # of all but the last graph, which grows

    def of(self, layouts: _Layouts) -> _LayoutGraph:
        """Return the graph of layouts."""
        if self._known:
            self._size += next(reversed(self._known.values())).size
        graph = self._known.pop(layouts, None) or _LayoutGraph(layouts, self._alike_of(layouts))
        self._size -= graph.size
        while self._known and self._size + graph.size > self._most:
            self._size -= self._known.popitem(last=False)[1].size
        self._known[layouts] = graph
        return graph

    def _alike_of(self, layouts: _Layouts) -> AlikeLayouts:
        """Return the layouts that a tensor shares with those whose dims are alike, as long as one of them is kept."""
        shape, _ = layouts.pieces
        cluster, usable, offered = layouts.cluster, layouts.usable, layouts.offered
        key = alike_dims(shape, cluster, offered), cluster, usable, offered
        alike = self._alike.get(key)
        if alike is None:
            alike = self._alike[key] = AlikeLayouts(shape, cluster, usable, offered)
        return alike


_GRAPHS = _Graphs(_MOST_KEPT)
_Read: TypeAlias = Callable[[_LayoutGraph, int, Nodes], Sequence[T]]
