"""Programs with collectives that are started and waited for: the same answers, and no buffer reused in flight."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator

import hidet
import numpy as np
import pytest
from hidet import ops

from hidet_dist import native
from hidet_dist.compile.build import CompiledProgram, compile_program, optimize_program
from hidet_dist.machine import Cluster, Device, Link
from hidet_dist.normalize import normalize
from hidet_dist.overlap.emit import overlap_graph
from hidet_dist.partitioning import CommunicationOp, Program, WaitOp, partition_graph
from hidet_dist.runtime.launcher import Launcher
from hidet_dist.runtime.libraries import hidet_runtime
from hidet_dist.runtime.memory import HostMemory
from hidet_dist.search import search
from hidet_dist.simulate import simulate
from hidet_dist.spec import DeviceMesh, Plan

ROWS, WIDTH, LAYERS, RANKS = 6, 16, 4, 2
# Weights are gathered while products run, which take as long.
CLUSTER = Cluster(DeviceMesh((RANKS,)), (Link(1e-9, 1e9),), Device("toy", {"default": 2e9}, 1e12, 2**30, 0.0, True))


def gathered() -> tuple[hidet.FlowGraph, Plan]:
    """Layers of which each device holds half of every weight, and multiplies its half of the rows with all of it."""
    x = y = hidet.symbol([ROWS, WIDTH], "float32", "cpu")
    generator = np.random.default_rng(0)
    for _ in range(LAYERS):
        w = hidet.asarray(generator.standard_normal([WIDTH, WIDTH], np.float32), device="cpu")
        y = ops.tanh(ops.matmul(y, w)) + y
    graph = normalize(hidet.trace_from(y, [x]))
    pins = {f"w{number}": "(S0, R)" for number in range(LAYERS)}
    pins |= {f"op:Matmul#{number}": "(S0, R), (R, R) -> (S0, R)" for number in range(LAYERS)}
    return graph, search(graph, CLUSTER, pins=pins, report=False).plan


def branches() -> tuple[hidet.FlowGraph, Plan]:
    """A branch of which all is gathered while another computes, with as many buffers of the size of what is sent."""
    x = hidet.symbol([WIDTH, WIDTH], "float32", "cpu")
    generator = np.random.default_rng(0)

    def product(y: hidet.Tensor) -> hidet.Tensor:
        w = hidet.asarray(generator.standard_normal([WIDTH, WIDTH], np.float32), device="cpu")
        return ops.tanh(ops.matmul(y, w))

    left, right = product(x), x
    for _ in range(LAYERS):
        right = product(right)
    graph = normalize(hidet.trace_from(ops.matmul(right, left), [x]))
    pins = {f"op:Matmul#{number}": "(S0, R), (R, R) -> (S0, R)" for number in range(LAYERS + 2)}
    pins |= {f"op:Tanh#{number}": "(S0, R) -> (S0, R)" for number in range(LAYERS + 1)}
    return graph, search(graph, CLUSTER, pins=pins, report=False).plan


class Double:
    """A transport of two ranks that hold the same, which does the work only when it is waited for."""

    def __init__(self, delays: bool):
        self.delays = delays
        self.forked = False
        self.marked = 0
        self.asked: list[tuple[int, int, int]] = []  # what is copied: to, from, bytes
        self.late: list[tuple[int, list[tuple[int, int, int]]]] = []
        self.most = 0

        def refuse(*_: object) -> int:
            return 1

        self.table = native.make_transport(
            {**dict.fromkeys(native.TRANSPORT_FUNCTIONS, refuse), "all_gather": self.all_gather}
        )
        self.overlap = native.Overlap(
            None,
            native.ForkFunction(lambda _context: self.fork()),
            native.TicketFunction(lambda _context, ticket: self.mark(ticket)),
            native.TicketFunction(lambda _context, ticket: self.wait(ticket)),
        )

    def all_gather(self, send: int, recv: int, count: int, dtype: int, group: int) -> int:
        nbytes = count * native.dtype_size(dtype)
        copies = [(recv + rank * nbytes, send, nbytes) for rank in range(RANKS)]
        if self.delays and self.forked:
            ctypes.memset(recv, 0x7F, RANKS * nbytes)  # nothing to be read yet
            self.asked += copies
        else:
            self.copy(copies)
        return 0

    def copy(self, copies: list[tuple[int, int, int]]) -> None:
        for to, source, nbytes in copies:
            ctypes.memmove(to, source, nbytes)

    def fork(self) -> int:
        self.forked = True
        return 0

    def mark(self, ticket: int) -> int:
        assert ticket == self.marked + 1
        self.marked, self.forked = ticket, False
        self.late.append((ticket, self.asked))
        self.asked = []
        self.most = max(self.most, len(self.late))
        return 0

    def wait(self, ticket: int) -> int:
        while self.late and self.late[0][0] <= ticket:
            self.copy(self.late.pop(0)[1])
        return 0


@pytest.fixture
def bound() -> Iterator[list[int]]:
    handles: list[int] = []
    yield handles
    native.bind(None)
    for handle in handles:
        native.destroy_communicator(handle)


def run(
    compiled: CompiledProgram, program: Program, double: Double, x: np.ndarray, handles: list[int]
) -> tuple[np.ndarray, int]:
    """The results of a rank, launch after launch, and the communicator."""
    hidet_runtime()
    handle = native.create_communicator(double.table, (RANKS,), 0)
    handles.append(handle)
    native.set_overlap(handle, double.overlap)
    native.bind(handle)
    kernels = [ctypes.CDLL(str(path)) for path in compiled.kernels]
    table = [ctypes.cast(kernel.hidet_launch_0, ctypes.c_void_p).value or 0 for kernel in kernels]
    data = {name: np.ascontiguousarray(value.numpy()) for name, value in program.data_of(0).items()}
    data |= {name: value.numpy() for name, value in compiled.constants.items()}
    launcher = Launcher(
        ctypes.CDLL(str(compiled.launcher)),
        table,
        [data[name].ctypes.data for name in compiled.data],
        2,
        len(compiled.kernel_of_node),
        HostMemory(),
    )
    launcher.reserve(launcher.workspace_bytes())
    y = np.zeros_like(x)
    for _ in range(2):
        launcher.launch([x.ctypes.data, y.ctypes.data], (), lambda: None)
        assert native.error(handle) is None
    return y, handle


@pytest.mark.parametrize(("build", "rows", "least"), [(gathered, ROWS, LAYERS - 1), (branches, WIDTH, 1)])
def test_answers_are_the_same_when_what_was_started_happens_when_it_is_waited_for(
    bound: list[int], build: Callable[[], tuple[hidet.FlowGraph, Plan]], rows: int, least: int
) -> None:
    graph, plan = build()
    program = partition_graph(graph, plan.stages[0])
    plain = compile_program(program)
    overlapped = compile_program(partition_graph(graph, plan.stages[0]), overlap=CLUSTER)
    starts = [node for node in overlapped.graph.nodes if isinstance(node, CommunicationOp) and node.only_starts]
    waits = [node for node in overlapped.graph.nodes if isinstance(node, WaitOp)]
    assert len(starts) == len(waits) >= least
    x = np.random.default_rng(1).standard_normal([rows, WIDTH], np.float32)
    at_once, _ = run(plain, program, Double(False), x, bound)
    double = Double(True)
    late, handle = run(overlapped, program, double, x, bound)
    np.testing.assert_array_equal(late, at_once)
    assert native.overlapped(handle) == (2 * len(starts), 2 * len(waits))
    assert double.late == []
    assert double.most >= 1
    # Without an overlap of its own, a transport is done when it was started.
    native.set_overlap(handle, None)
    again, _ = run(overlapped, program, Double(False), x, bound)
    np.testing.assert_array_equal(again, at_once)


def test_an_overlapped_program_computes_what_the_graph_does() -> None:
    graph, plan = gathered()
    program = partition_graph(graph, plan.stages[0])
    optimized = optimize_program(program)
    before = Counter(node.kind for node in optimized.nodes if isinstance(node, CommunicationOp))
    order = [node.name for node in optimized.nodes]
    assert overlap_graph(optimized, CLUSTER) >= LAYERS - 1
    assert Counter(node.kind for node in optimized.nodes if isinstance(node, CommunicationOp)) == before
    assert [node.name for node in optimized.nodes] != order
    x = np.random.default_rng(1).standard_normal([ROWS, WIDTH], np.float32)
    (found,) = simulate(program, [x], optimized)
    np.testing.assert_allclose(found, graph(hidet.asarray(x)).numpy(), rtol=1e-4, atol=1e-4)
    # A gather goes beside a product, and is waited for in front of the next.
    names = [
        "start" if getattr(n, "only_starts", False) else "wait" if isinstance(n, WaitOp) else "run"
        for n in optimized.nodes
    ]
    at = names.index("start")
    assert "run" in names[at : at + names[at:].index("wait")]


def test_what_must_run_before_an_operator_is_waited_for_before_it() -> None:
    """As a collective that reads a state is before the state's update, which reads nothing of it."""
    graph, plan = gathered()
    program = partition_graph(graph, plan.stages[0])
    flying = []
    for is_free in (True, False):
        optimized = optimize_program(program)
        nodes = list(optimized.nodes)
        product = next(node for node in nodes if not isinstance(node, CommunicationOp) and node.name != "ShardSlice")
        gathers = [node for node in nodes[: nodes.index(product)] if isinstance(node, CommunicationOp)]
        overlap_graph(optimized, CLUSTER, earlier={} if is_free else {product: gathers})
        before = list(optimized.nodes)[: list(optimized.nodes).index(product)]
        starts = sum(isinstance(node, CommunicationOp) and node.only_starts for node in before)
        flying.append(starts - sum(isinstance(node, WaitOp) for node in before))
    assert flying[0] > 0 == flying[1]


