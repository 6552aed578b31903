"""Matrices whose elements are whole numbers of few bits, packed into words, with scales of groups beside them.

So GPTQ, AWQ and compressed-tensors store the weights of linear layers, and ONNX Runtime's tools those of MatMulNBits:
an element is (number - zero point) * scale, and the elements of a row's group have the scale and the zero point in
common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from hidet_dist.weights.panels import GROUPS, StoredPrecision
from hidet_dist.weights.stored_groups import Groups

_WORD_BITS = 32
_INT8_ZERO = 128  # the number of 0 among numbers of 8 bits


class Elements(Protocol):
    """A tensor in a file or in memory, whose elements are read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """The elements of ``region``, a slice with whole bounds and step 1 for each dim."""
        ...


@dataclass(frozen=True)
class PackedNumbers:
    """Whole numbers from 0 on, packed into the words of another tensor along a dim.

    Attributes
    ----------
    words: the tensor, int32 or uint8.
    dim: the dim.
    bits: the bits of a number, 4 or 8.
    places: for each number of a word, in the order of the numbers, its place in the word, from the lowest bits on.
    """

    words: Elements
    dim: int
    bits: int
    places: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers."""
        return tuple(size * (len(self.places) if d == self.dim else 1) for d, size in enumerate(self.words.shape))

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """Read the numbers of ``region`` as uint8. Raises WeightsError as the words' tensor does."""
        each, wanted = len(self.places), region[self.dim]
        first = wanted.start // each
        words = list(region)
        words[self.dim] = slice(first, -(-wanted.stop // each))
        shifts = torch.tensor(self.places, dtype=torch.int32) * self.bits
        shape = [each if d == self.dim else 1 for d in range(len(self.words.shape))]
        shape.insert(self.dim, 1)
        numbers = self.words.read(words).unsqueeze(self.dim + 1) >> shifts.reshape(shape)
        numbers = (numbers & (2**self.bits - 1)).to(torch.uint8).flatten(self.dim, self.dim + 1)
        return numbers.narrow(self.dim, wanted.start - first * each, wanted.stop - wanted.start)


def places_in_order(bits: int, word_bits: int = _WORD_BITS) -> tuple[int, ...]:
    """Return the places of the numbers of a word that has them one after the other."""
    return tuple(range(word_bits // bits))


@dataclass(frozen=True)
class GroupedMatrix:
    """A matrix [rows, columns] of float32, in groups of a row's elements.

    Attributes
    ----------
    numbers: those of the elements.
    scales: those of the groups, of floating point.
    zeros: the zero points of the groups; None where all are half the number of values that an element may have.
    group: the elements of a group, which divide the columns.
    transposed: whether the three have the columns, or the groups of a row, in dim 0, and the rows in dim 1.
    zero_step: what is added to each stored zero point, whose sum wraps around.
    """

    numbers: PackedNumbers
    scales: Elements
    zeros: PackedNumbers | None
    group: int
    transposed: bool = False
    zero_step: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and columns."""
        first, second = self.numbers.shape
        return (second, first) if self.transposed else (first, second)

    def _read(self, tensor: PackedNumbers | Elements, rows: slice, others: slice) -> torch.Tensor:
        return tensor.read([others, rows]).t() if self.transposed else tensor.read([rows, others])

    def _factors(self, rows: slice, groups: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the scales and the zero points of groups of some rows, as float32[rows, groups] and whole numbers."""
        scales = self._read(self.scales, rows, groups).float()
        bits = self.numbers.bits
        if self.zeros is None:
            return scales, torch.full(scales.shape, 2 ** (bits - 1))
        zeros = self._read(self.zeros, rows, groups).int() + self.zero_step
        return scales, zeros & (2**bits - 1)

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """Compute the elements of ``region``, float32; contiguous. Raises WeightsError as the files' tensors do."""
        rows, columns = region
        if rows.start >= rows.stop or columns.start >= columns.stop:
            return torch.empty(max(0, rows.stop - rows.start), max(0, columns.stop - columns.start))
        groups = slice(columns.start // self.group, -(-columns.stop // self.group))
        scales, zeros = self._factors(rows, groups)
        whole = slice(groups.start * self.group, groups.stop * self.group)
        numbers = self._read(self.numbers, rows, whole).float().unflatten(1, (-1, self.group))
        values = ((numbers - zeros[..., None]) * scales[..., None]).flatten(1)
        return values[:, columns.start - whole.start : columns.stop - whole.start].contiguous()

    @cached_property
    def stored_precision(self) -> StoredPrecision | None:
        """The precision that holds the elements without rounding; None if there is none. It reads scales and zeros."""
        group = max((size for size in GROUPS if self.group % size == 0), default=0)
        if not group:
            return None
        rows, columns = self.shape
        scales, zeros = self._factors(slice(0, rows), slice(0, columns // self.group))
        is_half = bool((scales.half() == scales).all())
        is_symmetric = bool((zeros == 2 ** (self.numbers.bits - 1)).all())
        if self.numbers.bits == 8:
            return StoredPrecision("int8", group, exact=True) if is_half and is_symmetric else None
        if is_half and is_symmetric:
            return StoredPrecision("int4", group, exact=True)
        # The product of a zero point and a scale of 16 bits is a float32 number.
        is_short = is_half or bool((scales.bfloat16() == scales).all())
        return StoredPrecision("wide_uint4", group, exact=True) if is_short else None

    def groups(self, region: Sequence[slice]) -> Groups:
        """Read the groups of ``region``, whose columns are whole groups of :attr:`stored_precision`, without rounding.

        Raises WeightsError as the files' tensors do.
        """
        rows, columns = region
        precision = self.stored_precision
        assert precision is not None
        outer = slice(columns.start // self.group, -(-columns.stop // self.group))
        scales, zeros = self._factors(rows, outer)
        times = self.group // precision.group
        begin = columns.start // precision.group - outer.start * times
        count = (columns.stop - columns.start) // precision.group
        scales, zeros = (x.repeat_interleave(times, 1)[:, begin : begin + count] for x in (scales, zeros))
        numbers = self._read(self.numbers, rows, columns).contiguous()
        if precision.name == "int8":
            return Groups((numbers.short() - _INT8_ZERO).to(torch.int8), scales)
        return Groups(numbers, scales, None if precision.name == "int4" else -zeros * scales)
