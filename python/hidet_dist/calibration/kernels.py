"""Probes of single kernels, built as for serving; the costs of kernel classes are fitted to their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import hidet
from hidet import ops
from hidet.graph import Operator, Tensor

from hidet_dist.calibration.samples import ROWS, KernelCalls, save_kernels
from hidet_dist.compile import compile_program
from hidet_dist.compile.build import CompiledProgram
from hidet_dist.compile.targets import default_backend
from hidet_dist.cost.model import PredictedCost, compute_seconds
from hidet_dist.cost.work import work_of
from hidet_dist.machine.builtin import builtin
from hidet_dist.machine.kernels import ATTENTION, Work, product_class
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.rules.rule import Choice, RuleTable
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh
from hidet_dist.view import GraphView
from hidet_dist.weights import weight
from hidet_dist.weights.panels import PRECISIONS, StoredPrecision
from hidet_dist.weights.storage import stored_as


@dataclass(frozen=True)
class KernelProbe:
    """Operators of one kernel class: ``call`` on inputs of ``shapes`` and ``dtype``, and on float32 ``weights``.

    The weights are held in ``precision`` if it is not empty.
    """

    kernel: str
    name: str
    shapes: Sequence[Sequence[int]]
    call: Callable[..., Tensor]
    weights: Sequence[Sequence[int]] = ()
    dtype: str = "float32"
    precision: str = ""

    @property
    def title(self) -> str:
        """The name of the probe's sample."""
        return f"{self.kernel} {self.name}"

    def trace(self) -> tuple[Tensor, list[Tensor]]:
        """Trace the probe; return its output and its inputs."""
        inputs = [hidet.symbol(list(shape), self.dtype, "cpu") for shape in self.shapes]
        weights = [weight(f"{self.title} {number}", shape, "float32") for number, shape in enumerate(self.weights)]
        if self.precision:
            precision, backend = StoredPrecision(self.precision), default_backend()
            storages = [backend.storage(precision, len(x.shape), False) for x in weights]
            weights = [x if one is None else stored_as(x, one) for x, one in zip(weights, storages, strict=True)]
        return self.call(*inputs, *weights), inputs