def test_a_program_with_nothing_to_hide_behind_stays_as_it_is() -> None:
    x = hidet.symbol([ROWS, WIDTH], "float32", "cpu")
    graph = normalize(hidet.trace_from(ops.tanh(ops.matmul(x, hidet.randn([WIDTH, WIDTH], device="cpu"))), [x]))
    pins = {"w0": "(S0, R)", "op:0": "(R, S0), (S0, R) -> (R, R)"}
    optimized = optimize_program(partition_graph(graph, search(graph, CLUSTER, pins=pins).plan.stages[0]))
    nodes = list(optimized.nodes)
    assert any(isinstance(node, CommunicationOp) for node in nodes)
    assert overlap_graph(optimized, CLUSTER) == 0
    assert list(optimized.nodes) == nodes


def test_waiting_for_what_was_not_started_is_an_error(bound: list[int]) -> None:
    double = Double(True)
    handle = native.create_communicator(double.table, (RANKS,), 0)
    bound.append(handle)
    assert native.start(8) == native.NO_COMMUNICATOR
    native.bind(handle)
    assert native.wait(8) == native.INVALID_ARGUMENT
    assert "no collective was started that receives there" in str(native.error(handle))
    assert native.start(8) == native.FAILED
    assert native.started(8) == native.FAILED
    assert native.wait(8) == native.FAILED


