"""What the passes know of an operator class beside its compute definition: one entry a class.

hidet's classes are listed at the end of this file. Classes of this project state theirs where they are defined, with
the decorator :func:`has_traits`. A class that states nothing has the traits of its base.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from hidet.graph import Operator
from hidet.graph.ops import activation, arithmetic, create, cumulative, image, pool, special, transform
from hidet.graph.ops.attention.attention import AttnMaskAddOp, AttnOp
from hidet.graph.ops.conv1d.conv1d import Conv1dOp
from hidet.graph.ops.conv1d_transpose.conv1d_transpose import Conv1dTransposeOp
from hidet.graph.ops.conv2d.conv2d import Conv2dChannelLastOp, Conv2dOp
from hidet.graph.ops.conv2d_transpose.conv2d_transpose import Conv2dTransposeOp
from hidet.graph.ops.conv3d.conv3d import Conv3dOp
from hidet.graph.ops.conv3d_transpose.conv3d_transpose import Conv3dTransposeOp
from hidet.graph.ops.embedding_bag import EmbeddingBagOp
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.ops.normalize.lp import LpNormOp
from hidet.graph.ops.normalize.norm import NormalizeOp
from hidet.graph.ops.quant.symmetric import SymmetricDeQuantizationOp, SymmetricQuantizationOp
from hidet.graph.ops.reduce.reduce import ArgReduceBaseOp, ReduceBaseOp
from hidet.graph.ops.scatter import ScatterBaseOp
from hidet.graph.ops.transfer import TransferOp
from hidet.graph.ops.transpose2d import TransposeOp2D

from hidet_dist.spec.extents import Extent, same_extent

Shape: TypeAlias = tuple[Extent, ...]
"""The extents of a tensor's dims, in elements."""

Dims: TypeAlias = frozenset[tuple[int, int]]
"""Dims of inputs: (input, dim)."""

CountedDims: TypeAlias = Callable[[Operator], Dims | None]
ReadElements: TypeAlias = Callable[[Operator, Sequence[Sequence[int]]], dict[int, int]]
"""The most elements that an operator reads of some inputs, by their numbers, from the local shapes of all inputs."""

InputDims: TypeAlias = Callable[[Operator, int], tuple[int | None, ...] | None]
"""The dims of all inputs that a dim of the output follows; None for an input that is needed whole."""

ScratchElements: TypeAlias = Callable[[Operator, Sequence[Sequence[int]]], int]
"""The elements of the output's dtype that an operator holds while it runs, from the local shapes of all inputs."""

LocalAttributes: TypeAlias = Callable[[Operator, Sequence[Shape], Sequence[Shape]], dict[str, Any]]


class Moves(enum.Enum):
    """How an operator moves the elements of its input to its output, without changing them."""

    RESHAPE = "reshape"  # another shape; the order of the elements stays
    PERMUTE = "permute"  # all elements, their dims permuted; neighbouring dims may be merged as well
    SLICE = "slice"  # some of the elements, at constant strides
    SPREAD = (
        "spread"  # all elements of all inputs, each on one rank at least; some several times, or zeros between them
    )
    SELECT = "select"  # some of the elements


class Updates(enum.Enum):
    """What of a state, its first input, an operator that updates it in place writes, from its second input."""

    PART = "part"  # as many elements as the second input has
    WHOLE = "whole"  # all elements, without reading the old ones
    SHIFT = "shift"  # all elements, most of them from old ones


class Half(enum.Enum):
    """How an operator computes where a float32 graph is converted to half precision, as in PyTorch's autocast."""

    ALWAYS = "always"  # in half precision, from operands that are converted
    FOLLOW = "follow"  # in half precision if all of its floating-point operands are
    NEVER = "never"  # in float32


class Indices(enum.Enum):
    """What of the output of a lookup the dims of its indices are."""

    TAKE = "take"  # all dims of the indices replace the dim of the table that they select from
    GATHER = "gather"  # the indices have the shape of the output
    SELECT = "select"  # their only dim replaces that dim of the table


