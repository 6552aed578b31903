"""Products by weights, in panels where it is possible: artifacts hold them so, and kernels read them without a copy.

OpenBLAS copies its operands into panels on each call. Weights are brought into panels once, when artifacts are
written, and the native library multiplies by them (``hidet_dist/panels.h``). With few rows, each weight is read once
from memory; and a row's result does not depend on the rows beside it. Weights that other operators read too, such as
tables of embeddings, lie row by row. The library multiplies by them in the same order of sums.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import hidet
from hidet.graph import FlowGraph, Operator, Tensor
from hidet.ir.expr import SymbolVar, symbol_var
from hidet.utils import prod

from hidet_dist.compat.native_call import Values
from hidet_dist.compile.backend import PackedWeight
from hidet_dist.compile.cpu.blas import BlasMatmulOp, operands_of, product_statement
from hidet_dist.compile.cpu.channels_last import ChannelsLastConvolutionOp
from hidet_dist.compile.cpu.experts import ExpertKernelOp
from hidet_dist.compile.cpu.tiled import ELEMENT_TYPES, Epilogue, TiledOp, quantized_parameters
from hidet_dist.patterns.winograd import MATRICES
from hidet_dist.rewriting import with_inputs
from hidet_dist.spec.extents import Extent, extents_of, factors_of, ratio, same_extent
from hidet_dist.weights.panels import FEW_BITS, SIZES, Panels, StoredPrecision


class PanelMatmulOp(TiledOp):
    """``c[..., m, n] = a[..., m, k] @ b[..., k, n]`` with weights ``b``, summed in float32.

    Parameters
    ----------
    a: Tensor
        The memory of the left operand, in any shape: float32, float16 or bfloat16.
    b: Tensor
        The elements of the panels, or the memory of the right operand in any shape; of the same dtype, or of lower
        precision if ``a`` is float32. ``others`` are the epilogue's inputs.
    width: int
        The columns of a panel; 0 if ``b`` does not lie in panels.
    precision: str
        That of the elements of panels of few bits, and otherwise empty; ``group`` is the rows that have one scale.
    operands, product, shape, k, epilogue:
        As of :class:`BlasMatmulOp`; ``b`` in panels is neither transposed, nor has it a leading dimension.
    """

    calls_openblas: ClassVar[bool] = False

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        *others: Tensor,
        width: int,
        precision: str,
        group: int,
        operands: Sequence[Sequence[Any]],
        product: Sequence[Extent],
        shape: Sequence[Extent],
        k: Extent,
        epilogue: Epilogue | None = None,
    ):
        left, right = operands_of(operands)
        stores = epilogue is not None or a.dtype.name != "float32" or precision in FEW_BITS
        text = Values()
        function, element = f"multiply_panels<{width}>", ELEMENT_TYPES[a.dtype.name]
        if precision in FEW_BITS:
            function = f"multiply_quantized<{quantized_parameters(width, precision, group)}>"
            elements = (element, "uint8_t")
        else:
            elements = (element, ELEMENT_TYPES[b.dtype.name])
        statement = product_statement(function, left, right, product, k, elements, stores, text)
        super().__init__(
            "panels",
            a,
            b,
            others,
            shape,
            len(shape) - 1,
            "panel_product.h",
            statement,
            text.values,
            stores,
            epilogue,
            {
                "width": width,
                "precision": precision,
                "group": group,
                "operands": [list(o) for o in operands],
                "product": list(product),
                "shape": list(shape),
                "k": k,
            },
        )
        self.name = "PanelMatmul"


def pack_weights(
    graph: FlowGraph,
    weights: Mapping[str, Tensor],
    width: int,
    in_rows: Collection[str] = (),
    precisions: Mapping[str, StoredPrecision] = MappingProxyType({}),
) -> tuple[FlowGraph, dict[str, PackedWeight]]:
    """Replace the products by weights, and bring the weights that nothing else reads into panels.

    Parameters
    ----------
    graph: FlowGraph
        The graph, with epilogues in its products.
    weights: mapping
        The inputs of the graph that are weights, by name.
    width: int
        The columns of a panel.
    in_rows: collection of str
        The names of weights that stay in rows.
    precisions: mapping
        The lower precisions in which weights in panels are stored, by name.

    Returns
    -------
    The graph, and the weights in panels by name.
    """
    panels, constant = _in_panels(graph, weights, width, in_rows, precisions), set(weights.values())
    for name, precision in precisions.items():
        if (x := weights.get(name)) in panels:
            group = precision.group if precision.name in FEW_BITS else 0
            panels[x] = replace(panels[x], precision=precision.name, group=group)
    packed = {
        name: PackedWeight(
            hidet.symbol(_shape_of(panels[x]), panels[x].stored_dtype(x.dtype.name), x.device), panels[x]
        )
        for name, x in weights.items()
        if x in panels
    }

    def key_of(op: Operator) -> Hashable | None:
        by_weight = isinstance(op, BlasMatmulOp | ExpertKernelOp | ChannelsLastConvolutionOp)
        return (op.task, panels.get(op.inputs[1])) if by_weight and op.inputs[1] in constant else None

    placeholders = {weights[name]: weight.placeholder for name, weight in packed.items()}
    result = with_inputs(graph, placeholders, key_of, lambda op, inputs: _product(op, inputs, panels.get(op.inputs[1])))
    return result, packed


def _in_panels(
    graph: FlowGraph,
    weights: Mapping[str, Tensor],
    width: int,
    in_rows: Collection[str],
    precisions: Collection[str],
) -> dict[Tensor, Panels]:
    """Map the weights that only products read, as the same matrices, to their arrangement.

    ``precisions`` names those that may be stored in a lower precision.
    """
    candidates, lower = set(weights.values()), {weights[name] for name in precisions if name in weights}
    found: dict[Tensor, Panels] = {}
    excluded = {*graph.outputs, *(weights[name] for name in in_rows if name in weights)}
    for op in graph.nodes:
        for place, x in enumerate(op.inputs):
            if x not in candidates:
                continue
            panels = None
            if place == 1 and isinstance(op, ExpertKernelOp):
                panels = _panels(op.attrs["sizes"][2:], op.attrs["transposed"], width)
            elif place == 1 and isinstance(op, ChannelsLastConvolutionOp):
                panels = _panels_of_filters(op, width, x not in lower)
            elif place == 1 and isinstance(op, BlasMatmulOp):
                panels = _panels_of(op, x, width)
            if panels is None or found.setdefault(x, panels) != panels:
                excluded.add(x)
    return {x: panels for x, panels in found.items() if x not in excluded}


def _panels_of(op: BlasMatmulOp, weight: Tensor, width: int) -> Panels | None:
    """Describe a weight that is a stack of whole matrices of a product; None if it is anything else."""
    _, right = operands_of(op.attrs["operands"])
    n, k = op.attrs["product"][-1], op.attrs["k"]
    extents = extents_of(weight)
    across, along = (n, k) if right.transposed else (k, n)
    if not (same_extent(right.leading, along) or same_extent(across, 1)):
        return None
    size = prod([k, n])
    if any(ratio(step, size) is None for step in (right.offset, *right.batch_strides)):
        return None
    matrices = ratio(prod(extents), size)
    return None if matrices is None else _panels((matrices, k, n), right.transposed, width)


def _panels(sizes: Sequence[Extent], transposed: bool, width: int) -> Panels | None:
    """Describe panels of the sizes :data:`SIZES`; None if one is no product of a number and of parts of the device."""
    numbers, parts = [], []
    for name, size in zip(SIZES, sizes, strict=True):
        number = 1
        for factor in factors_of(size):
            if isinstance(factor, int):
                number *= factor
            elif isinstance(factor, SymbolVar):
                parts.append((name, factor.name))
            else:
                return None
        numbers.append(number)
    matrices, depth, columns = numbers
    return Panels(matrices, depth, columns, transposed, width, parts=tuple(parts))


def _sizes_of(panels: Panels) -> list[Extent]:
    """Return the sizes of panels on a device, with symbols for unequal parts."""
    return [
        prod([getattr(panels, name), *(symbol_var(part) for of, part in panels.parts if of == name)]) for name in SIZES
    ]


def _shape_of(panels: Panels) -> list[Extent]:
    """Return the shape of panels on a device, with symbols for unequal parts."""
    matrices, depth, columns = _sizes_of(panels)
    return [matrices, panels.matrix_size(depth, columns)]


def _panels_of_filters(op: ChannelsLastConvolutionOp, width: int, in_full: bool) -> Panels:
    """Describe the filters of a convolution, which are stored in their own dtype if ``in_full``."""
    out_channels, channels, *kernel = op.attrs["sizes"]
    if in_full and op.has_winograd:
        return Panels(MATRICES, channels, out_channels, True, width, winograd=True)
    taps, groups = math.prod(kernel), 1 if op.is_depthwise else int(op.attrs["groups"])
    return Panels(groups, channels * taps, out_channels // groups, True, width, taps=1 if op.is_depthwise else taps)


def _product(
    op: BlasMatmulOp | ExpertKernelOp | ChannelsLastConvolutionOp, inputs: Sequence[Tensor], panels: Panels | None
) -> Operator:
    if isinstance(op, ChannelsLastConvolutionOp):
        width, winograd = (0, False) if panels is None else (panels.width, panels.winograd)
        attributes = {**op.attrs, "width": width, "winograd": winograd}
        return ChannelsLastConvolutionOp(*inputs, **attributes).outputs[0].op
    lower = {"width": 0, "precision": "", "group": 0}
    if isinstance(op, ExpertKernelOp):
        if panels is not None:
            lower = {"width": panels.width, "precision": panels.precision, "group": panels.group, "transposed": False}
        return ExpertKernelOp(*inputs, **{**op.attrs, **lower}).outputs[0].op
    left, right = op.attrs["operands"]
    if panels is not None:
        steps, offset = right[0], right[3]
        if panels.precision in FEW_BITS:  # of bytes
            _, depth, columns = _sizes_of(panels)
            matrix, stored = prod([depth, columns]), _shape_of(panels)[1]
            *steps, offset = (prod([ratio(step, matrix), stored]) for step in (*steps, offset))
        right = [steps, False, panels.width, offset]
        lower = {"width": panels.width, "precision": panels.precision, "group": panels.group}
    return PanelMatmulOp(*inputs, **{**op.attrs, "operands": [left, right], **lower}).outputs[0].op