def test_a_later_collective_that_was_waited_for_has_carried_the_earlier_ones(bound: list[int]) -> None:
    double = Double(True)
    handle = native.create_communicator(double.table, (RANKS,), 0)
    bound.append(handle)
    native.set_overlap(handle, double.overlap)
    native.bind(handle)
    sent = np.arange(3, dtype=np.float32)
    received = [np.zeros(6, np.float32) for _ in range(2)]
    for y in received:
        assert native.start(y.ctypes.data) == native.OK
        assert native.all_gather(sent.ctypes.data, y.ctypes.data, 3, native.dtype_code("float32"), 1) == native.OK
        assert native.started(y.ctypes.data) == native.OK
    assert not any((y[:3] == sent).all() for y in received)
    assert native.wait(received[1].ctypes.data) == native.OK
    assert all((y == np.tile(sent, 2)).all() for y in received)
    assert native.wait(received[0].ctypes.data) == native.OK
    assert native.overlapped(handle) == (2, 2)


@pytest.mark.parametrize("status", [1, 5])
def test_a_failing_overlap_fails_the_communicator(bound: list[int], status: int) -> None:
    double = Double(True)
    double.fork = lambda: status  # type: ignore[method-assign]
    handle = native.create_communicator(double.table, (RANKS,), 0)
    bound.append(handle)
    native.set_overlap(handle, double.overlap)
    native.bind(handle)
    assert native.start(8) == native.FAILED
    assert f"start: failed with status {status}" in str(native.error(handle))
