"""Products by weights of few bits: kernels read their panels; see ``hidet_dist/kernels/cuda/quantized_product.h``.

A product becomes such a kernel before operators are fused, as it takes part in no fusion. Products of one left operand
by several weights are one launch (:mod:`hidet_dist.patterns.joint_products`). A weight is the program's until
:func:`pack_weights` puts panels in the place of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import hidet
from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.matmul.matmul import MatmulOp

from hidet_dist import native
from hidet_dist.compat.native_call import NativeCall, NativeCallOp
from hidet_dist.compile.backend import PackedWeight
from hidet_dist.compile.joining import depths, in_parts, join
from hidet_dist.rewriting import copy_operator, rewrite
from hidet_dist.spec.extents import extents_of
from hidet_dist.weights.panels import FEW_BITS, GPU_PANEL_WIDTH, Panels, StoredPrecision

_ELEMENTS = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}


class QuantizedMatmulOp(NativeCallOp):
    """``c[..., n] = a[..., k] @ b[k, n]`` for each weight, of the dtype of ``a``, summed in float32.

    Parameters
    ----------
    a: Tensor
        The left operand: float32, float16 or bfloat16.
    weights: sequence of Tensor
        The bytes of the panels of each weight, or the weight that they will be made of.
    panels: sequence of Panels
        The arrangement of each; they have depth, precision and group in common.
    multiprocessors: int
        Those of the GPU: where tiles of many rows would leave some idle, rows are taken a few at a time.
    """

    def __init__(self, a: Tensor, weights: Sequence[Tensor], panels: Sequence[Panels], multiprocessors: int):
        outer = extents_of(a)[:-1]
        element, first = _ELEMENTS[a.dtype.name], panels[0]
        types = f"<{element}, {FEW_BITS[first.precision].bits}, {first.group}>"
        given, made = (", ".join([f"({kind} *)({{}})"] * len(panels)) for kind in ("const uint8_t", element))
        columns = ", ".join(str(one.columns) for one in panels)
        statement = (
            f"const {element} *left = (const {element} *)({{}}); "
            f"const uint8_t *const weights[] = {{{{ {given} }}}}; {element} *const results[] = {{{{ {made} }}}}; "
            f"const int64_t columns[] = {{{{ {columns} }}}}; "
            f"hidet_dist::cuda::quantized::multiply{types}"
            f"(left, weights, results, columns, left_rows, {first.depth}, {multiprocessors});"
        )
        rows = math.prod(outer)
        digest = hashlib.sha256(f"{statement}\n{rows}\n{panels}".encode()).hexdigest()[:16]
        headers = ("hidet_dist/kernels/cuda/quantized_product.h",)
        call = NativeCall(statement, headers, (str(native.include_dir()),), values={"left_rows": rows})
        inputs = {"a": a, **{f"b{number}": b for number, b in enumerate(weights)}}
        shape, *further = ([*outer, one.columns] for one in panels)
        attributes = {"panels": tuple(panels), "multiprocessors": multiprocessors}
        super().__init__(f"hidet_dist_quantized_{digest}", inputs, shape, call, attributes, further=further)
        self.name = "QuantizedMatmul" if len(panels) == 1 else "JointQuantizedMatmul"


def quantized_products(
    graph: FlowGraph, weights: Mapping[str, Tensor], precisions: Mapping[str, StoredPrecision], multiprocessors: int
) -> FlowGraph:
    """Replace the products by weights of few bits that nothing else reads; return ``graph`` itself if there are none.

    Parameters
    ----------
    graph: FlowGraph
        The graph, before operators are fused.
    weights: mapping
        Its inputs that are weights, by name.
    precisions: mapping
        The lower precisions in which weights may be stored, by name.
    multiprocessors: int
        Those of the GPU.
    """
    wanted = {weights[name]: precision for name, precision in precisions.items() if precision.name in FEW_BITS}
    found: dict[Tensor, Panels] = {}
    excluded = set(graph.outputs)
    for op in graph.nodes:
        for place, x in enumerate(op.inputs):
            if x not in wanted:
                continue
            panels = _panels_of(op, x, wanted[x]) if place == 1 else None
            if panels is None or found.setdefault(x, panels) != panels:
                excluded.add(x)

    def product(op: Operator, replaced: Mapping[Tensor, Tensor]) -> Tensor | None:
        weight = op.inputs[1] if isinstance(op, MatmulOp) else None
        if weight not in found or weight in excluded:
            return None
        left = op.inputs[0]
        made = QuantizedMatmulOp(replaced.get(left, left), [weight], [found[weight]], multiprocessors)
        y: Tensor = made.outputs[0]
        return y

    return _joint(rewrite(graph, product), multiprocessors)


def _joint(graph: FlowGraph, multiprocessors: int) -> FlowGraph:
    """Let products of one left operand, by weights of one precision, be one operator."""
    depth = depths(graph)
    groups: dict[Hashable, list[Operator]] = {}
    for op in graph.nodes:
        if isinstance(op, QuantizedMatmulOp):
            (panels,) = op.attrs["panels"]
            groups.setdefault((op.inputs[0], depth[op], panels.precision, panels.group), []).append(op)
    known: dict[Hashable, Operator] = {}

    def make(group: Sequence[Operator], inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        left, weights = inputs[0][0], [weight for _, weight in inputs]
        key = (*(op.task.name for op in group), *map(str, left.shape))
        if key not in known:
            panels = [one for op in group for one in op.attrs["panels"]]
            known[key] = QuantizedMatmulOp(left, weights, panels, multiprocessors)
            return [[y] for y in known[key].outputs]
        return [[y] for y in copy_operator(known[key], [left, *weights])]

    return join(graph, in_parts(groups.values()), depth, make)


def _panels_of(op: Operator, weight: Tensor, precision: StoredPrecision) -> Panels | None:
    """Arrange a matrix that is the right operand of a product of one left matrix; None if it is anything else."""
    if not isinstance(op, MatmulOp) or op.attrs.get("transpose_a", False) or op.inputs[0] is weight:
        return None
    left, extents = op.inputs[0], extents_of(weight)
    if len(extents) != 2 or len(left.shape) < 2 or not all(isinstance(extent, int) for extent in extents):
        return None
    if left.dtype.name not in _ELEMENTS or op.outputs[0].dtype != left.dtype:
        return None
    transposed = bool(op.attrs.get("transpose_b", False))
    columns, depth = (int(x) for x in (extents if transposed else extents[::-1]))
    return Panels(1, depth, columns, transposed, GPU_PANEL_WIDTH, precision.name, precision.group)


def pack_weights(graph: FlowGraph, weights: Mapping[str, Tensor]) -> tuple[FlowGraph, dict[str, PackedWeight]]:
    """Let the products of few bits read panels in place of their weights.

    Returns
    -------
    The graph, and the weights in panels by name.
    """
    panels = {
        weight: own
        for op in graph.nodes
        if isinstance(op, QuantizedMatmulOp)
        for weight, own in zip(op.inputs[1:], op.attrs["panels"], strict=True)
    }
    packed = {
        name: PackedWeight(hidet.symbol(list(panels[x].shape), "uint8", x.device), panels[x])
        for name, x in weights.items()
        if x in panels
    }
    if not packed:
        return graph, {}
    new: dict[Tensor, Tensor] = {weights[name]: weight.placeholder for name, weight in packed.items()}
    known: dict[Any, Operator] = {}  # equal products of equal layers have copies of one operator
    for op in graph.nodes:
        inputs = [new.get(x, x) for x in op.inputs]
        if isinstance(op, QuantizedMatmulOp):
            key = op.task
            if key not in known:
                known[key] = QuantizedMatmulOp(inputs[0], inputs[1:], **op.attrs)
                outputs = known[key].outputs
            else:
                outputs = copy_operator(known[key], inputs)
        elif any(x in new for x in op.inputs):
            outputs = copy_operator(op, inputs)
        else:
            continue
        new.update(zip(op.outputs, outputs, strict=True))
    result = FlowGraph([new.get(y, y) for y in graph.outputs], [new.get(x, x) for x in graph.inputs])
    result.update_nodes()
    return result, packed
