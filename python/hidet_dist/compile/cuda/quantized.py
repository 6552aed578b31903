"""Products by weights of few bits: kernels read their panels; see ``hidet_dist/kernels/cuda/quantized_product.h``.

A product becomes such a kernel before operators are fused, as it takes part in no fusion. Products of one left operand
by several weights are one launch (:mod:`hidet_dist.patterns.joint_products`), and a sum with a tensor of the product's
shape, such as a residual sum, is a part of it. A weight is the program's until :func:`pack_weights` puts panels in the
place of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Mapping, Sequence
from functools import partial

import hidet
from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.arithmetic import AddOp
from hidet.graph.ops.matmul.matmul import MatmulOp

from hidet_dist import native
from hidet_dist.compat.native_call import NativeCall, NativeCallOp
from hidet_dist.compile.backend import PackedWeight
from hidet_dist.compile.joining import depths, in_parts, join
from hidet_dist.rewriting import (
    Build,
    Repeated,
    Uses,
    copy_operator,
    only_user,
    replace_operators,
    rewrite,
    with_inputs,
)
from hidet_dist.spec.extents import extents_of, same_extent
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
    added: Tensor, optional
        What is added to the product by the only weight, of its shape and dtype.
    """

    def __init__(
        self,
        a: Tensor,
        weights: Sequence[Tensor],
        panels: Sequence[Panels],
        multiprocessors: int,
        added: Tensor | None = None,
    ):
        assert added is None or len(panels) == 1
        outer = extents_of(a)[:-1]
        element, first = _ELEMENTS[a.dtype.name], panels[0]
        bits, count = FEW_BITS[first.precision].bits, len(panels)
        inputs = {"a": a, **{f"b{number}": b for number, b in enumerate(weights)}}
        # Not the names of the kernel's parameters.
        pointers = ["of_left", *(f"of_panels{number}" for number in range(count))]
        if added is not None:
            inputs["added"] = added
            pointers.append("of_added")
        pointers += [f"of_result{number}" for number in range(count)]
        other = "nullptr" if added is None else f"(const {element} *)of_added"
        parts = [
            f"{{{{(const uint8_t *)of_panels{number}, {other}, ({element} *)of_result{number}, {one.columns}, 0}}}}"
            for number, one in enumerate(panels)
        ]
        statement = (
            f"{' '.join(f'void *{name} = (void *)({{}});' for name in pointers)} "
            f"hidet_dist::cuda::quantized::Parts<{element}, {count}> parts = {{{{ {{{{ {', '.join(parts)} }}}} }}}}; "
            f"hidet_dist::cuda::quantized::multiply<{element}, {bits}, {first.group}>"
            f"((const {element} *)of_left, parts, left_rows, {first.depth}, {multiprocessors});"
        )
        rows = math.prod(outer)
        digest = hashlib.sha256(f"{statement}\n{rows}\n{panels}".encode()).hexdigest()[:16]
        headers = ("hidet_dist/kernels/cuda/quantized_product.h",)
        call = NativeCall(statement, headers, (str(native.include_dir()),), values={"left_rows": rows})
        shape, *further = ([*outer, one.columns] for one in panels)
        attributes = {"panels": tuple(panels), "multiprocessors": multiprocessors}
        super().__init__(f"hidet_dist_quantized_{digest}", inputs, shape, call, attributes, further=further)
        self.name = "QuantizedMatmul" if count == 1 else "JointQuantizedMatmul"

    @property
    def weights(self) -> list[Tensor]:
        """The weights, or the bytes of their panels."""
        count = len(self.attrs["panels"])
        return list(self.inputs[1 : 1 + count])

    @property
    def added(self) -> Tensor | None:
        """What is added to the product."""
        count = len(self.attrs["panels"])
        return self.inputs[1 + count] if len(self.inputs) > 1 + count else None

    def of(self, a: Tensor, weights: Sequence[Tensor], added: Tensor | None = None) -> QuantizedMatmulOp:
        """The same product of other tensors, and its sum with ``added`` if that is given."""
        return QuantizedMatmulOp(a, weights, self.attrs["panels"], self.attrs["multiprocessors"], added)


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

    return _sums(_joint(rewrite(graph, product), multiprocessors))


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


def _sums(graph: FlowGraph) -> FlowGraph:
    """Let a product that is only added to a tensor of its shape write the sum."""
    repeated = Repeated()

    def replaced(op: Operator, uses: Uses) -> tuple[list[Tensor], Build] | None:
        if not isinstance(op, AddOp):
            return None
        for product, added in (op.inputs, op.inputs[::-1]):
            made = product.op
            if (
                isinstance(made, QuantizedMatmulOp)
                and len(made.outputs) == 1
                and made.added is None
                and only_user(product, uses) is op
                and _alike(product, added)
            ):
                return [*made.inputs, added], partial(_summed, repeated, made)
        return None

    return replace_operators(graph, replaced)


def _summed(repeated: Repeated, made: QuantizedMatmulOp, inputs: Sequence[Tensor]) -> Tensor:
    """The product of the first two inputs as ``made`` computes it, and its sum with the third."""

    def build() -> list[Tensor]:
        left, weight, added = inputs
        return list(made.of(left, [weight], added).outputs)

    return repeated(made.attrs["panels"], inputs, build)[0]


def _alike(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same dtype and shape."""
    shapes = extents_of(x), extents_of(y)
    return x.dtype == y.dtype and len(shapes[0]) == len(shapes[1]) and all(map(same_extent, *shapes))


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
        for weight, own in zip(op.weights, op.attrs["panels"], strict=True)
    }
    packed = {
        name: PackedWeight(hidet.symbol(list(panels[x].shape), "uint8", x.device), panels[x])
        for name, x in weights.items()
        if x in panels
    }
    if not packed:
        return graph, {}

    def on_panels(op: Operator, inputs: list[Tensor]) -> Operator:
        assert isinstance(op, QuantizedMatmulOp)
        end = 1 + len(op.weights)
        product: Operator = op.of(inputs[0], inputs[1:end], *inputs[end:])
        return product

    placeholders = {weights[name]: weight.placeholder for name, weight in packed.items()}
    return with_inputs(
        graph, placeholders, lambda op: op.task if isinstance(op, QuantizedMatmulOp) else None, on_panels
    ), packed
