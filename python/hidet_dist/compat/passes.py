"""hidet 0.6.1's optimization is a fixed list of passes, made for GPUs; here one is added and some are skipped.

The skipped passes convert graphs with float16 convolutions to channels last, for kernels that only CUDA has, and look
for operators to quantize, which takes time even if there are none.

Its fusion has no limit on the size of a fused operator, and the time of inferring its types grows more than
quadratically: a chain of 200 element-wise operators did not finish in 200 s. A limit makes the time linear. It also
derives the definition of each fused operator, though most layers of a model have the same ones, and it walks the graph
once for each kind of operator that can be resolved, present or not.

Kernels are lowered by a fixed list of passes, too; those for CUDA's tensor cores are skipped as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hidet.transforms
from hidet.graph import FlowGraph, Operator, Tensor, transforms
from hidet.graph.transforms import GraphPass, fuse_operator, resolve_variant
from hidet.ir.module import IRModule
from hidet.ir.task import Task
from hidet.transforms.base import Pass
from hidet.utils.py import repeat_until_converge

from hidet_dist.compat.definitions import bound_in, renamed_task
from hidet_dist.compat.replacing import replaced
from hidet_dist.rewriting import Repeated, copy_operator
from hidet_dist.targets import target_of_memory

_FOR_TENSOR_CORES = (
    "lower_cute_dialect_pass",
    "instantiate_auto_annotation_pass",
    "vectorize_elementwise_pass",
    "instruction_selection_pass",
    "resolve_bank_conflict_pass",
    "annotate_mbarrier_pass",
    "tma_fallback_copy_pass",
    "shared_memory_allocation_pass",
)


MOST_FUSED = 32
"""The most operators that are fused into one."""


class _Before(GraphPass):
    def __init__(self, first: Callable[[FlowGraph], FlowGraph], then: GraphPass):
        super().__init__()
        self.first = first
        self.then = then

    def process_graph(self, graph: FlowGraph) -> FlowGraph:
        return self.then(self.first(graph))


class _Nothing(GraphPass):
    def process_graph(self, graph: FlowGraph) -> FlowGraph:
        return graph


@contextmanager
def cpu_passes(before_fusion: Callable[[FlowGraph], FlowGraph]) -> Iterator[None]:
    """Let ``hidet.graph.optimize`` rewrite graphs by ``before_fusion``, between resolving and fusing operators."""
    fusion = transforms.fuse_operator_pass
    with (
        replaced(transforms, {"fuse_operator_pass": lambda: _Before(before_fusion, fusion())}),
        replaced(transforms, dict.fromkeys(("conv_channel_last_pass", "selective_quantize_pass"), _Nothing)),
    ):
        yield


_injective = Task.is_injective


def _is_injective(task: Task) -> bool:
    """Whether each output element of a task is computed from single elements: equal layers share the task."""
    known = vars(task).get("_is_injective")
    if known is None:
        known = vars(task)["_is_injective"] = bool(_injective(task))
    return known


_PLAIN = (bool, int, float, str, type(None))


class _ResolvedOnce:
    """Rules that resolve an operator to a variant; operators that are copies of another get copies of its variant.

    That suits the rules of targets that look at an operator, and at those whose results it reads. Others look further,
    and keep their results by themselves.
    """

    def __init__(self, chain: Any, known: Repeated):
        self.chain = chain
        self.known = known

    def resolve(self, op: Operator) -> Sequence[Tensor] | None:
        """Resolve an operator; None if no rule does."""
        known_values = any(x.storage is not None for x in op.inputs)  # which rules read
        plain = all(isinstance(value, _PLAIN) for value in op.attrs.values())
        if known_values or not plain or not target_of_memory(op.build_target).resolves_locally:
            outputs: Sequence[Tensor] | None = self.chain.resolve(op)
            return outputs
        read = tuple(
            None if x.op is None else (type(x.op), x.op.task, *(y.op is None for y in x.op.inputs)) for x in op.inputs
        )
        key = type(op), op.task, tuple(sorted(op.attrs.items())), read
        return self.known(key, op.inputs, lambda: list(self.chain.resolve(op) or ())) or None


class _ResolvePresent(GraphPass):
    """hidet's pass that resolves operators to variants, each variant once.

    It does not walk the graph for operators that the graph lacks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known = Repeated()

    def process_graph(self, graph: FlowGraph) -> FlowGraph:
        return repeat_until_converge(self.resolved, graph, limit=None)

    def resolved(self, graph: FlowGraph) -> FlowGraph:
        for kind, chain in resolve_variant.registered_resolve_rules.items():
            if any(isinstance(node, kind) for node in graph.nodes):
                graph = resolve_variant.ResolveVariantRewriter(kind, _ResolvedOnce(chain, self.known))(graph)
        return graph


