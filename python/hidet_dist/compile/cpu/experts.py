"""Products by experts: rows sorted by expert in the kernel, see ``hidet_dist/kernels/expert_product.h``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hidet.graph import Operator, Tensor
from hidet.graph.transforms import ResolveRule, register_resolve_rule

from hidet_dist.compat.native_call import STORE, Values
from hidet_dist.compile.cpu.active import is_active, known_kernels
from hidet_dist.compile.cpu.tiled import ELEMENT_TYPES, Epilogue, TiledOp, quantized_parameters
from hidet_dist.operators.experts import ExpertProductOp
from hidet_dist.rewriting import copy_operator
from hidet_dist.spec.extents import Extent, extents_of, same_extent
from hidet_dist.weights.panels import FEW_BITS

_NAMESPACE = "hidet_dist::kernels"


class ExpertKernelOp(TiledOp):
    """The kernel of :class:`ExpertProductOp`.

    Parameters
    ----------
    tensors: Tensor
        The operator's inputs, with the matrices in panels or not; then the epilogue's.
    sizes: sequence of int or expression
        The numbers of tokens, choices and experts, and the rows and columns of a matrix.
    shared, transposed, is_summed: bool
        Whether the choices of a token share a row; whether matrices that are not in panels are transposed; whether the
        choices are summed up.
    shape: sequence of int or expression
        The shape of the output: the operator's, or another one with the same length of rows.
    width: int
        The columns of a panel; 0 if the matrices are not in panels.
    precision: str
        That of the elements of panels of few bits, and otherwise empty; ``group`` is the rows that have one scale.
    epilogue: Epilogue, optional
        The computation on each element of the output.
    """

    calls_openblas: ClassVar[bool] = False

    def __init__(
        self,
        *tensors: Tensor,
        sizes: Sequence[Extent],
        shared: bool,
        transposed: bool,
        is_summed: bool,
        shape: Sequence[Extent],
        width: int = 0,
        precision: str = "",
        group: int = 0,
        epilogue: Epilogue | None = None,
    ):
        operands = 5 if is_summed else 4
        (x, weight, *further), others = tensors[:operands], tensors[operands:]
        text = Values()
        flag = {True: "true", False: "false"}
        element = ELEMENT_TYPES[x.dtype.name]
        if precision in FEW_BITS:
            kind, stored = f"QuantizedExperts<{quantized_parameters(width, precision, group)}>", "uint8_t"
        else:
            stored = ELEMENT_TYPES[weight.dtype.name]
            kind = f"ExpertMatrices<{width}, {stored}>"
        depth, columns = (text(size) for size in sizes[3:])
        addresses = ["(const int32_t *)({})"] * 2
        if is_summed:
            addresses.append(f"(const {ELEMENT_TYPES[further[2].dtype.name]} *)({{}})")
        statement = (
            f"const {_NAMESPACE}::ExpertProduct product = "
            f"{{{{ {', '.join([*map(text, sizes), flag[shared]])} }}}}; "
            f"const {element} *const left = (const {element} *)({{}}); "
            f"const {_NAMESPACE}::{kind} experts = "
            f"{{{{ (const {stored} *)({{}}), {depth}, {columns}, {flag[transposed]} }}}}; "
            f"{_NAMESPACE}::{'sum' if is_summed else 'multiply'}_experts(product, left, experts, "
            f"{', '.join(addresses)}, {STORE});"
        )
        attributes: dict[str, Any] = {
            "sizes": list(sizes),
            "shared": shared,
            "transposed": transposed,
            "is_summed": is_summed,
            "shape": list(shape),
            "width": width,
            "precision": precision,
            "group": group,
        }
        super().__init__(
            "experts",
            x,
            weight,
            others,
            shape,
            len(shape) - 1,
            "expert_product.h",
            statement,
            text.values,
            True,
            epilogue,
            attributes,
            further,
        )
        self.name = "ExpertProduct"

    def reshaped(self, shape: Sequence[Extent]) -> dict[str, Any] | None:
        """Accept any shape with the same number of elements and the same length of rows."""
        if len(shape) < 2 or not same_extent(shape[-1], self.attrs["shape"][-1]):
            return None
        return {"shape": list(shape)}


@register_resolve_rule(ExpertProductOp)
class _ExpertRule(ResolveRule):
    def resolve(self, op: Operator) -> list[Tensor] | None:
        if not is_active(op):
            return None
        known, key = known_kernels(), (ExpertKernelOp, op.task)
        if key in known:
            return copy_operator(known[key], op.inputs)
        x, weight, chosen = map(extents_of, op.inputs[:3])
        transposed = bool(op.attrs["transposed"])
        experts, *sides = weight
        columns, depth = sides if transposed else reversed(sides)
        y = ExpertKernelOp(
            *op.inputs,
            sizes=[*chosen, experts, depth, columns],
            shared=len(x) == 2,
            transposed=transposed,
            is_summed=bool(op.attrs["is_summed"]),
            shape=list(extents_of(op.outputs[0])),
        ).outputs[0]
        known[key] = y.op
        return [y]
