"""Checks of the inputs and outputs of a call against the program's signature, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hidet_dist.artifacts.manifest import StageManifest, TensorSignature
from hidet_dist.errors import InputError
from hidet_dist.runtime.arrays import raw_view
from hidet_dist.runtime.dlpack import CPU, DEVICE_NAMES
from hidet_dist.runtime.index_checks import IndexChecks
from hidet_dist.runtime.kept import Kept
from hidet_dist.runtime.memory import Memory
from hidet_dist.runtime.tensors import NUMPY, TensorBuffer, buffer_of, has_dtype, kind_of
from hidet_dist.spec.symbols import bind, known_sizes


class CallSignature:
    """The signature of a stage's program, by which the inputs and outputs of calls are checked.

    Parameters
    ----------
    stage: StageManifest
        The stage.
    memory: Memory
        The memory that the program's tensors lie in.
    numbers: sequence of int, optional
        The numbers that the inputs have in the model; from 0 on by default. -1 is for an input that is none of the
        model's.
    """

    def __init__(self, stage: StageManifest, memory: Memory, numbers: Sequence[int] | None = None):
        self._stage = stage
        self._memory = memory
        self._numbers = list(range(len(stage.inputs))) if numbers is None else list(numbers)
        self._names = _names(stage, self._numbers)
        self._inputs = [(_dtype(x), None if x.is_symbolic else x.shape) for x in stage.inputs]
        self._outputs = [_dtype(y) for y in stage.outputs]
        self._index_checks = IndexChecks(stage, self._names)
        # By the shapes of all inputs, which were found right: the sizes of symbolic dims.
        self._sizes: Kept[tuple[tuple[int, ...], ...], dict[str, int]] = Kept()
        self._right: list[tuple[int, ...] | None] = [None for _ in stage.inputs]  # the last shapes that were right
        self._supported: set[str] = set()  # libraries known to have the dtypes of all outputs

    def inputs(self, given: Sequence[Any]) -> list[TensorBuffer]:
        """Check the given inputs, and return their memory.

        Integers in host memory of a dtype whose values the program's holds, such as int32 for int64, are copied to it.

        Raises
        ------
        InputError
            When their number, dtypes, shapes or devices are not the program's.
        """
        if len(given) != len(self._inputs):
            raise InputError(f"The program takes {len(self._inputs)} inputs; {len(given)} were given.")
        buffers = []
        for number, (x, (dtype, shape)) in enumerate(zip(given, self._inputs, strict=True)):
            buffer = buffer_of(x, self._names[number])
            known = buffer.shape in (shape, self._right[number])
            if not known or buffer.dtype != dtype or not self._memory.holds(buffer.device):
                if buffer.device[0] == CPU and buffer.dtype in _HELD.get(dtype, ()):
                    buffer = _widened(buffer, dtype)
                self._check_input(number, buffer)
                self._right[number] = buffer.shape
            buffers.append(buffer)
        return buffers

    def packed(self, inputs: Sequence[TensorBuffer]) -> list[TensorBuffer]:
        """Return the inputs, with copies of those that are not contiguous. Raises InputError, MemoryError."""
        return [
            buffer if buffer.contiguous else self._memory.packed(buffer, self._names[number])
            for number, buffer in enumerate(inputs)
        ]

    def sizes(self, inputs: Sequence[TensorBuffer]) -> Mapping[str, int]:
        """Compute the local size of each symbolic dim. Raises InputError for a size that is not allowed."""
        if not self._stage.symbols:
            return {}
        shapes = tuple(buffer.shape for buffer in inputs)

        def computed() -> dict[str, int]:
            written = [x.shape for x in self._stage.inputs]
            return bind(self._stage.symbols, self._stage.local_symbols, zip(written, shapes, strict=True))

        return self._sizes.get(shapes, computed)

    def known_sizes(self, shapes: Mapping[int, Sequence[int]]) -> dict[str, int]:
        """Compute the whole size of each symbolic dim that some inputs have, given their shapes by their numbers.

        Raises
        ------
        InputError
            When a shape does not fit, or as :meth:`sizes`.
        """
        for number, shape in shapes.items():
            self._check_shape(self._numbers.index(number), shape)
        written = [self._stage.inputs[self._numbers.index(number)].shape for number in shapes]
        pairs = zip(written, shapes.values(), strict=True)
        return known_sizes(self._stage.symbols, self._stage.local_symbols, pairs, list(shapes))

    def check_indices(self, inputs: Sequence[TensorBuffer], sizes: Mapping[str, int]) -> None:
        """Raise InputError where inputs hold indices out of range, given the sizes of local symbols."""
        self._index_checks.check(inputs, sizes)

    def outputs(
        self, given: Sequence[Any], shapes: Sequence[tuple[int, ...]], inputs: Sequence[TensorBuffer]
    ) -> list[TensorBuffer]:
        """Check the caller's tensors for the outputs, and return their memory.

        Raises
        ------
        InputError
            When their number, dtypes, shapes or devices are not the program's, or one cannot be written to in place, or
            shares memory with an input or another output.
        """
        if len(given) != len(self._outputs):
            raise InputError(f"The program has {len(self._outputs)} outputs; {len(given)} were given.")
        buffers: list[TensorBuffer] = []
        for number, (y, dtype, shape) in enumerate(zip(given, self._outputs, shapes, strict=True)):
            what = f"Output {number}"
            buffer = buffer_of(y, what, to_write=True)
            self._check_device(what, buffer)
            if buffer.dtype != dtype:
                raise InputError(f"{what} must be {dtype}; got {buffer.dtype}.")
            if buffer.shape != shape:
                raise InputError(f"{what} must have the shape {_text(shape)}; got {_text(buffer.shape)}.")
            if not buffer.contiguous:
                raise InputError(f"{what} must be contiguous in row-major order, and aligned to its elements.")
            if buffer.read_only is not False:
                raise InputError(f"{what} must be writable; the {type(y).__name__} is read-only, or does not say.")
            for kind, others in (("input", inputs), ("output", buffers)):
                for position, other in enumerate(others):
                    if buffer.overlaps(other):
                        raise InputError(f"{what} shares memory with {kind} {position}; give it separate memory.")
            buffers.append(buffer)
        return buffers

    def new_outputs(
        self, kind: str, shapes: Sequence[tuple[int, ...]], device: tuple[int, int]
    ) -> tuple[list[Any], list[TensorBuffer]]:
        """Make outputs of a library on a DLPack device, and return them and their memory."""
        made = [
            self._memory.empty(kind, shape, dtype, device) for shape, dtype in zip(shapes, self._outputs, strict=True)
        ]
        return made, [buffer_of(y, f"Output {number}") for number, y in enumerate(made)]

    def zeros(self, sizes: Mapping[str, int]) -> list[TensorBuffer]:
        """Make inputs of zeros, given the sizes of local symbols."""
        return [
            self._memory.zeros([sizes[n] if isinstance(n, str) else n for n in x.shape], dtype)
            for x, (dtype, _) in zip(self._stage.inputs, self._inputs, strict=True)
        ]

    def scratch(self, shapes: Sequence[tuple[int, ...]]) -> list[TensorBuffer]:
        """Make outputs whose content is discarded."""
        return [self._memory.zeros(shape, dtype) for shape, dtype in zip(shapes, self._outputs, strict=True)]

    def kind(self, given: Sequence[Any]) -> str:
        """Return the library of new outputs, which is that of the first input.

        Raises
        ------
        InputError
            When the library lacks the dtype of an output.
        """
        kind = kind_of(given[0]) if given else NUMPY
        if kind not in self._supported:
            for number, dtype in enumerate(self._outputs):
                if not has_dtype(kind, dtype):
                    raise InputError(
                        f"Output {number} is {dtype}, which {kind} lacks. Give the first input as a torch or hidet "
                        "tensor, or give tensors of that dtype as outputs."
                    )
            self._supported.add(kind)
        return kind

    def _check_device(self, what: str, buffer: TensorBuffer) -> None:
        if not self._memory.holds(buffer.device):
            kind, number = buffer.device
            raise InputError(
                f"{what} must be on the {self._memory.name}; it is on {DEVICE_NAMES.get(kind, f'device type {kind}')} "
                f"{number}."
            )

    def _check_input(self, number: int, buffer: TensorBuffer) -> None:
        what = self._names[number]
        dtype = self._inputs[number][0]
        self._check_device(what, buffer)
        if buffer.dtype != dtype:
            raise InputError(f"{what} must be {dtype}; got {buffer.dtype}.")
        self._check_shape(number, buffer.shape)

    def _check_shape(self, number: int, shape: Sequence[int]) -> None:
        signature = self._stage.inputs[number]
        if not _fits(shape, signature):
            whole = "" if signature.shape == signature.whole_shape else f", a shard of {_text(signature.whole_shape)}"
            what = self._names[number]
            raise InputError(f"{what} must have the shape {_text(signature.shape)}{whole}; got {_text(shape)}.")


_HELD = {
    "int64": ("int32", "int16", "int8", "uint32", "uint16", "uint8"),
    "int32": ("int16", "int8", "uint16", "uint8"),
}
"""The dtypes of integers whose values are all values of another."""


def _widened(buffer: TensorBuffer, dtype: str) -> TensorBuffer:
    """Copy integers in host memory to a wider dtype."""
    packed = buffer.packed()
    return buffer_of(raw_view(packed.address, packed.shape, np.dtype(packed.dtype), packed).astype(dtype), "A copy")


def _names(stage: StageManifest, numbers: Sequence[int]) -> list[str]:
    """What messages call each input: by the name of the model's argument, or else by its number."""
    known = () if stage.interface is None else stage.interface.input_names
    return [
        f"The input {known[number]!r}" if 0 <= number < len(known) else f"Input {place if number < 0 else number}"
        for place, number in enumerate(numbers)
    ]


def _dtype(signature: TensorSignature) -> str:
    """Map a dtype to its name in NumPy and DLPack."""
    return "bool" if signature.dtype == "boolean" else signature.dtype


def _fits(shape: Sequence[int], signature: TensorSignature) -> bool:
    """Tell whether a shape fits the signature; its symbolic dims may have any size."""
    return len(shape) == len(signature.shape) and all(
        isinstance(extent, str) or size == extent for size, extent in zip(shape, signature.shape, strict=True)
    )


def _text(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"