@dataclass(frozen=True)
class Lookup:
    """A lookup in the first input by the indices in the second.

    Attributes
    ----------
    indices: what the dims of the indices are.
    dim: the name of the attribute with the dim of the table that indices select from.
    """

    indices: Indices
    dim: str

    def dim_of(self, op: Operator) -> int:
        """Return the dim of the table that indices select from, counted from the first."""
        return int(op.attrs[self.dim]) % len(op.inputs[0].shape)


@dataclass(frozen=True)
class RoutedMatrices:
    """Matrices of which rows use those that were chosen for them.

    Attributes
    ----------
    weight: the position of the matrices among the inputs, [experts, inner, columns].
    transposed: whether the matrices are transposed, [experts, columns, inner].
    """

    weight: int
    transposed: bool


@dataclass(frozen=True)
class RoutedProduct(RoutedMatrices):
    """A product of rows by the matrices that were chosen for them.

    Attributes
    ----------
    rows: the position of the rows among the inputs, [tokens, ...].
    """

    rows: int


@dataclass(frozen=True)
class Routed:
    """The inputs, by their positions, of an operator whose rows use some of several matrices each.

    Attributes
    ----------
    chosen: the numbers of the matrices that rows use, [tokens, choices].
    labels: the numbers of the matrices on a device, [experts]; no row has the label of padding.
    products: the products of rows that are inputs.
    last: the matrices by which the operator multiplies what it computes from these products; None if there are none.
    """

    chosen: int
    labels: int
    products: tuple[RoutedProduct, ...]
    last: RoutedMatrices | None = None

    @property
    def matrices(self) -> tuple[RoutedMatrices, ...]:
        """The matrices of all products."""
        return self.products if self.last is None else (*self.products, self.last)

    @property
    def rows(self) -> frozenset[int]:
        """The positions of rows."""
        return frozenset(product.rows for product in self.products)


@dataclass(frozen=True)
class Traits:
    """The traits of an operator class.

    Attributes
    ----------
    kernel: the class of its kernel, one of :data:`hidet_dist.machine.kernels.KERNEL_CLASSES`. None for a class that is
        not known here: its definition tells.
    elementwise: whether an output element depends only on the (broadcast) inputs' elements at the same index.
    moves: how it moves elements; None if it computes.
    half: how it computes in half precision.
    counted_dims: makes its definition a template (:mod:`hidet_dist.rules.templates`), and returns the dims of inputs
        whose extents the definition contains as numbers; None, or if it returns None, it is no template.
    local_attributes: returns the attributes that change when the operator is rebuilt on shards, from the local shapes
        of its inputs and outputs; None if none contains a shape.
    read_elements: bounds what it reads of inputs, where that is less than its definition tells; None if it is not.
    updates: how its output, which has the shape of its first input, updates that in place; None if it does not. In a
        graph it is an operator like others. In a program it writes into the memory of the state.
    lookup: how it looks up elements; None for another class.
    input_dims: returns, for a dim of the output, the dim of each input that it follows: a part of the output along it
        is computed from the same part of these inputs. None, or if it returns None, it is not known.
    in_any_layout: whether its definition holds for tensors whose dims are in another order, and is no slower there.
        Stated of classes that reduce, pool or pad; it holds for all that are elementwise or move elements.
    pads: whether it adds elements around those of its input.
    by_function: whether the function of an element is an attribute ``op`` of the operator as a Python object, whose
        parameters are not all in ``attrs``; on a shard it is rebuilt from that function.
    routed: returns its inputs, if its kernel does a part of its definition's work alone: each row uses the matrices
        that were chosen for it, of all that the definition sums over. Its attribute ``count`` is their number on all
        devices.
    whole_dims: dims of inputs that are not split, although the definition allows it: each device would repeat most of
        the work.
    scratch_elements: counts what it holds while it runs, beside its inputs and outputs; None if that is nothing.
    """

    kernel: str | None = None
    elementwise: bool = False
    moves: Moves | None = None
    half: Half = Half.NEVER
    counted_dims: CountedDims | None = None
    local_attributes: LocalAttributes | None = None
    read_elements: ReadElements | None = None
    updates: Updates | None = None
    lookup: Lookup | None = None
    input_dims: InputDims | None = None
    in_any_layout: bool = False
    pads: bool = False
    by_function: bool = False
    routed: Callable[[Operator], Routed] | None = None
    whole_dims: Callable[[Operator], Dims] | None = None
    scratch_elements: ScratchElements | None = None

    @property
    def renames(self) -> bool:
        """Whether the output has each element of the input once, in another shape or order."""
        return self.moves in (Moves.RESHAPE, Moves.PERMUTE)

    @property
    def keeps_all(self) -> bool:
        """Whether the outputs of all ranks have each element of each input at least once, and else only zeros."""
        return self.renames or self.moves is Moves.SPREAD

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product or a convolution."""
        return self.kernel in ("matmul", "convolution")


_STATED: dict[type[Operator], Traits] = {}
_RESOLVED: dict[type[Operator], Traits] = {}
_Class = TypeVar("_Class", bound=type[Operator])


def traits_of(op: Operator) -> Traits:
    """Return the traits of an operator: those stated for its class, or else for its nearest base."""
    return _of_class(type(op))


def routed_of(op: Operator) -> Routed | None:
    """Return the routed inputs of an operator; None for an operator all of whose rows use the same matrices."""
    routed = traits_of(op).routed
    return None if routed is None else routed(op)


def _of_class(cls: type[Operator]) -> Traits:
    """Return the traits of a class. One that is not hidet's does not inherit a template: it may build anything."""
    if cls not in _RESOLVED:
        base = next((base for base in cls.__mro__ if base in _STATED), None)
        traits = Traits() if base is None else _STATED[base]
        inherits = base is cls or cls.__module__.startswith("hidet.")
        _RESOLVED[cls] = traits if inherits else replace(traits, counted_dims=None)
    return _RESOLVED[cls]


