"""Pattern matching of softmax and norms along the last dim, each of which is one kernel on a GPU.

hidet makes a softmax of five operators, and a root-mean-square norm of five.
"""

from __future__ import annotations

from dataclasses import dataclass

from hidet.graph import Operator, Tensor
from hidet.graph.ops.activation import SoftmaxOp
from hidet.graph.ops.arithmetic import (
    AddScalarOp,
    DivideOp,
    ExpOp,
    MultiplyOp,
    RsqrtOp,
    SquareOp,
    SubtractOp,
)
from hidet.graph.ops.normalize.norm import NormalizeOp
from hidet.graph.ops.reduce.reduce import ReduceMaxOp, ReduceMeanOp, ReduceSumOp
from hidet.graph.ops.transform import CastOp
from hidet.ir.expr import is_constant

from hidet_dist.rewriting import Uses, only_user
from hidet_dist.spec.extents import extents_of, same_shape

SOFTMAX, NORM, RMS_NORM = "softmax", "norm", "rms_norm"
LONGEST_ROW = 32 * 1024
"""The longest supported row, in elements: 32 in the registers of each of the 1024 threads of a block."""

_FLOATS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class RowsPattern:
    """A softmax or norm along the last dim of ``x``; ``epsilon`` is that of a norm, None for a softmax."""

    kind: str
    x: Tensor
    epsilon: float | None


def rows_of(op: Operator, uses: Uses) -> RowsPattern | None:
    """Match the last operator of a softmax or norm that the kernels for GPUs support; None for any other operator."""
    match = next((match for find in (_softmax, _norm, _rms_norm) if (match := find(op, uses)) is not None), None)
    if match is None or match.x.dtype.name not in _FLOATS or not _is_supported(match.x):
        return None
    return match


def _is_supported(x: Tensor) -> bool:
    """Whether the length of a tensor's rows is known, and they fit into registers."""
    return len(x.shape) > 0 and is_constant(x.shape[-1]) and 0 < int(x.shape[-1]) <= LONGEST_ROW


def softmax_of(op: Operator, uses: Uses) -> Tensor | None:
    """Find the argument of a softmax along the last dim; None if the operator is none."""
    if isinstance(op, SoftmaxOp):
        return op.inputs[0] if op.attrs["axis"] == len(op.inputs[0].shape) - 1 else None
    if not isinstance(op, DivideOp):
        return None
    powers, total = (x.op for x in op.inputs)
    if not isinstance(powers, ExpOp) or not isinstance(total, ReduceSumOp) or not _along_rows(total):
        return None
    difference = powers.inputs[0].op
    if total.inputs[0] is not powers.outputs[0] or not isinstance(difference, SubtractOp):
        return None
    x, most = difference.inputs
    if not isinstance(most.op, ReduceMaxOp) or not _along_rows(most.op) or most.op.inputs[0] is not x:
        return None
    inner = (difference.outputs[0], total.outputs[0], most)
    if not all(only_user(y, uses) is not None for y in inner) or len(uses[powers.outputs[0]]) != 2:
        return None  # its exponentials have another reader, so they are computed anyway
    return x


def _softmax(op: Operator, uses: Uses) -> RowsPattern | None:
    x = softmax_of(op, uses)
    return None if x is None else RowsPattern(SOFTMAX, x, None)


def _norm(op: Operator, uses: Uses) -> RowsPattern | None:
    if not isinstance(op, NormalizeOp) or op.attrs["accumulate_dtype"] != "float32":
        return None
    x = op.inputs[0]
    if [dim % len(x.shape) for dim in op.attrs["dims"]] != [len(x.shape) - 1]:
        return None
    return RowsPattern(NORM, _widest(x), float(op.attrs["epsilon"]))


def _rms_norm(op: Operator, uses: Uses) -> RowsPattern | None:
    if not isinstance(op, MultiplyOp):
        return None
    for x, factor in (op.inputs, reversed(op.inputs)):
        if not isinstance(factor.op, RsqrtOp) or only_user(factor, uses) is None:
            continue
        shifted = factor.op.inputs[0].op
        if not isinstance(shifted, AddScalarOp):
            continue
        mean = shifted.inputs[0].op
        if not isinstance(mean, ReduceMeanOp) or not _along_rows(mean):
            continue
        square = _widest(mean.inputs[0]).op
        if not isinstance(square, SquareOp | MultiplyOp):
            continue
        base = _widest(x)
        is_whole = same_shape(extents_of(op.outputs[0]), extents_of(x))
        if is_whole and all(_widest(operand) is base for operand in square.inputs):
            return RowsPattern(RMS_NORM, base, float(shifted.attrs["scalar"]))
    return None


def _along_rows(op: Operator) -> bool:
    """Whether a reduction is along the last dim, which it keeps."""
    last = len(op.inputs[0].shape) - 1
    return bool(op.attrs["keepdims"]) and [dim % (last + 1) for dim in op.attrs["dims"]] == [last]


def _widest(x: Tensor) -> Tensor:
    """Skip casts to wider dtypes, which lose nothing: return the tensor before them."""
    while isinstance(x.op, CastOp) and _holds(x.dtype.name, x.op.inputs[0].dtype.name):
        x = x.op.inputs[0]
    return x


def _holds(wide: str, narrow: str) -> bool:
    return wide == narrow or (wide in ("float32", "float64") and narrow in ("float16", "bfloat16"))