class _UntilFull:
    """hidet's map from operators to fusion groups; once a group is full, every operator appears to have a group.

    hidet adds an operator to a group only if it has none. If ``frugal``, those appear to have one, too, that would need
    more memory within the group than by themselves.
    """

    def __init__(self, groups: dict[Operator, Any], group: Any, frugal: bool):
        self.groups = groups
        self.group = group
        self.frugal = frugal

    def __contains__(self, op: Operator) -> bool:
        if op in self.groups or len(self.group.operators) >= MOST_FUSED:
            return True
        return self.frugal and takes_memory(op, self.group.input_tensors, self.group.output_tensors)

    def __getitem__(self, op: Operator) -> Any:
        return self.groups.get(op)

    def __setitem__(self, op: Operator, group: Any) -> None:
        self.groups[op] = group


def takes_memory(op: Operator, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> bool:
    """Tell whether a group that reads ``inputs`` and makes ``outputs`` holds more with a neighbour, ``op``, in it.

    The tensor between them is not held then. In its place, an operator before the group has its inputs held until the
    group is done, and one behind has its result held from where the group begins. Weights, graph inputs and constants
    are held anyway. Tensors of symbolic sizes count as too large.
    """
    read = set(inputs)
    between = read.intersection(op.outputs)
    held = {x for x in op.inputs if x.op is not None} - read
    if not between:
        between, held = set(outputs).intersection(op.inputs), set(op.outputs)
    if not all(isinstance(extent, int) for x in (*held, *between) for extent in x.shape):
        return True
    return sum(map(_nbytes, held)) > sum(map(_nbytes, between))


def _nbytes(x: Tensor) -> int:
    return math.prod(x.shape) * int(x.dtype.nbytes)


Fuse = Callable[[Sequence[Operator], Any, Any], None]


def _bounded(fuse: Fuse, frugal: bool) -> Fuse:
    def fuse_until_full(anchors: Sequence[Operator], usage: Any, groups: dict[Operator, Any]) -> None:
        for anchor in anchors:
            fuse([anchor], usage, _UntilFull(groups, groups[anchor], frugal))

    return fuse_until_full


_FUSED_BY = ("fuse_epilogue_operators", "fuse_prologue_operators")


class _Fused:
    """The operators that hidet makes of groups of operators; equal groups get copies of one operator.

    Groups are equal if they have the same tasks, connected alike.
    """

    def __init__(self) -> None:
        self.make: Callable[..., Operator] = fuse_operator.operator_from_sub_graph
        self.known: dict[Any, Operator] = {}

    def operator(self, group: Any, replaced_tensors: dict[Tensor, Tensor]) -> Operator:
        """Make the operator of a group; replaces ``operator_from_sub_graph``."""
        if len(group.operators) == 1:
            return self.make(group, replaced_tensors)
        number = {x: place for place, x in enumerate(group.input_tensors)}
        parts: list[Any] = []
        for op in group.operators:
            parts.append((type(op), op.task, tuple(number[x] for x in op.inputs)))
            for y in op.outputs:
                number[y] = len(number)
        key = (*parts, group.operators.index(group.anchor), *(number[y] for y in group.output_tensors))
        if key not in self.known:
            with _distinct_tasks(group.operators):
                self.known[key] = self.make(group, replaced_tensors)
            return self.known[key]
        inputs = [replaced_tensors.get(x, x) for x in group.input_tensors]
        first: Operator = copy_operator(self.known[key], inputs)[0].op
        return first


@contextmanager
def _distinct_tasks(operators: Sequence[Operator]) -> Iterator[None]:
    """Give operators that share a task, or parts of it, copies while the block runs, so that they can be fused."""
    tasks = [op.task for op in operators]
    seen: set[Any] = set()
    try:
        for op in operators:
            bound = bound_in([*op.task.inputs, *op.task.outputs])
            if not seen.isdisjoint(bound):
                op.task = renamed_task(op.task)
                bound = bound_in([*op.task.inputs, *op.task.outputs])
            seen |= bound
        yield
    finally:
        for op, task in zip(operators, tasks, strict=True):
            op.task = task


@contextmanager
def layered_passes(frugal: bool = False) -> Iterator[None]:
    """Let hidet's passes of graphs treat equal layers once while the block runs, and fuse at most so many operators.

    At most :data:`MOST_FUSED` operators become one. If ``frugal``, operators stay apart whose kernel would hold more
    than they do one after the other.
    """
    by = {name: _bounded(getattr(fuse_operator, name), frugal) for name in _FUSED_BY}
    with (
        replaced(fuse_operator, {**by, "operator_from_sub_graph": _Fused().operator}),
        replaced(Task, {"is_injective": _is_injective}),
        replaced(transforms, {"resolve_variant_pass": _ResolvePresent}),
    ):
        yield


class _NothingLower(Pass):
    def process_module(self, ir_module: IRModule) -> IRModule:
        return ir_module


@contextmanager
def cpu_lowering() -> Iterator[None]:
    """Lower kernels without the passes for CUDA's tensor cores while the block runs."""
    with replaced(hidet.transforms, dict.fromkeys(_FOR_TENSOR_CORES, lambda *_: _NothingLower())):
        yield