def has_traits(**traits: Any) -> Callable[[_Class], _Class]:
    """State the traits of the decorated operator class, as the fields of :class:`Traits`, beside those of its base."""

    def state(cls: _Class) -> _Class:
        _STATED[cls] = replace(_of_class(cls), **traits)
        _RESOLVED.clear()
        return cls

    return state


def _state(*classes: type[Operator], **traits: Any) -> None:
    for cls in classes:
        has_traits(**traits)(cls)


# Dims whose extents are numbers in a definition.


def _none(op: Operator) -> Dims:
    return frozenset()


def _joined(op: Operator) -> Dims:
    axis = int(op.attrs["axis"]) % len(op.inputs[0].shape)
    return frozenset((number, axis) for number in range(len(op.inputs)))


def _looked_up(op: Operator) -> Dims:
    lookup = traits_of(op).lookup
    assert lookup is not None
    return frozenset({(0, lookup.dim_of(op))})


def _is_whole(op: Operator, number: int) -> bool:
    """Whether a slice takes the whole of the dim that is the ``number``-th of its axes."""
    axis, start, end, stride = (op.attrs[name][number] for name in ("axes", "starts", "ends", "strides"))
    return bool(start == 0 and stride == 1 and same_extent(end, op.inputs[0].shape[axis]))


def _cut(op: Operator) -> Dims:
    return frozenset((0, int(axis)) for number, axis in enumerate(op.attrs["axes"]) if not _is_whole(op, number))


def _windows(op: Operator) -> Dims | None:
    """The dims that the windows of a convolution slide along. The channels of groups are divided."""
    if op.attrs["groups"] != 1:
        return None
    return frozenset((number, dim) for number in range(2) for dim in range(2, len(op.inputs[0].shape)))


# The dims of inputs that a dim of the output follows.


def _of_only_input(op: Operator, dim: int) -> tuple[int | None, ...]:
    return (dim,)


def _of_broadcast_inputs(op: Operator, dim: int) -> tuple[int | None, ...]:
    """Shapes broadcast aligned at their last dims."""
    dims = [dim - len(op.outputs[0].shape) + len(x.shape) for x in op.inputs]
    return tuple(
        None if own < 0 or same_extent(x.shape[own], 1) else own for x, own in zip(op.inputs, dims, strict=True)
    )