def _chained(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Apply ``product`` to one weight after the other."""

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = product(x, w)
        return x

    return call


def _conv3x3(x: Tensor, w: Tensor) -> Tensor:
    return ops.conv2d(x, w, padding=1)


def _biased(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return ops.matmul(x, w) + bias


def _heads(x: Tensor) -> Tensor:
    return ops.transpose(x, [0, 2, 1, 3])


def _scores(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    return ops.matmul(_heads(query), ops.transpose(key, [0, 2, 3, 1])) * 0.125 + mask


def _weighted(weights: Tensor, value: Tensor) -> Tensor:
    return ops.matmul(weights, _heads(value))


def _attention(query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> Tensor:
    scores = ops.matmul(_heads(query), ops.transpose(key, [0, 2, 3, 1])) * 0.125
    return ops.matmul(ops.softmax(scores + mask[0] if mask else scores, -1), _heads(value))


def _stored(precision: str) -> tuple[KernelProbe, KernelProbe]:
    """Make the probes of products of many rows, and of one row, by weights in a precision."""
    weights = [[2048, 2048]] * 8
    return (
        KernelProbe(
            product_class(precision), "rows", [[128, 2048]], _chained(ops.matmul), weights, "float32", precision
        ),
        KernelProbe(product_class(precision), "row", [[1, 2048]], _chained(ops.matmul), weights, "float32", precision),
    )


# Sizes are those of layers of transformers and convolutional networks. Probes of weights exceed any cache. Products are
# measured with the operators around them that models have and that their kernels absorb: these take other paths, with
# tiles and strides, than the product alone. The absorbed operators' part of the time is subtracted in the fit.
# Convolutions follow one another, as only the first and the last change the layout of images.
KERNEL_PROBES = (
    KernelProbe("matmul", "square", [[1024, 1024]] * 2, ops.matmul),
    KernelProbe("matmul", "wide", [[1024, 768], [768, 3072], [3072]], _biased),
    KernelProbe("matmul", "tall", [[1024, 384], [384, 1536], [1536]], _biased),
    KernelProbe("matmul", "scores", [[8, 128, 12, 32], [8, 128, 12, 32], [8, 1, 1, 128]], _scores),
    KernelProbe("matmul", "heads", [[8, 12, 128, 128], [8, 128, 12, 64]], _weighted),
    KernelProbe("matmul", "weights", [[128, 768]], _chained(ops.matmul), [[768, 3072], [3072, 768]] * 4),
    *(probe for precision in PRECISIONS for probe in _stored(precision)),
    KernelProbe("convolution", "wide", [[1, 64, 56, 56]], _chained(_conv3x3), [[64, 64, 3, 3]] * 4),
    KernelProbe("convolution", "deep", [[1, 256, 14, 14]], _chained(_conv3x3), [[256, 256, 3, 3]] * 4),
    KernelProbe(
        "convolution", "point", [[1, 256, 56, 56]], _chained(ops.conv2d), [[64, 256, 1, 1], [256, 64, 1, 1]] * 4
    ),
    KernelProbe(
        "convolution", "points", [[8, 1024, 14, 14]], _chained(ops.conv2d), [[256, 1024, 1, 1], [1024, 256, 1, 1]] * 2
    ),
    KernelProbe("convolution", "weights", [[1, 512, 7, 7]], _chained(_conv3x3), [[512, 512, 3, 3]] * 5),
    KernelProbe(ATTENTION, "narrow", [*[[8, 128, 12, 32]] * 3, [8, 1, 1, 128]], _attention),
    KernelProbe(ATTENTION, "wide", [[1, 197, 12, 64]] * 3, _attention),
    KernelProbe(ATTENTION, "long", [[1, 1024, 4, 64]] * 3, _attention),
    KernelProbe("normalization", "rows", [[1024, 384]], ops.layer_norm),
    KernelProbe("normalization", "few", [[128, 768]], ops.layer_norm),
    KernelProbe("reduction", "rows", [[96, 128, 128]], lambda x: ops.max(x, -1, keep_dim=True)),
    KernelProbe("reduction", "few", [[12, 128, 128]], lambda x: ops.sum(x, -1, keep_dim=True)),
    KernelProbe("pooling", "windows", [[1, 64, 112, 112]], lambda x: ops.max_pool2d(x, 3, 2, 1)),
    KernelProbe("lookup", "rows", [[1024]], lambda ids, table: ops.take(table, ids), [[ROWS, 384]], "int32"),
    KernelProbe("copy", "heads", [[8, 128, 12, 32]], _heads),
    KernelProbe("copy", "few heads", [[1, 128, 12, 64]], _heads),
    KernelProbe("elementwise", "sum", [[1024, 1024]] * 2, ops.add),
    KernelProbe("elementwise", "few", [[128, 768]] * 2, ops.add),
    KernelProbe("elementwise", "long", [[1024, 1024]], lambda x: ((x * 2.0 + 1.0) * x - 3.0) * x + 0.5),
    KernelProbe("function", "erf", [[1024, 1024]], ops.gelu),
    KernelProbe("function", "exp", [[1024, 1024]], ops.silu),
)


def build_kernels(mesh: DeviceMesh, file: Path) -> None:
    """Compile all probes as one program that every rank of the mesh runs whole, and save the list of its kernels."""
    traced = [probe.trace() for probe in KERNEL_PROBES]
    graph = normalize(hidet.trace_from([y for y, _ in traced], [x for _, inputs in traced for x in inputs]))
    plan = search(graph, builtin("cpu", mesh), allow=lambda _, spec: all(s.is_replicated for s in spec.in_specs)).plan
    compiled = compile_program(partition_graph(graph, plan.stages[0]))
    parts = zip(KERNEL_PROBES, compiled.graph.outputs, strict=True)
    save_kernels(file, [_calls(probe.title, y, compiled) for probe, y in parts])


def _calls(title: str, output: Tensor, compiled: CompiledProgram) -> KernelCalls:
    """List the kernel calls that compute an output."""
    kernel: dict[str, Path] = {}
    for node in compiled.graph.nodes:
        if str(node.task) not in kernel:
            kernel[str(node.task)] = compiled.kernels[len(kernel)]
    needed: set[Operator] = set()
    pending = [output]
    while pending:
        op = pending.pop().op
        if op is not None and op not in needed:
            needed.add(op)
            pending += op.inputs
    buffers: list[tuple[int, str]] = []
    buffer_of: dict[Tensor, int] = {}

    def buffer(x: Tensor) -> int:
        """Return the number of a tensor's buffer, which is added at the first call."""
        if x not in buffer_of:
            buffer_of[x] = len(buffers)
            count = 1
            for extent in x.shape:
                count *= int(extent)
            buffers.append((count * int(x.dtype.nbytes), x.dtype.name))
        return buffer_of[x]

    calls = []
    for node in compiled.graph.nodes:
        if node in needed:
            for y, x in node.share_map.items():
                buffer_of[node.outputs[y]] = buffer(node.inputs[x])
            calls.append((str(kernel[str(node.task)]), [buffer(x) for x in (*node.inputs, *node.outputs)]))
    return KernelCalls(title, buffers, calls)


class _Counting(PredictedCost):
    """A cost model that records the work of kernels as the search counts it."""

    def __init__(self, mesh: DeviceMesh):
        super().__init__(builtin("cpu", mesh))
        self.work: list[Work] = []

    def operator(self, op: Operator, choice: Choice) -> float:
        """Record an operator that has a kernel to itself."""
        return self._note(op, choice, None)

    def absorbed(
        self, op: Operator, choice: Choice, spared_bytes: int, launches: bool = False, work: str | None = None
    ) -> float:
        """Record an operator that shares a kernel with others."""
        return self._note(op, choice, spared_bytes, work)

    def _note(self, op: Operator, choice: Choice, spared_bytes: int | None, shared: str | None = None) -> float:
        if choice.read_bytes + choice.written_bytes:
            self.work.append(work_of(op, choice, self.cluster.mesh, spared_bytes, shared, self.cluster.device.fusion))
        return 0.0


def work_in(probe: KernelProbe) -> list[Work]:
    """Count the work of a probe as the search does."""
    y, inputs = probe.trace()
    view, mesh = GraphView(normalize(hidet.trace_from(y, inputs))), DeviceMesh((1,))
    table, counting = RuleTable(mesh), _Counting(mesh)
    fused = counting.fused(view)
    for number, op in enumerate(view.operators):
        replicated = next(choice for choice in table(op)[1] if all(spec.is_replicated for spec in choice.spec.in_specs))
        compute_seconds(counting, view, number, replicated, fused.get(number), mesh)
    return counting.work
