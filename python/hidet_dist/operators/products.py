"""Matrix products."""

from __future__ import annotations

import string
from collections.abc import Sequence

from hidet import ops
from hidet.graph import Operator, Tensor
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.ops.transform import PermuteDimsOp
from hidet.graph.ops.utils import Task, compute, input_like, reduce
from hidet.ir.dtypes import int32
from hidet.ir.expr import Expr, cast
from hidet.ir.type import DataType, data_type

from hidet_dist.operators import elementwise, reductions
from hidet_dist.operators.dtypes import Scalar
from hidet_dist.operators.shaping import diagonal, permuted, reshaped
from hidet_dist.spec.extents import Extent, extents_of, same_extent
from hidet_dist.traits import has_traits

_ELLIPSIS = "..."


def matmul(x: Tensor, y: Tensor, transposed: bool = False) -> Tensor:
    """``x @ y``, or with the last two dims of ``y`` swapped; leading dims broadcast; of vectors their dot product."""
    if len(x.shape) == 1 and len(y.shape) == 1:
        return reductions.sum(elementwise.mul(x, y), dtype=x.dtype)
    if x.dtype.is_float():
        if not transposed and (source := _swapped_from(y)) is not None:
            y, transposed = source, True  # what was transposed only to be multiplied by is read as it lies
        return MatmulOp(x, y, transpose_b=transposed).outputs[0]
    if transposed:
        y = permuted(y, [*range(len(y.shape) - 2), len(y.shape) - 1, len(y.shape) - 2])
    return integer_matmul(x, y, x.dtype)


def integer_matmul(x: Tensor, y: Tensor, dtype: DataType | str) -> Tensor:
    """``x @ y`` of integers, summed up in ``dtype``; hidet's products sum up in float32."""
    if len(x.shape) == 1:
        return ops.squeeze(integer_matmul(ops.unsqueeze(x, 0), y, dtype), len(y.shape) - 2)
    if len(y.shape) == 1:
        return ops.squeeze(integer_matmul(x, ops.unsqueeze(y, 1), dtype), len(x.shape) - 1)
    rank = max(len(x.shape), len(y.shape))
    x, y = (reshaped(v, [*[1] * (rank - len(v.shape)), *extents_of(v)]) for v in (x, y))
    return IntegerMatmulOp(x, y, data_type(dtype).name).outputs[0]


@has_traits(kernel="reduction")
class IntegerMatmulOp(Operator):
    """Products of matrices of integers [..., m, k] and [..., k, n] of one rank, summed up in ``dtype``.

    Leading dims of one element are broadcast.
    """

    def __init__(self, x: Tensor, y: Tensor, dtype: str):
        a, b, kind = input_like(x, "x"), input_like(y, "y"), data_type(dtype)
        pairs = list(zip(extents_of(x)[:-2], extents_of(y)[:-2], strict=True))
        # A dim of one element is broadcast, unless both have one.
        wide = [[p == 1 and q != 1, q == 1 and p != 1] for p, q in pairs]
        batch = [q if broadcast else p for (p, q), (broadcast, _) in zip(pairs, wide, strict=True)]

        def element(*position: Expr) -> Expr:
            *outer, row, column = position
            left, right = (
                [int32(0) if broadcast[side] else at for at, broadcast in zip(outer, wide, strict=True)]
                for side in range(2)
            )
            return reduce(
                [a.shape[-1]],
                lambda k: cast(a[[*left, row, k]], kind) * cast(b[[*right, k, column]], kind),
                "sum",
                accumulate_dtype=dtype,
            )

        attributes = {"dtype": dtype}
        product = compute("z", [*batch, a.shape[-2], b.shape[-1]], element)
        super().__init__([x, y], attributes, Task("integer_matmul", [a, b], [product], attributes=attributes))


mm = bmm = mv = dot = matmul


