"""Products by experts on GPUs: by a kernel in half precision, else as matrix products over all experts.

The kernel multiplies each row by the matrix of its expert alone; see ``hidet_dist/kernels/cuda/expert_product.h``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from hidet.graph import FlowGraph, Operator, Tensor, ops

from hidet_dist import native
from hidet_dist.compat.native_call import NativeCall, NativeCallOp
from hidet_dist.operators import elementwise, reductions, to_dtype
from hidet_dist.operators.experts import ExpertProductOp, routed_product
from hidet_dist.operators.shaping import permuted, reshaped
from hidet_dist.rewriting import rewrite
from hidet_dist.spec.extents import Extent, extents_of
from hidet_dist.traits import Half, has_traits

_ELEMENTS = {"float16": "__half", "bfloat16": "__nv_bfloat16"}
_NAMESPACE = "hidet_dist::cuda::experts"
_HEADER = "hidet_dist/kernels/cuda/expert_product.h"
_COPIED = 8  # elements that are copied at once: ``kWide`` of the header


@has_traits(kernel="matmul", half=Half.ALWAYS, routed=routed_product)
class ExpertKernelOp(NativeCallOp):
    """The kernel of :class:`ExpertProductOp` without a sum over choices: [tokens, choices, columns].

    Parameters
    ----------
    x, weight, chosen, labels: Tensor
        Its inputs.
    count: int
        The number of experts on all devices together.
    transposed: bool
        Whether the matrices are transposed.
    """

    def __init__(self, x: Tensor, weight: Tensor, chosen: Tensor, labels: Tensor, count: int, transposed: bool):
        tokens, choices = extents_of(chosen)
        experts, *sides = extents_of(weight)
        columns, inner = sides if transposed else reversed(sides)
        element = _ELEMENTS[x.dtype.name]
        flags = ", ".join([element, *(str(flag).lower() for flag in (transposed, len(x.shape) == 2))])
        # Not by the names of symbolic dims, which are variables already.
        extents: dict[str, Extent] = {
            f"extent{number}": extent for number, extent in enumerate((tokens, choices, experts, inner, columns))
        }
        data = f"const {element} *"
        statement = (
            f"const {_NAMESPACE}::Shape shape = {{{{ {', '.join(extents)} }}}}; "
            f"const {_NAMESPACE}::Operands<{element}> operands = {{{{ ({data})({{}}), ({data})({{}}), "
            f"(const int32_t *)({{}}), (const int32_t *)({{}}), ({element} *)({{}}) }}}}; "
            f"{_NAMESPACE}::multiply<{flags}>(shape, operands);"
        )
        parts = [statement, *(f"{name}={value}" for name, value in extents.items())]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        call = NativeCall(statement, (_HEADER,), (str(native.include_dir()),), values=extents)
        inputs = {"x": x, "weight": weight, "chosen": chosen, "labels": labels}
        attributes = {"count": count, "transposed": transposed}
        shape = [tokens, choices, columns]
        super().__init__(f"hidet_dist_experts_{digest}", inputs, shape, call, attributes, x.dtype.name)
        self.name = "ExpertProduct"


def define_experts(graph: FlowGraph) -> FlowGraph:
    """Replace each product by experts; return ``graph`` itself if there is nothing to replace.

    In float32, where rows do not begin at multiples of 16 bytes, or where parts of a matrix are unequal, it becomes
    one product over all experts and inner dims, of rows beside zeros for the experts that they did not choose. It takes
    as many operations as if every expert computed every row, and a tensor of [rows, experts * inner] elements.
    """

    def product(op: Operator, replaced: Mapping[Tensor, Tensor]) -> Tensor | None:
        if not isinstance(op, ExpertProductOp):
            return None
        x, weight, chosen, labels, *scales = (replaced.get(one, one) for one in op.inputs)
        sides = extents_of(weight)[1:]
        transposed = bool(op.attrs["transposed"])
        if x.dtype.name in _ELEMENTS and all(isinstance(side, int) and side % _COPIED == 0 for side in sides):
            y = ExpertKernelOp(x, weight, chosen, labels, int(op.attrs["count"]), transposed).outputs[0]
        else:
            y = _over_all(x, weight, chosen, labels, transposed)
        if not scales:
            return y
        weighted = elementwise.mul(to_dtype(y, "float32"), ops.unsqueeze(to_dtype(scales[0], "float32"), 2))
        return to_dtype(reductions.sum(weighted, 1), x.dtype)

    return rewrite(graph, product)


def _over_all(x: Tensor, weight: Tensor, chosen: Tensor, labels: Tensor, transposed: bool) -> Tensor:
    """Multiply each row, beside zeros, by the matrices of all experts."""
    tokens, choices = extents_of(chosen)
    experts, inner, columns = extents_of(weight)
    if transposed:
        weight, inner, columns = permuted(weight, [0, 2, 1]), columns, inner
    label = elementwise.add(reshaped(chosen, [tokens, choices, 1]), 1)
    is_own = elementwise.eq(label, reshaped(labels, [1, 1, experts]))
    rows = x if len(x.shape) == 3 else ops.unsqueeze(x, 1)
    # Zeros by choice and not by multiplication: what is not a finite number must not reach the others.
    masked = elementwise.where(ops.unsqueeze(is_own, 3), ops.unsqueeze(rows, 2), 0)
    y = ops.matmul(reshaped(masked, [tokens * choices, experts * inner]), reshaped(weight, [experts * inner, columns]))
    return reshaped(y, [tokens, choices, columns])
