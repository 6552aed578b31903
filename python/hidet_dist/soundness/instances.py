"""Random instances of every operator class that gets a rule: shapes, dtypes and attributes.

An instance is only an operator with symbolic inputs on the CPU, so making it compiles and runs nothing. Dims are small,
and mostly divisible by 2, 3 and 4, so that every mesh of the harness has choices that divide, choices with padding, and
choices that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import hidet
import numpy as np
from hidet import ops
from hidet.graph import Operator, Tensor
from hidet.graph.ops import activation, arithmetic, compare, create, pool, transform
from hidet.graph.ops.attention.attention import AttnOp
from hidet.graph.ops.attention.attention_mask import AttnMaskAddOp
from hidet.graph.ops.conv1d.conv1d_gemm import Conv1dGemmImageTransformOp
from hidet.graph.ops.conv2d.conv2d import Conv2dChannelLastOp
from hidet.graph.ops.conv2d.conv2d_gemm import (
    Conv2dGemmFp16Op,
    Conv2dGemmFp16PretransformOP,
    Conv2dGemmImageTransformOp,
)
from hidet.graph.ops.conv2d.conv2d_winograd import (
    Conv2dWinogradFilterTransformOp,
    Conv2dWinogradImageTransformOp,
    Conv2dWinogradInverseTransformOp,
)
from hidet.graph.ops.conv2d_transpose.conv2d_transpose_gemm import Conv2dTransposeGemmImageOp
from hidet.graph.ops.conv3d.conv3d_gemm import Conv3dGemmImageTransformOp
from hidet.graph.ops.embedding_bag import EmbeddingBagOp
from hidet.graph.ops.matmul import matmul_f16_cute, matmul_f16_cute_experimental
from hidet.graph.ops.matmul.cuda_batch_matmul import CudaBatchMatmulOp
from hidet.graph.ops.matmul.hip_batch_matmul import BatchMatmulHipOp
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.ops.matmul.matmul_cublas import CublasMatmulOp
from hidet.graph.ops.matmul.matmul_f16 import MatmulF16Op
from hidet.graph.ops.matmul.matmul_f16_sm90 import MatmulF16SM90Op
from hidet.graph.ops.matmul.matmul_f32_x86 import Matmulx86Op
from hidet.graph.ops.normalize.norm import NormalizeOp
from hidet.graph.ops.quant.matmul import SymmetricQuantizedMatmulOp
from hidet.graph.ops.quant.matmul_f16_i8 import SymmetricQuantizedMatmulF16I8Op
from hidet.graph.ops.quant.matmul_f16_i8_atomic import SymmetricQuantizedMatmulF16I8AtomicOp
from hidet.graph.ops.quant.symmetric import SymmetricDeQuantizationOp, SymmetricQuantizationOp
from hidet.graph.ops.reduce import reduce as reductions
from hidet.graph.ops.scatter import ScatterBaseOp
from hidet.graph.ops.special import BarrierOp
from hidet.graph.ops.transpose2d import TransposeOp2D

from hidet_dist.normalize import NormalGraph
from hidet_dist.normalize.expert_layers import join_expert_layers
from hidet_dist.operators import elementwise as elementwise_operators
from hidet_dist.operators.convolution import IntegerConvolutionOp
from hidet_dist.operators.expert_layers import CHOSEN, LABELS, ExpertLayerOp
from hidet_dist.operators.experts import ExpertProductOp
from hidet_dist.operators.indexing import HistogramOp, ScatterElementsOp, ScatterRowsOp
from hidet_dist.operators.pooling import WindowPoolOp
from hidet_dist.operators.products import IntegerMatmulOp
from hidet_dist.operators.reductions import CumulativeOp, ReduceOp
from hidet_dist.operators.row_attention import RowAttentionOp, RowAttentionPartsOp
from hidet_dist.operators.sorting import ArgsortOp
from hidet_dist.operators.states import ReadStateOp, ReplaceStateOp, ShiftStateOp, WriteRowsOp

Rng = np.random.Generator
_SIZES = (2, 3, 4, 6, 7, 8, 11, 12)


@dataclass(frozen=True)
class Instance:
    """An operator, and the ranges of values of those inputs on which it is not defined everywhere."""

    op: Operator
    ranges: Mapping[int, tuple[float, float]] = field(default_factory=dict)


def _pick(rng: Rng, options: Any) -> Any:
    return options[int(rng.integers(len(options)))]


def _size(rng: Rng) -> int:
    return int(_pick(rng, _SIZES))


def _shape(rng: Rng, low: int = 1, high: int = 3) -> list[int]:
    return [_size(rng) for _ in range(int(rng.integers(low, high + 1)))]


def _symbol(shape: Any, dtype: str = "float32") -> Tensor:
    return hidet.symbol(list(shape), dtype, "cpu")


def _float(rng: Rng) -> str:
    return str(_pick(rng, ("float32", "float16", "float64")))


def _broadcast_pair(rng: Rng) -> tuple[list[int], list[int]]:
    """Draw two shapes that broadcast, with dims of size 1 and missing leading dims on either side."""
    shape = _shape(rng, 1, 3)
    a, b = list(shape), list(shape)
    for dim in range(len(shape)):
        if rng.random() < 0.25:
            _pick(rng, (a, b))[dim] = 1
    drop = int(rng.integers(0, len(shape)))
    if rng.random() < 0.4:
        del b[:drop]
    return (a, b) if rng.random() < 0.5 else (b, a)


Maker = Callable[[Rng], Instance]
MAKERS: dict[type[Operator], Maker] = {}


def _makes(*classes: type[Operator]) -> Callable[[Callable[[Rng, Any], Operator]], Callable[[Rng, Any], Operator]]:
    """Register a function that makes an operator of each of ``classes``."""

    def register(make: Callable[[Rng, Any], Operator]) -> Callable[[Rng, Any], Operator]:
        for cls in classes:
            MAKERS[cls] = lambda rng, cls=cls: Instance(make(rng, cls))  # type: ignore[misc]
        return make

    return register


# Elementwise

_UNARY: dict[type[Operator], tuple[tuple[Any, ...], tuple[float, float]]] = {
    **dict.fromkeys(
        (
            activation.HardSigmoidOp,
            activation.HardSwishOp,
            activation.LogSigmoidOp,
            activation.ReluOp,
            activation.SigmoidOp,
            activation.SiluOp,
            activation.SoftSignOp,
            activation.TanhShrinkOp,
            arithmetic.AbsOp,
            arithmetic.AsinhOp,
            arithmetic.AtanOp,
            arithmetic.CeilOp,
            arithmetic.CosOp,
            arithmetic.CoshOp,
            arithmetic.CubeOp,
            arithmetic.ErfOp,
            arithmetic.ExpOp,
            arithmetic.Expm1Op,
            arithmetic.FloorOp,
            arithmetic.IsFiniteOp,
            arithmetic.IsInfOp,
            arithmetic.IsNanOp,
            arithmetic.NegativeOp,
            arithmetic.RoundOp,
            arithmetic.SignOp,
            arithmetic.SinOp,
            arithmetic.SinhOp,
            arithmetic.SquareOp,
            arithmetic.TanOp,
            arithmetic.TanhOp,
            arithmetic.TruncOp,
        ),
        ((), (-4.0, 5.0)),
    ),
    **dict.fromkeys((arithmetic.AcosOp, arithmetic.AsinOp, arithmetic.AtanhOp), ((), (-0.9, 0.9))),
    **dict.fromkeys(
        (
            arithmetic.AcoshOp,
            arithmetic.Log10Op,
            arithmetic.Log1pOp,
            arithmetic.Log2Op,
            arithmetic.LogOp,
            arithmetic.ReciprocalOp,
            arithmetic.RsqrtOp,
            arithmetic.SqrtOp,
        ),
        ((), (1.1, 5.0)),
    ),
    activation.ClipOp: ((-1.0, 1.0), (-4.0, 5.0)),
    activation.CeluOp: ((0.5,), (-4.0, 5.0)),
    activation.EluOp: ((0.5,), (-4.0, 5.0)),
    activation.GeluOp: ((True,), (-4.0, 5.0)),
    activation.HardShrinkOp: ((0.75,), (-4.0, 5.0)),
    activation.HardTanhOp: ((-2.0, 3.0), (-4.0, 5.0)),
    activation.SeluOp: ((1.5, 1.25), (-4.0, 5.0)),
    activation.SoftPlusOp: ((2, 3), (-4.0, 5.0)),
    activation.SoftShrinkOp: ((0.75,), (-4.0, 5.0)),
    activation.LeakyReluOp: ((0.1,), (-4.0, 5.0)),
    activation.ThresholdOp: ((0.5, 0.25), (-4.0, 5.0)),
    arithmetic.ClampOp: ((-1.0, 1.0), (-4.0, 5.0)),
}


def _unary(cls: Any, arguments: tuple[Any, ...], span: tuple[float, float]) -> Maker:
    return lambda rng: Instance(cls(_symbol(_shape(rng)), *arguments), {0: span})


for _cls, (_arguments, _span) in _UNARY.items():
    MAKERS[_cls] = _unary(_cls, _arguments, _span)


@_makes(
    arithmetic.AddScalarOp,
    arithmetic.SubScalarOp,
    arithmetic.RSubScalarOp,
    arithmetic.MultiplyScalarOp,
    arithmetic.DivideScalarOp,
)
def _scalar(rng: Rng, cls: Any) -> Operator:
    return cls(_symbol(_shape(rng)), hidet.float32(float(rng.uniform(1, 2))))


MAKERS[arithmetic.RDivideScalarOp] = lambda rng: Instance(
    arithmetic.RDivideScalarOp(_symbol(_shape(rng)), hidet.float32(1.5)), {0: (1.0, 2.0)}
)


def _binary(cls: Any, dtypes: tuple[str, ...], ranges: Mapping[int, tuple[float, float]]) -> Maker:
    def make(rng: Rng) -> Instance:
        a, b = _broadcast_pair(rng)
        dtype = str(_pick(rng, dtypes))
        return Instance(cls(_symbol(a, dtype), _symbol(b, dtype)), ranges)

    return make


_FLOATS = ("float32", "float16", "int32")
for _cls in (
    arithmetic.AddOp,
    arithmetic.SubtractOp,
    arithmetic.MultiplyOp,
    arithmetic.Atan2Op,
    compare.EqualOp,
    compare.NotEqualOp,
    compare.LessOp,
    compare.LessEqualOp,
    compare.GreaterOp,
    compare.GreaterEqualOp,
):
    MAKERS[_cls] = _binary(_cls, ("float32",) if _cls is arithmetic.Atan2Op else _FLOATS, {})
for _cls in (arithmetic.DivideOp, arithmetic.ModOp, arithmetic.PowOp):
    MAKERS[_cls] = _binary(_cls, ("float32",), {0: (1.0, 5.0), 1: (1.0, 3.0)})
for _cls in (arithmetic.BitwiseAndOp, arithmetic.BitwiseOrOp, arithmetic.BitwiseXorOp):
    MAKERS[_cls] = _binary(_cls, ("int32", "int8"), {})
for _cls in (arithmetic.LeftShiftOp, arithmetic.RightShiftOp):
    MAKERS[_cls] = _binary(_cls, ("int32",), {0: (1, 50), 1: (0, 4)})
for _cls in (compare.LogicalAndOp, compare.LogicalOrOp, compare.LogicalXorOp):
    MAKERS[_cls] = _binary(_cls, ("bool",), {})
MAKERS[activation.PReluOp] = _binary(activation.PReluOp, ("float32",), {})


@_makes(arithmetic.BitwiseNotOp)
def _bitwise_not(rng: Rng, cls: Any) -> Operator:
    return cls(_symbol(_shape(rng), "int32"))


@_makes(compare.LogicalNotOp)
def _logical_not(rng: Rng, cls: Any) -> Operator:
    return cls(_symbol(_shape(rng), "bool"))


@_makes(transform.CastOp)
def _cast(rng: Rng, cls: Any) -> Operator:
    source, target = _pick(rng, (("float32", "int32"), ("int32", "float32"), ("float32", "float16"), ("bool", "int32")))
    return ops.cast(_symbol(_shape(rng), source), target).op


@_makes(arithmetic.MaxOp, arithmetic.MinOp)
def _variadic(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng)
    return cls(*(_symbol(shape) for _ in range(int(rng.integers(2, 4)))))


@_makes(arithmetic.WhereOp)
def _where(rng: Rng, cls: Any) -> Operator:
    a, b = _broadcast_pair(rng)
    return cls(_symbol(a, "bool"), _symbol(b), _symbol(_pick(rng, (a, b))))


@_makes(arithmetic.WhereScalarScalarOp)
def _where_scalars(rng: Rng, cls: Any) -> Operator:
    return cls(_symbol(_shape(rng), "bool"), 1.5, 2.5)


@_makes(arithmetic.WhereScalarTensorOp)
def _where_scalar(rng: Rng, cls: Any) -> Operator:
    a, b = _broadcast_pair(rng)
    return cls(cond=_symbol(a, "bool"), y=_symbol(b), x=1.5)


@_makes(arithmetic.WhereTensorScalarOp)
def _where_tensor(rng: Rng, cls: Any) -> Operator:
    a, b = _broadcast_pair(rng)
    return cls(cond=_symbol(a, "bool"), x=_symbol(b), y=1.5)


def _operations() -> tuple[Any, Any]:
    unary = arithmetic.UnaryElementwiseOperation.from_callable(lambda x: x * x, "square", {}, {})
    binary = arithmetic.BinaryElementwiseOperation.from_callable(lambda a, b: a + b, "add")
    return unary, binary


@_makes(arithmetic.CompositeElementwiseOp)
def _composite(rng: Rng, cls: Any) -> Operator:
    unary, binary = _operations()
    return cls(_symbol(_shape(rng)), unary, None, binary)


@_makes(arithmetic.MultiInputCompositeElementwiseOp)
def _multi_composite(rng: Rng, cls: Any) -> Operator:
    unary, binary = _operations()
    shape = _shape(rng)
    return cls(_symbol(shape), _symbol(shape), unary, None, binary)


@_makes(activation.SoftmaxOp)
def _softmax(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng)
    return cls(_symbol(shape), int(rng.integers(len(shape))))


# Complex numbers


def _complex_classes() -> tuple[type[Operator], ...]:
    from hidet.graph.ops.complex import ConjOperator, ImagOperator, RealOperator

    return (ConjOperator, ImagOperator, RealOperator)


@_makes(*_complex_classes())
def _complex(rng: Rng, cls: Any) -> Operator:
    return cls(_symbol(_shape(rng), "complex64"))


def _make_complex() -> None:
    from hidet.graph.ops.complex import MakeComplexOperator

    MAKERS[MakeComplexOperator] = _binary(MakeComplexOperator, ("float32",), {})


_make_complex()


# Reductions


@_makes(
    reductions.ReduceSumOp,
    reductions.ReduceMeanOp,
    reductions.ReduceMaxOp,
    reductions.ReduceMinOp,
    reductions.ReduceProdOp,
    reductions.ReduceAndOp,
    reductions.ReduceOrOp,
)
def _reduction(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng)
    dims = sorted(int(d) for d in rng.choice(len(shape), int(rng.integers(1, len(shape) + 1)), replace=False))
    boolean = cls in (reductions.ReduceAndOp, reductions.ReduceOrOp)
    dtype = "bool" if boolean else str(_pick(rng, ("float32", "float16", "int32")))
    return cls(_symbol(shape, dtype), dims, bool(rng.integers(2)))


@_makes(reductions.ArgMaxOp, reductions.ArgMinOp)
def _arg_reduction(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng)
    return cls(_symbol(shape), int(rng.integers(len(shape))), bool(rng.integers(2)))


def _cumulative_class() -> type[Operator]:
    from hidet.graph.ops.cumulative import CumulativeSumOp

    return CumulativeSumOp


@_makes(_cumulative_class())
def _cumulative(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng)
    return cls(_symbol(shape), int(rng.integers(len(shape))), bool(rng.integers(2)), bool(rng.integers(2)))


@_makes(NormalizeOp)
def _normalize(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng, 2, 3)
    dims = list(range(int(rng.integers(1, len(shape))), len(shape)))
    return cls(_symbol(shape), dims, 1e-5, "float32")


def _lp_class() -> type[Operator]:
    from hidet.graph.ops.normalize.lp import LpNormOp

    return LpNormOp


@_makes(_lp_class())
def _lp_norm(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng)
    return cls(_symbol(shape), 2.0, int(rng.integers(len(shape))), 1e-12)


# Matrix products


def _batched(rng: Rng) -> tuple[list[int], list[int]]:
    return _broadcast_pair(rng) if rng.random() < 0.5 else ([], [])


@_makes(MatmulOp)
def _matmul(rng: Rng, cls: Any) -> Operator:
    m, n, k = (_size(rng) for _ in range(3))
    a, b = _batched(rng)
    transposed = bool(rng.integers(2))
    dtype = _float(rng)
    left, right = [*a, m, k], [*b, n, k] if transposed else [*b, k, n]
    vector = int(rng.integers(6))
    if vector == 0:
        left = [k]
    elif vector == 1 and not transposed:
        right = [k]
    return cls(_symbol(left, dtype), _symbol(right, dtype), transpose_b=transposed)


@_makes(CudaBatchMatmulOp, BatchMatmulHipOp)
def _batch_matmul(rng: Rng, cls: Any) -> Operator:
    batch, m, n, k = (_size(rng) for _ in range(4))
    return cls(_symbol([batch, m, k]), _symbol([batch, k, n]), mma="simt")


@_makes(Matmulx86Op)
def _matmul_x86(rng: Rng, cls: Any) -> Operator:
    m, n, k = (_size(rng) for _ in range(3))
    return cls(_symbol([m, k]), _symbol([k, n]))


@_makes(CublasMatmulOp)
def _matmul_cublas(rng: Rng, cls: Any) -> Operator:
    m, n, k = (_size(rng) for _ in range(3))
    transposed = bool(rng.integers(2))
    return cls(_symbol([m, k], "float16"), _symbol([n, k] if transposed else [k, n], "float16"), transposed)


@_makes(MatmulF16Op)
def _matmul_f16(rng: Rng, cls: Any) -> Operator:
    m, n, k = (_size(rng) for _ in range(3))
    return cls(_symbol([m, k], "float16"), _symbol([k, n], "float16"), "float32", 1)


@_makes(MatmulF16SM90Op)
def _matmul_sm90(rng: Rng, cls: Any) -> Operator:
    m, n, k = (_size(rng) for _ in range(3))
    return cls(_symbol([m, k], "float16"), _symbol([k, n], "float16"), True, "float32", 1)


@_makes(matmul_f16_cute.MatmulF16CuteOp, matmul_f16_cute_experimental.MatmulF16CuteOp)
def _matmul_cute(rng: Rng, cls: Any) -> Operator:
    m, n, k = (_size(rng) for _ in range(3))
    transposed = bool(rng.integers(2))
    return cls(_symbol([m, k], "float16"), _symbol([n, k] if transposed else [k, n], "float16"), "float32", transposed)


@_makes(SymmetricQuantizedMatmulOp, SymmetricQuantizedMatmulF16I8Op, SymmetricQuantizedMatmulF16I8AtomicOp)
def _matmul_quantized(rng: Rng, cls: Any) -> Operator:
    m, n, k = (_size(rng) for _ in range(3))
    return cls(_symbol([m, k], "float16"), _symbol([k, n], "int8"), _symbol([n], "float16"))


@_makes(SymmetricQuantizationOp)
def _quantize(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng, 2, 3)
    return cls(_symbol(shape), hidet.int8, int(rng.integers(len(shape))))


@_makes(SymmetricDeQuantizationOp)
def _dequantize(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng, 2, 3)
    dim = int(rng.integers(len(shape)))
    return cls(_symbol(shape, "int8"), _symbol([*shape[:dim], *shape[dim + 1 :]], "float16"), dim)


# Convolutions


def _channels(rng: Rng) -> tuple[int, int, int]:
    """Draw channels in, channels out and groups of a dense, grouped or depthwise convolution."""
    groups = int(_pick(rng, (1, 1, 2, 4, 8)))
    return groups * int(_pick(rng, (1, 2, 4))), groups * int(_pick(rng, (1, 2, 3))), groups


def _convolution(ndim: int) -> Callable[[Rng, Any], Operator]:
    def make(rng: Rng, cls: Any) -> Operator:
        c, oc, groups = _channels(rng)
        size = [4, 6, 8] if ndim < 3 else [3, 4]
        x = _symbol([_size(rng) % 5 + 1, c, *(int(_pick(rng, size)) for _ in range(ndim))])
        w = _symbol([oc, c // groups, *(int(_pick(rng, (1, 2, 3))) for _ in range(ndim))])
        stride = int(_pick(rng, (1, 2)))
        if ndim == 2:
            return ops.conv2d(x, w, stride=stride, padding=int(_pick(rng, (0, 1))), groups=groups).op
        build = ops.conv1d if ndim == 1 else ops.conv3d
        return build(x, w, stride=stride, groups=groups).op

    return make


def _transposed(ndim: int) -> Callable[[Rng, Any], Operator]:
    def make(rng: Rng, cls: Any) -> Operator:
        groups = int(_pick(rng, (1, 1, 2, 4)))
        c, wc = groups * int(_pick(rng, (1, 2, 4))), int(_pick(rng, (1, 2, 3)))
        x = _symbol([2, c, *(int(_pick(rng, (2, 3, 4))) for _ in range(ndim))])
        w = _symbol([c, wc, *(int(_pick(rng, (1, 2, 3))) for _ in range(ndim))])
        stride, padding = int(_pick(rng, (1, 2))), int(_pick(rng, (0, 1)))
        if any(int(k) <= padding for k in w.shape[2:]):
            padding = 0
        build = {1: ops.conv1d_transpose, 2: ops.conv2d_transpose, 3: ops.conv3d_transpose}[ndim]
        return build(x, w, stride=stride, padding=padding, groups=groups, output_padding=0).op

    return make


def _convolutions() -> None:
    from hidet.graph.ops.conv1d.conv1d import Conv1dOp
    from hidet.graph.ops.conv1d_transpose.conv1d_transpose import Conv1dTransposeOp
    from hidet.graph.ops.conv2d.conv2d import Conv2dOp
    from hidet.graph.ops.conv2d_transpose.conv2d_transpose import Conv2dTransposeOp
    from hidet.graph.ops.conv3d.conv3d import Conv3dOp
    from hidet.graph.ops.conv3d_transpose.conv3d_transpose import Conv3dTransposeOp

    for ndim, cls in ((1, Conv1dOp), (2, Conv2dOp), (3, Conv3dOp)):
        _makes(cls)(_convolution(ndim))
    for ndim, cls in ((1, Conv1dTransposeOp), (2, Conv2dTransposeOp), (3, Conv3dTransposeOp)):
        _makes(cls)(_transposed(ndim))


_convolutions()


@_makes(Conv2dChannelLastOp)
def _conv_channel_last(rng: Rng, cls: Any) -> Operator:
    c, oc, groups = _channels(rng)
    x = _symbol([int(_pick(rng, (1, 2, 4))), 6, int(_pick(rng, (4, 6))), c])
    return cls(x, _symbol([oc, c // groups, 3, 1]), padding=[1, 0, 0], stride=[1, 1], dilations=[1, 1], groups=groups)


@_makes(Conv1dGemmImageTransformOp)
def _conv1d_image(rng: Rng, cls: Any) -> Operator:
    return cls(
        _symbol([4, int(_pick(rng, (4, 8))), 8]), kernel=3, stride=1, dilations=1, groups=int(_pick(rng, (1, 2)))
    )


@_makes(Conv2dGemmImageTransformOp)
def _conv2d_image(rng: Rng, cls: Any) -> Operator:
    x = _symbol([int(_pick(rng, (2, 4))), int(_pick(rng, (4, 8))), 6, 6])
    return cls(x, kernel=[3, 3], stride=[1, 1], dilations=[1, 1], groups=int(_pick(rng, (1, 2))))


@_makes(Conv3dGemmImageTransformOp)
def _conv3d_image(rng: Rng, cls: Any) -> Operator:
    x = _symbol([2, int(_pick(rng, (4, 8))), 3, 3, 4])
    return cls(x, kernel=[2, 2, 1], stride=[1, 1, 1], dilations=[1, 1, 1], groups=int(_pick(rng, (1, 2))))


@_makes(Conv2dTransposeGemmImageOp)
def _conv2d_transpose_image(rng: Rng, cls: Any) -> Operator:
    x = _symbol([2, int(_pick(rng, (4, 8))), 3, 4])
    return cls(x, (3, 3), (1, 1), (1, 1, 1, 1), int(_pick(rng, (1, 2))), (0, 0))


@_makes(Conv2dGemmFp16Op)
def _conv2d_fp16(rng: Rng, cls: Any) -> Operator:
    x, c = _symbol([2, 6, 6, 8], "float16"), 8
    return cls(x, _symbol([c * 9, 8], "float16"), [8, c, 3, 3], [0, 0, 0], [1, 1], [1, 1], 1)


@_makes(Conv2dGemmFp16PretransformOP)
def _conv2d_pretransform(rng: Rng, cls: Any) -> Operator:
    return cls(_symbol([_size(rng), 4, 6, 6], "float16"), 1, 0.0, bool(rng.integers(2)))


@_makes(Conv2dWinogradFilterTransformOp)
def _winograd_filter(rng: Rng, cls: Any) -> Operator:
    return cls(_symbol([_size(rng), _size(rng), 3, 3]), [2, 2])


@_makes(Conv2dWinogradImageTransformOp)
def _winograd_image(rng: Rng, cls: Any) -> Operator:
    return cls(_symbol([_size(rng) % 5 + 1, _size(rng), 6, 6]), [3, 3], [2, 2])


@_makes(Conv2dWinogradInverseTransformOp)
def _winograd_inverse(rng: Rng, cls: Any) -> Operator:
    return cls(_symbol([4, 4, _size(rng), 2 * 2 * 2]), [2, 4, 6, 6], [3, 3], [2, 2])


# Pooling

_POOLS = [cls for name, cls in vars(pool).items() if isinstance(cls, type) and name.endswith("Op") and "Nd" not in name]


@_makes(*(cls for cls in _POOLS if issubclass(cls, pool.MaxPoolNdOp | pool.AvgPoolNdOp)))
def _pool(rng: Rng, cls: Any) -> Operator:
    spatial = [int(_pick(rng, (4, 6))) for _ in range(cls.ndim)]
    n, c = int(_pick(rng, (2, 3, 4))), _size(rng)
    x = _symbol([n, *spatial, c] if cls.last_channel else [n, c, *spatial])
    kernel = int(_pick(rng, (2, 3)))
    extra = {"count_include_pad": bool(rng.integers(2))} if issubclass(cls, pool.AvgPoolNdOp) else {}
    return cls(x, kernel, int(_pick(rng, (1, 2))), int(_pick(rng, (0, 1))), **extra)


@_makes(*(cls for cls in _POOLS if issubclass(cls, pool.AdaptivePoolNdOp)))
def _adaptive_pool(rng: Rng, cls: Any) -> Operator:
    spatial = [int(_pick(rng, (4, 5, 6))) for _ in range(cls.spatial_ndim)]
    n, c = int(_pick(rng, (2, 3, 4))), _size(rng)
    x = _symbol([n, *spatial, c] if cls.last_channel else [n, c, *spatial])
    return cls(x, [int(_pick(rng, (1, 2, 3))) for _ in spatial])


def _resize_class() -> type[Operator]:
    from hidet.graph.ops.image import Resize2dOp

    return Resize2dOp


@_makes(_resize_class())
def _resize(rng: Rng, cls: Any) -> Operator:
    x = _symbol([int(_pick(rng, (2, 4))), _size(rng), 4, 6])
    return ops.resize2d(x, size=(6, 8), method=str(_pick(rng, ("nearest", "linear")))).op


# Shapes


@_makes(transform.ReshapeOp)
def _reshape(rng: Rng, cls: Any) -> Operator:
    """Split and merge dims at random: the factors of each dim are regrouped."""
    factors = [int(_pick(rng, (2, 3, 4))) for _ in range(int(rng.integers(2, 5)))]

    def grouped() -> list[int]:
        shape, left = [], list(factors)
        while left:
            take = int(rng.integers(1, len(left) + 1))
            shape.append(int(np.prod(left[:take])))
            del left[:take]
        return shape

    return cls(_symbol(grouped()), grouped())


@_makes(transform.RearrangeOp)
def _rearrange(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng, 2, 4)
    order = [int(d) for d in rng.permutation(len(shape))]
    cut = int(rng.integers(1, len(order)))
    plan = [order[:cut], *([d] for d in order[cut:])]
    return cls(_symbol(shape), plan)


@_makes(transform.PermuteDimsOp)
def _permute(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng, 2, 4)
    return cls(_symbol(shape), [int(d) for d in rng.permutation(len(shape))])


@_makes(TransposeOp2D)
def _transpose2d(rng: Rng, cls: Any) -> Operator:
    return cls(_symbol([_size(rng), _size(rng)]))


@_makes(transform.SqueezeOp)
def _squeeze(rng: Rng, cls: Any) -> Operator:
    return cls(_symbol([1, _size(rng), 1, _size(rng)]), [0, 2] if rng.integers(2) else [2])


@_makes(transform.UnsqueezeOp)
def _unsqueeze(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng)
    return cls(_symbol(shape), [int(rng.integers(len(shape) + 1))])


@_makes(transform.FlattenOp)
def _flatten(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng, 2, 4)
    start = int(rng.integers(len(shape)))
    return cls(_symbol(shape), start, int(rng.integers(start, len(shape))))


@_makes(transform.BroadcastOp)
def _broadcast(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng)
    source = [1 if rng.random() < 0.4 else size for size in shape]
    return cls(_symbol(source[int(rng.integers(len(shape))) :]), shape)


@_makes(transform.ConcatOp)
def _concat(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng)
    axis = int(rng.integers(len(shape)))
    parts = []
    for _ in range(int(rng.integers(1, 4))):
        part_shape = list(shape)
        part_shape[axis] = _size(rng)
        parts.append(_symbol(part_shape))
    return cls(*parts, axis=axis)


@_makes(transform.StridedSliceOp)
def _slice(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng, 1, 3)
    axes = sorted(int(d) for d in rng.choice(len(shape), int(rng.integers(1, len(shape) + 1)), replace=False))
    is_whole = [bool(rng.random() < 0.3) for _ in axes]
    starts = [0 if w else int(rng.integers(shape[d])) for d, w in zip(axes, is_whole, strict=True)]
    ends = [
        shape[d] if w else int(rng.integers(s + 1, shape[d] + 1))
        for d, s, w in zip(axes, starts, is_whole, strict=True)
    ]
    return cls(_symbol(shape), starts, ends, axes, [1 if w else int(_pick(rng, (1, 1, 2))) for w in is_whole])


@_makes(arithmetic.SetStridedSliceOp)
def _set_slice(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng, 2, 3)
    starts = [int(rng.integers(size)) if rng.random() < 0.5 else 0 for size in shape]
    ends = [int(rng.integers(s + 1, size + 1)) if s else size for s, size in zip(starts, shape, strict=True)]
    return cls(_symbol(shape), 0.5, starts, ends, [], [1] * len(shape))


@_makes(transform.PadOp)
def _pad(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng)
    return cls(_symbol(shape), [int(_pick(rng, (0, 0, 1, 2))) for _ in range(2 * len(shape))], "constant", 0.5)


@_makes(transform.TileOp)
def _tile(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng)
    return cls(_symbol(shape), [int(_pick(rng, (1, 1, 2, 3))) for _ in shape])


@_makes(transform.RepeatInterleaveOp)
def _repeat(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng)
    return cls(_symbol(shape), int(_pick(rng, (2, 3))), _pick(rng, (None, *range(len(shape)))))


@_makes(transform.TrilOp, transform.TriuOp)
def _triangle(rng: Rng, cls: Any) -> Operator:
    return cls(_symbol(_shape(rng, 2, 3)), int(rng.integers(-2, 3)))


@_makes(transform.FlipOp)
def _flip(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng, 2, 3)
    return cls(_symbol(shape), [int(rng.integers(len(shape)))])


@_makes(arithmetic.RollOp)
def _roll(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng, 2, 3)
    return cls(_symbol(shape), [int(_pick(rng, (-1, 1)))], [int(rng.integers(len(shape)))])


@_makes(transform.AsStridedOp)
def _as_strided(rng: Rng, cls: Any) -> Operator:
    a, b = _size(rng), _size(rng)
    return cls(_symbol([a, b]), *_pick(rng, (([a, b], [b, 1]), ([b, a], [1, b]), ([a], [b]))))


@_makes(transform.Im2ColOp)
def _im2col(rng: Rng, cls: Any) -> Operator:
    x = _symbol([int(_pick(rng, (2, 4))), _size(rng), 4, 6])
    return cls(x, [2, 3], [1, 1], [int(_pick(rng, (0, 1)))] * 2, [1, int(_pick(rng, (1, 2)))])


@_makes(BarrierOp)
def _barrier(rng: Rng, cls: Any) -> Operator:
    return cls(_symbol(_shape(rng)))


# Lookups


@_makes(transform.TakeOp)
def _take(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng)
    return cls(_symbol(shape), _symbol(_shape(rng, 1, 2), "int64"), int(rng.integers(len(shape))))


@_makes(transform.GatherOp)
def _gather(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng)
    axis = int(rng.integers(len(shape)))
    indices = list(shape)
    indices[axis] = _size(rng)
    return cls(_symbol(shape), _symbol(indices, "int64"), axis)


@_makes(transform.IdxSelOp)
def _index_select(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng)
    return cls(_symbol(shape), _symbol([_size(rng)], "int64"), int(rng.integers(len(shape))))


# Without inputs


@_makes(create.FullOp)
def _full(rng: Rng, cls: Any) -> Operator:
    return cls(_shape(rng), 1.5)


# Defined by hand


@_makes(AttnOp)
def _attention(rng: Rng, cls: Any) -> Operator:
    batch, heads, rows, columns, inner = (int(_pick(rng, (2, 3, 4))) for _ in range(5))
    kv_heads = int(_pick(rng, (1, heads)))
    q = _symbol([batch, heads, rows, inner], "float16")
    k = _symbol([batch, kv_heads, inner, columns], "float16")
    return cls(q, k, _symbol([batch, kv_heads, columns, inner], "float16"), bool(rng.integers(2)))


@_makes(AttnMaskAddOp)
def _masked_attention(rng: Rng, cls: Any) -> Operator:
    batch, heads, rows, columns, inner = (int(_pick(rng, (2, 3, 4))) for _ in range(5))
    q = _symbol([batch, heads, rows, inner], "float16")
    k, v = _symbol([batch, heads, inner, columns], "float16"), _symbol([batch, heads, columns, inner], "float16")
    return cls(q, k, v, _symbol([int(_pick(rng, (1, batch))), 1, rows, columns], "float16"))


@_makes(ScatterBaseOp)
def _scatter(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng, 2, 3)
    dim = int(rng.integers(len(shape)))
    index = list(shape)
    index[dim] = _size(rng)
    fname = str(_pick(rng, ("add", "replace")))
    return cls(_symbol(shape), _symbol(index, "int64"), _symbol(index), dim, fname)


def _embedding_bag(rng: Rng) -> Instance:
    rows, features, count = _size(rng), _size(rng), int(_pick(rng, (6, 8)))
    op = EmbeddingBagOp(
        _symbol([count], "int64"),
        _symbol([rows, features]),
        _symbol([int(_pick(rng, (2, 3)))], "int64"),
        str(_pick(rng, ("sum", "mean"))),
    )
    return Instance(op, {2: (1, 3)})


MAKERS[EmbeddingBagOp] = _embedding_bag


# Operators added to hidet's

_MAPPED: tuple[tuple[str, list[Any]], ...] = (
    ("round", []),
    ("softplus", [1.5, 20.0]),
    ("elu", [0.5, 1.5, 1.0]),
    ("log_sigmoid", []),
    ("mish", []),
    ("tanhshrink", []),
    ("hardshrink", [0.75]),
    ("sign", []),
    ("exp2", []),
    ("integer_power", [3]),
    ("power_of", [2.0]),
    ("logical_not", []),
    ("nan_to_num", [0.0, 2.0, -2.0]),
    ("clamp", [-1.0, None]),
)


@_makes(elementwise_operators.MapOp)
def _map(rng: Rng, cls: Any) -> Operator:
    function, parameters = _pick(rng, _MAPPED)
    return cls(_symbol(_shape(rng)), function, parameters)


_COMBINED = ("floor_divide", "truncate_divide", "remainder", "fmod", "maximum", "minimum", "fmax", "fmin", "eq", "lt")


def _combine(rng: Rng) -> Instance:
    a, b = _broadcast_pair(rng)
    dtype, function = str(_pick(rng, _FLOATS)), str(_pick(rng, _COMBINED))
    return Instance(elementwise_operators.CombineOp(_symbol(a, dtype), _symbol(b, dtype), function), {1: (1, 5)})


MAKERS[elementwise_operators.CombineOp] = _combine


@_makes(elementwise_operators.CombineScalarOp)
def _combine_scalar(rng: Rng, cls: Any) -> Operator:
    x = _symbol(_shape(rng), str(_pick(rng, _FLOATS)))
    return cls(x, str(_pick(rng, _COMBINED)), int(_pick(rng, (2, 3))), False)


@_makes(IntegerMatmulOp)
def _integer_matmul(rng: Rng, cls: Any) -> Operator:
    batch, (m, k, n) = [int(_pick(rng, (2, 4)))] * int(rng.integers(2)), (_size(rng) for _ in range(3))
    left, right = ([size if rng.integers(2) else 1 for size in batch] for _ in range(2))
    x, y = (_symbol(shape, str(_pick(rng, ("int8", "uint8")))) for shape in ([*left, m, k], [*right, k, n]))
    return cls(x, y, "int32")


@_makes(IntegerConvolutionOp)
def _integer_convolution(rng: Rng, cls: Any) -> Operator:
    dims = int(rng.integers(1, 3))
    groups, channels, out = _channels(rng)
    x = _symbol([int(_pick(rng, (2, 3))), channels, *[int(_pick(rng, (4, 6, 7)))] * dims], "int32")
    weight = _symbol([out, channels // groups, *[2] * dims], "int8")
    return cls(x, weight, [int(_pick(rng, (1, 2)))] * dims, [int(_pick(rng, (1, 2)))] * dims, groups)


@_makes(elementwise_operators.SelectOp)
def _select(rng: Rng, cls: Any) -> Operator:
    return cls(_symbol(_shape(rng), "bool"), 1, 2, str(_pick(rng, _FLOATS)))


@_makes(ReduceOp)
def _exact_reduction(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng)
    dims = sorted(int(d) for d in rng.choice(len(shape), int(rng.integers(1, len(shape) + 1)), replace=False))
    x = _symbol(shape, str(_pick(rng, ("int64", "int32", "float64"))))
    return cls(x, dims, bool(rng.integers(2)), str(_pick(rng, ("sum", "max", "min", "prod"))))


@_makes(CumulativeOp)
def _running(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng)
    x = _symbol(shape, str(_pick(rng, ("float32", "int64"))))
    dim, kind = int(rng.integers(len(shape))), str(_pick(rng, ("sum", "prod", "max", "min")))
    return cls(x, dim, kind, bool(rng.integers(2)), bool(rng.integers(2)))


@_makes(ArgsortOp)
def _argsort(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng)
    dim = int(rng.integers(len(shape)))
    x = _symbol(shape, str(_pick(rng, ("float32", "int64"))))
    return cls(x, dim, int(rng.integers(1, shape[dim] + 1)), bool(rng.integers(2)))


def _scatter_rows(rng: Rng) -> Instance:
    rows, *rest = _shape(rng, 1, 3)
    count = _size(rng)
    op = ScatterRowsOp(
        _symbol([rows, *rest]),
        _symbol([count], "int64"),
        _symbol([count, *rest]),
        str(_pick(rng, ("replace", "sum", "max", "prod"))),
    )
    return Instance(op, {1: (0, rows)})


MAKERS[ScatterRowsOp] = _scatter_rows


def _write_rows(rng: Rng) -> Instance:
    shape = _shape(rng, 1, 4)
    dims = sorted(rng.permutation(len(shape))[: int(rng.integers(1, min(2, len(shape)) + 1))].tolist())
    count, rest = _size(rng), [size for d, size in enumerate(shape) if d not in dims]
    slots = [_symbol([count], str(_pick(rng, ("int32", "int64")))) for _ in dims]
    op = WriteRowsOp(_symbol(shape), _symbol([count, *rest]), *slots, dims=dims)
    return Instance(op, {2 + n: (-1, shape[d] + 1) for n, d in enumerate(dims)})


MAKERS[WriteRowsOp] = _write_rows


@_makes(ReplaceStateOp)
def _replace_state(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng, 0, 4)
    return cls(_symbol(shape), _symbol(shape))


@_makes(ShiftStateOp)
def _shift_state(rng: Rng, cls: Any) -> Operator:
    shape = _shape(rng, 1, 4)
    dim = int(rng.integers(len(shape)))
    return cls(_symbol(shape), _symbol([*shape[:dim], _size(rng), *shape[dim + 1 :]]), dim)


@_makes(ReadStateOp)
def _read_state(rng: Rng, cls: Any) -> Operator:
    return cls(_symbol(_shape(rng, 0, 4)))


def _scatter_elements(rng: Rng) -> Instance:
    shape = _shape(rng, 2, 3)
    dim = int(rng.integers(len(shape)))
    index = [size if rng.random() < 0.6 else int(rng.integers(1, size + 1)) for size in shape]
    index[dim] = _size(rng)
    kind = str(_pick(rng, ("replace", "sum", "prod", "max", "min")))
    return Instance(
        ScatterElementsOp(_symbol(shape), _symbol(index, "int64"), _symbol(index), dim, kind), {1: (0, shape[dim])}
    )


MAKERS[ScatterElementsOp] = _scatter_elements


@_makes(HistogramOp)
def _histogram(rng: Rng, cls: Any) -> Operator:
    return cls(_symbol(_shape(rng)), _size(rng), -3.0, 4.0)


@_makes(WindowPoolOp)
def _window_pool(rng: Rng, cls: Any) -> Operator:
    dims = int(rng.integers(1, 3))
    inner = [int(_pick(rng, (4, 6))) for _ in range(dims)]
    stride, padding = int(_pick(rng, (1, 2))), int(_pick(rng, (0, 1)))
    out = [(size + 2 * padding - 2) // stride + 1 for size in inner]
    x = _symbol([int(_pick(rng, (2, 3, 4))), _size(rng), *inner])
    kind = str(_pick(rng, ("max", "avg")))
    return cls(x, kind, [2] * dims, [stride] * dims, [padding] * dims, [1] * dims, out, bool(rng.integers(2)))


def _row_attention(rng: Rng, parts: list[int]) -> Instance:
    """Attention over rows; ``parts`` are the dims before those of the pools."""
    tokens, groups, size_k, size_v, columns = (int(_pick(rng, (2, 3, 4))) for _ in range(5))
    heads, page, pages, sequences = groups * int(_pick(rng, (1, 2, 3))), int(rng.integers(1, 4)), 3, 2
    value_size = int(rng.integers(1, size_k + 1)) if rng.random() < 0.25 else 0
    pools = [[*parts, pages * page, groups, size] for size in ((size_k,) if value_size else (size_k, size_v))]
    integers = [[sequences, *parts, columns], [tokens], [tokens, *parts], [tokens, *parts]]
    tensors = [_symbol([tokens, heads, size_k]), *map(_symbol, pools), *(_symbol(shape, "int32") for shape in integers)]
    options: dict[str, Any] = {"scale": 0.4, "softcap": float(_pick(rng, (0, 2))), "page": page}
    # Some tokens see nothing, and some as much as there is.
    seen = ((0, pages), (0, sequences), (-1, columns * page), (-1, columns * page + 2))
    ranges = {1 + len(pools) + number: values for number, values in enumerate(seen)}
    if parts:
        return Instance(RowAttentionPartsOp(*tensors, **options, value_size=value_size), ranges)
    has_sinks = bool(rng.integers(2))
    tensors += [_symbol([heads])] * has_sinks
    return Instance(RowAttentionOp(*tensors, **options, value_size=value_size, has_sinks=has_sinks), ranges)


MAKERS[RowAttentionOp] = lambda rng: _row_attention(rng, [])
MAKERS[RowAttentionPartsOp] = lambda rng: _row_attention(rng, [int(_pick(rng, (2, 3, 4)))])


def _expert_product(rng: Rng) -> Instance:
    tokens, inner, columns = (int(_pick(rng, (2, 3, 4, 6))) for _ in range(3))
    experts, choices = int(_pick(rng, (2, 3, 4, 6))), int(rng.integers(1, 3))
    transposed, is_summed = (bool(rng.integers(2)) for _ in range(2))
    tensors = [
        _symbol([tokens, choices, inner] if rng.integers(2) else [tokens, inner]),
        _symbol([experts, columns, inner] if transposed else [experts, inner, columns]),
        _symbol([tokens, choices], "int32"),
        _symbol([experts], "int32"),
        *[_symbol([tokens, choices])] * is_summed,
    ]
    op = ExpertProductOp(*tensors, count=experts, transposed=transposed, is_summed=is_summed)
    return Instance(op, {2: (-1, experts), 3: (1, experts + 1)})


MAKERS[ExpertProductOp] = _expert_product


def _expert_layer(rng: Rng) -> Instance:
    tokens, size, inner, columns = (int(_pick(rng, (2, 3, 4, 6))) for _ in range(4))
    experts, choices = int(_pick(rng, (2, 3, 4, 6))), int(rng.integers(1, 3))
    x, scales = _symbol([tokens, size]), _symbol([tokens, choices])
    chosen, labels = _symbol([tokens, choices], "int32"), _symbol([experts], "int32")
    inputs = [x, scales, chosen, labels]

    def input_of(*shape: int) -> Tensor:
        inputs.append(_symbol(list(shape)))
        return inputs[-1]

    def product(x: Tensor, size: int, columns: int, *scales: Tensor) -> Tensor:
        transposed = bool(rng.integers(2))
        weight = input_of(experts, columns, size) if transposed else input_of(experts, size, columns)
        op = ExpertProductOp(
            x, weight, chosen, labels, *scales, count=experts, transposed=transposed, is_summed=bool(scales)
        )
        return op.outputs[0]

    y = product(x, size, inner)
    if rng.integers(2):
        y = ops.silu(y) * product(x, size, inner)
    if rng.integers(2):
        y = y + input_of(inner)
    y = product(y, inner, columns, scales)
    (op,) = join_expert_layers(NormalGraph.of(hidet.trace_from(y, inputs))).nodes
    return Instance(op, {CHOSEN: (-1, experts), LABELS: (1, experts + 1)})


MAKERS[ExpertLayerOp] = _expert_layer


def instance(cls: type[Operator], rng: Rng) -> Instance:
    """Make a random instance of an operator class. Raises KeyError for a class without a maker."""
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")  # an operator without inputs would run at once
        return MAKERS[cls](rng)