def _of_permuted(op: Operator, dim: int) -> tuple[int | None, ...]:
    return (int(op.attrs["axes"][dim]),)


def _of_rearranged(op: Operator, dim: int) -> tuple[int | None, ...] | None:
    """Of an operator that merges no dims."""
    plan = op.attrs["plan"]
    return (int(plan[dim][0]),) if all(len(dims) == 1 for dims in plan) else None


# Attributes of the operator on a shard, from the local shapes of inputs and outputs.


def _output_shape(op: Operator, ins: Sequence[Shape], outs: Sequence[Shape]) -> dict[str, Any]:
    return {"shape": list(outs[0])}


def _output_size(op: Operator, ins: Sequence[Shape], outs: Sequence[Shape]) -> dict[str, Any]:
    return {"size": list(outs[0])}


def _slice_ends(op: Operator, ins: Sequence[Shape], outs: Sequence[Shape]) -> dict[str, Any]:
    """Adjust the end of each dim that is taken whole; any other dim is not sharded and keeps its bounds."""
    ends = zip(op.attrs["axes"], op.attrs["ends"], strict=True)
    return {"ends": [ins[0][axis] if _is_whole(op, number) else end for number, (axis, end) in enumerate(ends)]}


def _groups(op: Operator, ins: Sequence[Shape], outs: Sequence[Shape]) -> dict[str, Any]:
    """Keep the channels per group of a grouped convolution: the number of groups follows from the local channels."""
    return {"groups": ins[0][1] // ins[1][1]} if op.attrs["groups"] > 1 else {}


def _transposed_groups(op: Operator, ins: Sequence[Shape], outs: Sequence[Shape]) -> dict[str, Any]:
    """Derive the groups of a transposed convolution from its weight, which has the output channels per group."""
    return {"groups": outs[0][1] // ins[1][1]} if op.attrs["groups"] > 1 else {}


def _scalars(op: Operator, ins: Sequence[Shape], outs: Sequence[Shape]) -> dict[str, Any]:
    """Convert attributes from hidet's constants to Python numbers, which the operator's constructor takes."""
    return {name: op.attrs[name].value for name in ("x", "y")}


def _repeats(op: Operator, ins: Sequence[Shape], outs: Sequence[Shape]) -> dict[str, Any]:
    before, after = ([size for size in shape if isinstance(size, int)] for shape in (ins[0], outs[0]))
    if (len(before), len(after)) != (len(ins[0]), len(outs[0])):
        return {}  # a symbolic dim is repeated equally often on a shard
    if isinstance(op.attrs["repeats"], int):
        return {"repeats": math.prod(after) // math.prod(before)}
    return {"repeats": [b // a for a, b in zip(before, after, strict=True)]}


# hidet's classes. Those that its passes make from these after planning are in no graph that is planned or costed.

_state(MatmulOp, kernel="matmul", half=Half.ALWAYS, counted_dims=_none)
_state(
    *(Conv1dOp, Conv2dOp, Conv3dOp),
    kernel="convolution",
    half=Half.ALWAYS,
    counted_dims=_windows,
    local_attributes=_groups,
)
_state(Conv1dTransposeOp, Conv2dTransposeOp, Conv3dTransposeOp, kernel="reduction", local_attributes=_transposed_groups)
_state(Conv2dChannelLastOp, AttnOp, AttnMaskAddOp, kernel="reduction")

_state(
    *(arithmetic.UnaryElementwiseOp, arithmetic.BinaryElementwiseOp),  # casts, too
    kernel="elementwise",
    elementwise=True,
    counted_dims=_none,
)
_state(arithmetic.UnaryElementwiseOp, input_dims=_of_only_input, by_function=True)
_state(arithmetic.BinaryElementwiseOp, input_dims=_of_broadcast_inputs)
_state(transform.CastOp, by_function=False)  # hidet forgets the cast to int32 in it
_state(
    *(arithmetic.WhereOp, arithmetic.WhereScalarTensorOp, arithmetic.WhereTensorScalarOp),
    *(arithmetic.WhereScalarScalarOp, arithmetic.CompositeElementwiseOp),
    kernel="elementwise",
    elementwise=True,
)
_state(arithmetic.WhereScalarScalarOp, local_attributes=_scalars)
_state(
    *(arithmetic.AddOp, arithmetic.SubtractOp, arithmetic.MultiplyOp, arithmetic.DivideOp, arithmetic.NegativeOp),
    *(arithmetic.AddScalarOp, arithmetic.SubScalarOp, arithmetic.RSubScalarOp),
    *(arithmetic.MultiplyScalarOp, arithmetic.DivideScalarOp),
    *(arithmetic.TanhOp, activation.GeluOp, activation.ReluOp, activation.SigmoidOp, activation.SiluOp),
    half=Half.FOLLOW,
)
_state(
    *(arithmetic.MaxOp, arithmetic.MinOp, arithmetic.MultiInputCompositeElementwiseOp, special.BarrierOp),
    *(SymmetricDeQuantizationOp, image.Resize2dOp, transform.TriuOp, transform.TrilOp, transform.ViewOp),
    *(create.ArangeOp, create.FullOp, create.LinSpaceOp, create.TriOp, TransferOp),
    kernel="elementwise",
)
_state(create.FullOp, local_attributes=_output_shape)

_state(ReduceBaseOp, kernel="reduction", counted_dims=_none, in_any_layout=True)
_state(
    *(ArgReduceBaseOp, activation.SoftmaxOp, cumulative.CumulativeBaseOp, LpNormOp),
    *(SymmetricQuantizationOp, ScatterBaseOp),
    kernel="reduction",
)
_state(NormalizeOp, kernel="normalization")
_state(pool.MaxPoolNdOp, pool.AvgPoolNdOp, pool.AdaptivePoolNdOp, kernel="pooling", in_any_layout=True)

_state(transform.TakeOp, transform.GatherOp, kernel="lookup", moves=Moves.SELECT, half=Half.FOLLOW)
_state(transform.TakeOp, counted_dims=_looked_up, lookup=Lookup(Indices.TAKE, "axis"))
_state(transform.GatherOp, lookup=Lookup(Indices.GATHER, "axis"))
_state(transform.IdxSelOp, kernel="lookup", moves=Moves.SELECT, lookup=Lookup(Indices.SELECT, "dim"))
_state(EmbeddingBagOp, kernel="lookup")

_state(
    *(transform.FlattenOp, transform.ReshapeOp, transform.SqueezeOp, transform.UnsqueezeOp),
    kernel="elementwise",
    moves=Moves.RESHAPE,
    half=Half.FOLLOW,
)
_state(transform.ReshapeOp, local_attributes=_output_shape)
_state(
    *(transform.PermuteDimsOp, transform.RearrangeOp, TransposeOp2D),
    kernel="copy",
    moves=Moves.PERMUTE,
    half=Half.FOLLOW,
)
_state(transform.PermuteDimsOp, counted_dims=_none, input_dims=_of_permuted)
_state(transform.RearrangeOp, input_dims=_of_rearranged)
_state(
    *(transform.BroadcastOp, transform.ConcatOp, transform.TileOp, transform.RepeatInterleaveOp),
    kernel="copy",
    moves=Moves.SPREAD,
    half=Half.FOLLOW,
)
_state(transform.BroadcastOp, counted_dims=_none, local_attributes=_output_shape)
_state(transform.ConcatOp, counted_dims=_joined)
_state(transform.TileOp, transform.RepeatInterleaveOp, local_attributes=_repeats)
_state(transform.StridedSliceOp, kernel="copy", moves=Moves.SLICE, half=Half.FOLLOW)
_state(transform.StridedSliceOp, counted_dims=_cut, local_attributes=_slice_ends)
_state(transform.FlipOp, transform.PadOp, arithmetic.RollOp, kernel="copy")
_state(transform.PadOp, in_any_layout=True, pads=True)
_state(transform.Im2ColOp, arithmetic.SetStridedSliceOp, transform.AsStridedOp, kernel="copy")
_state(transform.AsStridedOp, local_attributes=_output_size)
