"""Overlap in a compiled program: starts of collectives and waits for them, in the order of a schedule.

Memory is safe by construction: a :class:`WaitOp` reads the received and the sent tensor of its collective. The
launcher frees a buffer after its last reader, so neither buffer is reused in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hidet.graph import FlowGraph, Operator, Tensor

from hidet_dist.cost.model import PredictedCost
from hidet_dist.cost.work import local_nbytes
from hidet_dist.errors import CompileError
from hidet_dist.machine import Cluster
from hidet_dist.overlap.streams import RUN, START, Launch, StreamTask, schedule
from hidet_dist.partitioning.collective_op import CollectiveOp
from hidet_dist.partitioning.operators import CommunicationOp, WaitOp
from hidet_dist.spec.buffers import buffer_nbytes


def overlap_graph(
    graph: FlowGraph,
    cluster: Cluster,
    sizes: Mapping[str, int] | None = None,
    room: int | None = None,
    earlier: Mapping[Operator, Sequence[Operator]] = MappingProxyType({}),
) -> int:
    """Put an optimized program into the order of its schedule on two streams, in place.

    Parameters
    ----------
    graph: FlowGraph
        The optimized program. Its nodes are reordered, and collectives that overlap computation are split into a start
        and a wait. It must not be analysed anew, which would lose the order.
    cluster: Cluster
        The machine whose predicted times the schedule is based on.
    sizes: mapping, optional
        The sizes of symbolic dims for which times are predicted.
    room: int, optional
        The bytes of intermediate results up to which overlap may raise the peak.
    earlier: mapping, optional
        For some operators those that must have run before them although they make nothing that these read, such as the
        readers of a state before its update. Collectives among them are waited for.

    Returns
    -------
    The number of collectives that are started early.
    """
    nodes = list(graph.nodes)
    tasks = _tasks(graph, cluster, sizes or {}, earlier)
    launches = schedule(tasks, room).launches
    split = _split(launches)
    if not split:
        return 0
    replaced: dict[Tensor, Tensor] = {}
    started: dict[int, CommunicationOp] = {}
    held: dict[Tensor, tuple[Tensor, ...]] = {}  # the sent tensors of each received tensor that is not waited for
    order: list[Operator] = []
    for launch in launches:
        node = nodes[launch.task]
        if launch.what == RUN or (launch.what == START and launch.task not in split):
            node.inputs = [replaced.get(x, x) for x in node.inputs]
            order.append(node)
        elif launch.what == START:
            assert isinstance(node, CommunicationOp)
            (x,) = (replaced.get(x, x) for x in node.inputs)
            start = node.reforward([x], {"only_starts": True})[0].op
            started[launch.task] = start
            replaced[node.outputs[0]] = start.outputs[0]
            held[start.outputs[0]] = (x, *held.get(x, ()))
            order.append(start)
        elif launch.task in split:
            received = started[launch.task].outputs[0]
            wait = WaitOp(received, *held.pop(received))
            replaced[nodes[launch.task].outputs[0]] = wait.outputs[0]
            order.append(wait)
    graph.outputs = [replaced.get(y, y) for y in graph.outputs]
    graph.update_nodes()
    if set(graph.nodes) != set(order):
        raise CompileError("The schedule of the program has other operators than the program.")
    graph._nodes = order
    return len(started)


def _split(launches: Sequence[Launch]) -> set[int]:
    """Select the collectives to start early: something runs between their start and the wait for them."""
    result: set[int] = set()
    flying: list[int] = []
    beside = False
    for launch in launches:
        if launch.what == START:
            beside = beside or bool(flying)
            flying.append(launch.task)
        elif launch.what == RUN:
            beside = beside or bool(flying)
        else:
            # Earlier collectives have ended, too.
            ended = flying[: flying.index(launch.task) + 1] if launch.task in flying else []
            del flying[: len(ended)]
            result.update(ended if beside else ())
            beside = bool(flying)
    return result


def _tasks(
    graph: FlowGraph, cluster: Cluster, sizes: Mapping[str, int], earlier: Mapping[Operator, Sequence[Operator]]
) -> list[StreamTask]:
    number = {node: n for n, node in enumerate(graph.nodes)}
    outputs = set(graph.outputs)
    model = _ProgramCost(cluster, sizes)
    tasks = []
    for node in graph.nodes:
        made = {number[x.op] for x in node.inputs if x.op in number}
        reads = tuple(sorted(made | {number[other] for other in earlier.get(node, ())}))
        aliases = None
        if node.share_map:
            source = node.inputs[node.share_map[0]].op
            aliases = number.get(source)
        written = [] if node.share_map else [y for y in node.outputs if y not in outputs]
        nbytes = sum(buffer_nbytes(local_nbytes(y, sizes)) for y in written)
        communicates = isinstance(node, CollectiveOp) and node.can_start
        tasks.append(StreamTask(model.seconds(node), communicates, reads, nbytes, aliases))
    return tasks


class _ProgramCost:
    """The seconds of a program's operators, by the cost model of the search; equal operators are costed once."""

    def __init__(self, cluster: Cluster, sizes: Mapping[str, int]):
        self.cluster, self.sizes = cluster, sizes
        self.model = PredictedCost(cluster)
        self.known: dict[tuple[str, tuple[bool, ...]], float] = {}

    def seconds(self, node: Operator) -> float:
        """Predict the seconds of an operator or a collective."""
        if node.share_map:
            return 0.0
        if isinstance(node, CollectiveOp):
            whole = node.whole_nbytes(local_nbytes(node.inputs[0], self.sizes))
            return self.cluster.collective_seconds(node.collective, whole, node.mesh_axes)
        key = str(node.task), tuple(x.storage is not None for x in node.inputs)
        if key not in self.known:
            self.known[key] = self.model.local(node, self.sizes)
        return self.known[key]