def _swapped_from(y: Tensor) -> Tensor | None:
    """The tensor whose last two dims were swapped to give ``y``, where ``y`` is nothing else."""
    rank = len(y.shape)
    if rank < 2 or not isinstance(y.op, PermuteDimsOp):
        return None
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    return y.op.inputs[0] if list(y.op.attrs["axes"]) == swapped else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` of ``weight[out, in]``, or of ``weight[in]``."""
    y = matmul(x, weight, transposed=len(weight.shape) > 1)
    return y if bias is None else elementwise.add(y, bias)


def addmm(x: Tensor, a: Tensor, b: Tensor, beta: Scalar = 1, alpha: Scalar = 1) -> Tensor:
    """``beta * x + alpha * (a @ b)``; ``x`` is not read where beta is 0."""
    y = matmul(a, b)
    y = y if alpha == 1 else elementwise.mul(y, alpha)
    if beta == 0:
        return y
    return elementwise.add(y, x if beta == 1 else elementwise.mul(x, beta))


baddbmm = addmv = addmm


def einsum(equation: str, operands: Sequence[Tensor]) -> Tensor:
    """Compute an einsum as matrix products of its operands, from the first to the last.

    Parameters
    ----------
    equation: str
        A term for each operand and one for the result, such as ``"bij,bjk->bik"``. Each letter names a dim, and ``...``
        all dims that have no letter.
    operands: sequence of Tensor
        The operands. Dims of the same letter have the same size.

    Raises
    ------
    NotImplementedError
        When the result repeats a letter, or the dims of an ellipsis are broadcast.
    """
    given, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        single = sorted(letter for letter in set(given) if letter.isalpha() and given.count(letter) == 1)
        result = (_ELLIPSIS if _ELLIPSIS in given else "") + "".join(single)
    *terms, result = _without_ellipses([*given.split(","), result], operands)
    sizes: dict[str, Extent] = {}
    same = all(
        same_extent(sizes.setdefault(letter, size), size)
        for term, x in zip(terms, operands, strict=True)
        for letter, size in zip(term, extents_of(x), strict=True)
    )
    if not same or len(set(result)) != len(result) or not set(result) <= set(sizes):
        raise NotImplementedError(
            f"the einsum {equation!r} is not supported: its result repeats a letter or has one that no term has, or "
            "dims of one name have several sizes"
        )
    (product, letters), *others = (_diagonal(x, term) for x, term in zip(operands, terms, strict=True))
    for number, (x, term) in enumerate(others, 1):
        later = set("".join(terms[number + 1 :]) + result)
        product, letters = _contracted(product, letters, x, term, later)
    product, letters = _summed_over_others(product, letters, set(result))
    return permuted(product, [letters.index(letter) for letter in result])


def _diagonal(x: Tensor, letters: str) -> tuple[Tensor, str]:
    """Keep the elements whose indices along dims of the same letter are equal; return them and their letters."""
    for letter in letters:
        while letters.count(letter) > 1:
            first, second = letters.index(letter), letters.rindex(letter)
            x = diagonal(x, 0, first, second)
            letters = letters[:first] + letters[first + 1 : second] + letters[second + 1 :] + letter
    return x, letters


def _without_ellipses(terms: Sequence[str], operands: Sequence[Tensor]) -> list[str]:
    """Replace each ellipsis of an einsum's terms, the result last, by letters for the dims that it stands for.

    The dims of all ellipses are aligned at the last one.
    """
    ranks = [len(x.shape) - len(term.replace(_ELLIPSIS, "")) for term, x in zip(terms[:-1], operands, strict=True)]
    most = max((rank for term, rank in zip(terms[:-1], ranks, strict=True) if _ELLIPSIS in term), default=0)
    letters = [letter for letter in string.ascii_letters if letter not in "".join(terms)][:most]
    return [
        term.replace(_ELLIPSIS, "".join(letters[most - rank :])) if _ELLIPSIS in term else term
        for term, rank in zip(terms, [*ranks, most], strict=True)
    ]


def _contracted(a: Tensor, a_letters: str, b: Tensor, b_letters: str, later: set[str]) -> tuple[Tensor, str]:
    """Multiply two operands of an einsum, and sum over the dims whose letters are not in ``later``.

    Returns the product and the letters of its dims.
    """
    a, a_letters = _summed_over_others(a, a_letters, set(b_letters) | later)
    b, b_letters = _summed_over_others(b, b_letters, set(a_letters) | later)
    batch = [letter for letter in a_letters if letter in b_letters and letter in later]
    inner = [letter for letter in a_letters if letter in b_letters and letter not in later]
    rows = [letter for letter in a_letters if letter not in b_letters]
    columns = [letter for letter in b_letters if letter not in a_letters]
    sizes = {**dict(zip(a_letters, extents_of(a), strict=True)), **dict(zip(b_letters, extents_of(b), strict=True))}

    def extent(letters: Sequence[str]) -> Extent:
        size: Extent = 1
        for letter in letters:
            size = sizes[letter] * size
        return size

    left = permuted(a, [a_letters.index(letter) for letter in (*batch, *rows, *inner)])
    right = permuted(b, [b_letters.index(letter) for letter in (*batch, *inner, *columns)])
    outer = [sizes[letter] for letter in batch]
    left = reshaped(left, [*outer, extent(rows), extent(inner)])
    right = reshaped(right, [*outer, extent(inner), extent(columns)])
    letters = [*batch, *rows, *columns]
    return reshaped(matmul(left, right), [sizes[letter] for letter in letters]), "".join(letters)


def _summed_over_others(x: Tensor, letters: str, kept: set[str]) -> tuple[Tensor, str]:
    """Sum a tensor over the dims whose letters are not in ``kept``; return the sum and the letters of its dims."""
    summed = [dim for dim, letter in enumerate(letters) if letter not in kept]
    return (ops.sum(x, summed) if summed else x), "".join(letter for letter in letters if letter in kept)
