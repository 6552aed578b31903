"""The weights that may be stored in a lower precision."""

from __future__ import annotations

from collections.abc import Collection

from hidet.graph import Tensor

from hidet_dist.cost.work import kernel_class
from hidet_dist.operators.sorting import ArgsortOp
from hidet_dist.partitioning import Program
from hidet_dist.weights.panels import StoredPrecision


def stored_precisions(
    program: Program, precision: StoredPrecision | None, dtypes: Collection[str]
) -> dict[str, StoredPrecision]:
    """Map the weights of a program that may be stored in a lower precision to it, by name: those of some ``dtypes``.

    Weights of routers may not: a small error of theirs changes which experts compute a token.
    """
    if precision is None:
        return {}
    routers = _weights_of_routers(program)
    placeholders = program.weight_placeholders
    return {
        weight.name: precision
        for weight in program.weights
        if weight.dtype in dtypes and placeholders[weight.name] not in routers
    }


def _weights_of_routers(program: Program) -> set[Tensor]:
    """List the operands of products whose results are sorted before another product reads them."""
    sorted_ones: set[Tensor] = set()
    found: set[Tensor] = set()
    for op in reversed(program.graph.nodes):
        if isinstance(op, ArgsortOp) or any(y in sorted_ones for y in op.outputs):
            (found if kernel_class(op) == "matmul" else sorted_ones).update(op.inputs)
    return found
