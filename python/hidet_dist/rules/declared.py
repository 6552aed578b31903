"""Handwritten definitions, or forced replication, for operators whose compute definition is incomplete or misleading.

A handwritten definition is an ordinary task with the operator's inputs and outputs. It is analysed and evaluated but
never compiled, and replaces the operator's task wherever rules are derived, proven and run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from hidet.graph import Operator
from hidet.graph.ops.attention.attention import AttnOp
from hidet.graph.ops.attention.attention_mask import AttnMaskAddOp
from hidet.graph.ops.create import ArangeOp, LinSpaceOp, TriOp
from hidet.graph.ops.distributed import AllGatherOp, AllReduceOp, ReduceScatterOp, WaitTensorOp
from hidet.graph.ops.embedding_bag import EmbeddingBagOp
from hidet.graph.ops.fusion.fused_operator import FusedOperator
from hidet.graph.ops.scatter import ScatterBaseOp
from hidet.graph.ops.transfer import TransferOp
from hidet.graph.ops.transform import ViewOp
from hidet.graph.ops.utils import Task, broadcast_indices, broadcast_shape, compute, input_like
from hidet.ir import primitives
from hidet.ir.compute import TensorInput, reduce
from hidet.ir.expr import if_then_else, logical_and, logical_or

from hidet_dist.spec.extents import same_extent

Define: TypeAlias = Callable[[Operator], Task]


@dataclass(frozen=True)
class Declaration:
    """A handwritten definition, and the reason why the operator needs one."""

    reason: str
    define: Define


DECLARED: dict[type[Operator], Declaration] = {}
"""The handwritten definitions. A new one is a function with :func:`defines` in this file."""


def defines(operator: type[Operator], because: str) -> Callable[[Define], Define]:
    """Let a function define the operators of a class; ``because`` is the reason why that is done by hand."""

    def declare(define: Define) -> Define:
        DECLARED[operator] = Declaration(because, define)
        return define

    return declare


def _inputs(op: Operator) -> list[TensorInput]:
    return [input_like(x, f"x{number}") for number, x in enumerate(op.inputs)]


@defines(AttnMaskAddOp, because="its definition reads only as many keys as there are queries")
@defines(AttnOp, because="its definition omits the causal mask, and reads only as many keys as queries")
def _attention(op: Operator) -> Task:
    """Define softmax(q @ k + mask) @ v completely: with the causal mask, and with all keys."""
    tensors = _inputs(op)
    q, k, v = tensors[:3]
    mask = tensors[3] if len(tensors) > 3 else None
    causal = bool(op.attrs.get("is_causal", False))
    heads = broadcast_shape(broadcast_shape(q.shape[:-2], k.shape[:-2]), v.shape[:-2])
    rows, columns, inner = q.shape[-2], k.shape[-1], q.shape[-1]

    def at(x: Any, h: Any, i: Any, j: Any) -> Any:
        return x[[*broadcast_indices(list(h), x.shape[:-2], heads), i, j]]

    def score(*index: Any) -> Any:
        *h, i, j = index
        value = reduce([inner], lambda d: at(q, h, i, d) * at(k, h, d, j), "sum")
        if mask is not None:
            value = value + mask[broadcast_indices(list(index), mask.shape, [*heads, rows, columns])]
        return if_then_else(j <= i, value, q.type.dtype.min_value) if causal else value

    scores = compute("scores", [*heads, rows, columns], score)
    most = compute("most", [*heads, rows], lambda *h: reduce([columns], lambda j: scores[[*h, j]], "max"))
    weights = compute(
        "weights", [*heads, rows, columns], lambda *index: primitives.exp(scores[index] - most[index[:-1]])
    )
    total = compute("total", [*heads, rows], lambda *h: reduce([columns], lambda j: weights[[*h, j]], "sum"))
    out = compute(
        "out",
        [*heads, rows, v.shape[-1]],
        lambda *index: reduce(
            [columns],
            lambda j: weights[[*index[:-1], j]] / total[index[:-1]] * at(v, index[:-2], j, index[-1]),
            "sum",
        ),
    )
    return Task("attention_by_hand", tensors, [out])


@defines(EmbeddingBagOp, because="it is opaque: a kernel without a compute definition")
def _embedding_bag(op: Operator) -> Task:
    indices, weight, offsets = tensors = _inputs(op)
    count, bags, dtype = indices.shape[0], offsets.shape[0], weight.type.dtype

    def inside(b: Any, e: Any) -> Any:
        # The first bag begins at 0 whatever its offset is; the last one ends with the indices.
        after_begin = logical_or(b < 1, offsets[b] <= e)
        return logical_and(after_begin, logical_or(b >= bags - 1, e < offsets[b + 1]))

    def bag(b: Any, f: Any) -> Any:
        total = reduce([count], lambda e: if_then_else(inside(b, e), weight[indices[e], f], dtype.zero), "sum")
        if op.attrs["mode"] == "sum":
            return total
        return total / reduce([count], lambda e: if_then_else(inside(b, e), dtype.one, dtype.zero), "sum")

    return Task("embedding_bag_by_hand", tensors, [compute("out", [bags, weight.shape[1]], bag)])


@defines(ScatterBaseOp, because="it is opaque: a kernel without a compute definition")
def _scatter(op: Operator) -> Task:
    x, index, source = tensors = _inputs(op)
    dim, many = op.attrs["dim"], index.shape[op.attrs["dim"]]
    others = [d for d in range(len(x.shape)) if d != dim]

    def at(y: Any, place: Any, k: Any) -> Any:
        return y[[k if d == dim else i for d, i in enumerate(place)]]

    def matches(place: Any, k: Any) -> Any:
        match = at(index, place, k) == place[dim]
        for d in others:  # the index may be smaller than the tensor that it scatters into
            match = (
                logical_and(place[d] < index.shape[d], match) if not same_extent(index.shape[d], x.shape[d]) else match
            )
        return match

    def value(*place: Any) -> Any:
        if op.attrs["fname"] == "add":
            zero = source.type.dtype.zero
            return x[place] + reduce(
                [many], lambda k: if_then_else(matches(place, k), at(source, place, k), zero), "sum"
            )
        last = reduce([many], lambda k: if_then_else(matches(place, k), k, -1), "max", accumulate_dtype="int32")
        return if_then_else(last >= 0, at(source, place, last), x[place])

    return Task("scatter_by_hand", tensors, [compute("out", x.shape, value)])


# Operators that are replicated, each with the reason.
REPLICATED: dict[type[Operator], str] = {
    ArangeOp: "its values are the indices themselves, so a shard is another operator on every device",
    LinSpaceOp: "its values are the indices themselves, so a shard is another operator on every device",
    TriOp: "its values are the indices themselves, so a shard is another operator on every device",
    ViewOp: "it reinterprets memory; its definition is a placeholder",
    FusedOperator: "hidet's optimizer makes it, from a program that is already sharded",
    TransferOp: "it moves data between devices",
    AllReduceOp: "it communicates",
    AllGatherOp: "it communicates",
    ReduceScatterOp: "it communicates",
    WaitTensorOp: "it communicates",
}

# Modules of hidet that cannot be imported without a GPU, so that their rules cannot be tested.
UNIMPORTABLE: dict[str, str] = {
    "hidet.graph.ops.matmul.matmul_f8": "its module asks for a GPU when it is imported, so no rule of it can be run",
}


def definition_of(op: Operator) -> Task:
    """Return the task that defines an operator: the handwritten one if there is one, else ``op.task``."""
    declaration = DECLARED.get(type(op))
    return op.task if declaration is None else declaration.define(op)
