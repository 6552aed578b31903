"""Checks of inputs that hold indices, such as numbers of tokens, before a program uses them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from hidet_dist import native
from hidet_dist.artifacts.manifest import IndexCheck, Product, StageManifest
from hidet_dist.errors import ArtifactError, InputError
from hidet_dist.runtime import dlpack
from hidet_dist.runtime.kept import Kept
from hidet_dist.runtime.tensors import TensorBuffer

_INTEGERS = {f"{kind}{bits}": (bits // 8, kind == "int") for kind in ("int", "uint") for bits in (8, 16, 32, 64)}


_LIMIT = 2**62  # greater than any index, and within int64


class IndexChecks:
    """The index checks of a stage's inputs.

    Parameters
    ----------
    stage: StageManifest
        The stage.
    names: sequence of str, optional
        What messages call its inputs; by default by their numbers.

    Raises
    ------
    ArtifactError
        When a check does not fit the inputs.
    """

    def __init__(self, stage: StageManifest, names: Sequence[str] | None = None):
        self._checks = stage.index_checks
        self._names = [f"Input {number}" for number in range(len(stage.inputs))] if names is None else names
        self._is_shard = [x.shape != x.whole_shape for x in stage.inputs]
        self._fixed: dict[int, _Range] = {}
        # By the check, the input's shape, and the sizes of symbolic dims.
        self._ranges: Kept[tuple[int, tuple[int, ...], tuple[int, ...]], _Range] = Kept()
        symbols = {symbol.name for symbol in stage.local_symbols}
        for number, check in enumerate(self._checks):
            if not 0 <= check.input < len(stage.inputs) or stage.inputs[check.input].dtype not in _INTEGERS:
                raise ArtifactError(
                    f"Index check {number} of {stage.folder} is of input {check.input}, which holds no integers. Build "
                    "the artifacts again."
                )
            sizes = {x for product in _products(check) for x in product if isinstance(x, str)}
            if not sizes <= symbols or len(check.shape) != len(check.strides):
                raise ArtifactError(
                    f"Index check {number} of {stage.folder} uses symbolic sizes that the program does not have. Build "
                    "the artifacts again."
                )
            signature = stage.inputs[check.input]
            if not sizes and not signature.is_symbolic:
                self._fixed[number] = _Range(check, signature.dtype, [int(n) for n in signature.shape], {})

    def check(self, inputs: Sequence[TensorBuffer], sizes: Mapping[str, int]) -> None:
        """Check that all indices are in range, given the sizes of local symbols.

        Only tensors in host memory are checked. On a GPU, kernels return NaN for indices out of range.

        Raises
        ------
        InputError
            For an index out of range; the message has the input, the position in it and the index.
        """
        for number, check in enumerate(self._checks):
            buffer = inputs[check.input]
            if buffer.device[0] not in (dlpack.CPU, dlpack.CUDA_HOST):
                continue
            allowed = self._fixed.get(number) or self._ranges.get(
                (number, buffer.shape, tuple(sizes.values())), partial(_Range, check, buffer.dtype, buffer.shape, sizes)
            )
            outside = allowed.first_outside(buffer)
            if outside is not None:
                offset, value = outside
                position = [int(i) for i in np.unravel_index(offset, buffer.shape)] if buffer.shape else []
                shard = " of this rank's shard" if self._is_shard[check.input] else ""
                raise InputError(
                    f"{self._names[check.input]} is {value} at {position}{shard}: it is used as an index into "
                    f"{allowed.rows} rows, and must be from {allowed.least} to {allowed.greatest}."
                )


class _Range:
    """The range, from ``least`` to ``greatest``, that a check allows for an input's elements at given sizes."""

    def __init__(self, check: IndexCheck, dtype: str, extents: Sequence[int], sizes: Mapping[str, int]):
        shape, strides = ([_value(product, sizes) for product in products] for products in (check.shape, check.strides))
        self.offset = _value(check.offset, sizes)
        ends = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
        first, last = (self.offset + sum(bound(0, end) for end in ends) for bound in (min, max))
        if min(shape, default=1) > 0 and not (first >= 0 and last < math.prod(extents)):
            raise ArtifactError(
                f"The indices in input {check.input} lie beyond its {math.prod(extents)} elements. Build the artifacts "
                "again."
            )
        self.rows = _value(check.rows, sizes)
        self.least, self.greatest = -self.rows - check.shift, self.rows - 1 - check.shift
        self.itemsize, signed = _INTEGERS[dtype]
        if not signed:
            self.least = max(self.least, 0)
        bounds = (max(-_LIMIT, min(bound, _LIMIT)) for bound in (self.least, self.greatest))
        self._range = native.StridedRange(self.itemsize, signed, shape, strides, *bounds)

    def first_outside(self, buffer: TensorBuffer) -> tuple[int, int] | None:
        """Find the first element of a contiguous tensor that is out of range. Returns its offset and value, or None."""
        outside = self._range.first_outside(buffer.address + self.offset * self.itemsize)
        return None if outside is None else (self.offset + outside[0], outside[1])


def _products(check: IndexCheck) -> tuple[Product, ...]:
    return (check.rows, check.offset, *check.shape, *check.strides)


def _value(product: Product, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[factor] if isinstance(factor, str) else factor for factor in product)
