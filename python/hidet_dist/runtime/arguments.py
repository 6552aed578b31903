"""Inputs and outputs of a call, checked against the program before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hidet_dist.artifacts.manifest import StageManifest, TensorSignature
from hidet_dist.errors import InputError
from hidet_dist.runtime import dlpack
from hidet_dist.runtime.dlpack import DEVICE_NAMES
from hidet_dist.runtime.index_checks import IndexChecks
from hidet_dist.runtime.memory import Memory
from hidet_dist.runtime.tensors import NUMPY, Buffer, buffer_of, has_dtype, kind_of
from hidet_dist.spec.symbols import bind


class Signature:
    """The inputs and outputs of a stage's program, for calls.

    Parameters
    ----------
    stage: StageManifest
        The stage.
    memory: Memory
        What the program's tensors lie in.
    numbers: sequence of int, optional
        What errors call the inputs, where they are not numbered from 0.
    """

    def __init__(self, stage: StageManifest, memory: Memory, numbers: Sequence[int] | None = None):
        self._stage = stage
        self._memory = memory
        self._numbers = list(range(len(stage.inputs))) if numbers is None else list(numbers)
        self._inputs = [(_dtype(x), None if x.is_symbolic else x.shape) for x in stage.inputs]
        self._outputs = [_dtype(y) for y in stage.outputs]
        self._index_checks = IndexChecks(stage)
        self._able: set[str] = set()  # the kinds of tensors that have the outputs' dtypes

    def inputs(self, given: Sequence[Any]) -> list[Buffer]:
        """Locate the given inputs in memory.

        Raises
        ------
        InputError
            When their number, dtypes, shapes or devices are not the program's.
        """
        if len(given) != len(self._inputs):
            raise InputError(f"The program takes {len(self._inputs)} inputs; {len(given)} were given.")
        buffers = []
        for number, (x, (dtype, shape)) in enumerate(zip(given, self._inputs, strict=True)):
            buffer = buffer_of(x, f"Input {self._numbers[number]}")
            if buffer.dtype != dtype or buffer.shape != shape or not self._memory.holds(buffer.device):
                self._check_input(number, buffer)
            buffers.append(buffer)
        return buffers

    def packed(self, inputs: Sequence[Buffer]) -> list[Buffer]:
        """Make inputs contiguous: copy those that are not. Raises InputError, MemoryError."""
        return [
            buffer if buffer.contiguous else self._memory.packed(buffer, f"Input {self._numbers[number]}")
            for number, buffer in enumerate(inputs)
        ]

    def sizes(self, inputs: Sequence[Buffer]) -> dict[str, int]:
        """Compute the size of each symbolic dim of the program. Raises InputError for a size that is not allowed."""
        if not self._stage.symbols:
            return {}
        written = [x.shape for x in self._stage.inputs]
        shapes = zip(written, (buffer.shape for buffer in inputs), strict=True)
        return bind(self._stage.symbols, self._stage.local_symbols, shapes)

    def check_indices(self, inputs: Sequence[Buffer], sizes: Mapping[str, int]) -> None:
        """Raise InputError where inputs hold indices that are out of range, at these sizes of local symbols."""
        self._index_checks.check(inputs, sizes)

    def outputs(
        self, given: Sequence[Any], shapes: Sequence[tuple[int, ...]], inputs: Sequence[Buffer]
    ) -> list[Buffer]:
        """Locate the caller's tensors for the outputs.

        Raises
        ------
        InputError
            When their number, dtypes, shapes or devices are not the program's, or one cannot be written to where it
            lies, or shares memory with an input or another output.
        """
        if len(given) != len(self._outputs):
            raise InputError(f"The program has {len(self._outputs)} outputs; {len(given)} were given.")
        buffers: list[Buffer] = []
        for number, (y, dtype, shape) in enumerate(zip(given, self._outputs, shapes, strict=True)):
            what = f"Output {number}"
            buffer = buffer_of(y, what, to_write=True)
            self._check_device(what, buffer)
            if buffer.dtype != dtype:
                raise InputError(f"{what} must be {dtype}; got {buffer.dtype}.")
            if buffer.shape != shape:
                raise InputError(f"{what} must have the shape {_text(shape)}; got {_text(buffer.shape)}.")
            if not buffer.contiguous:
                raise InputError(f"{what} must be contiguous, row by row, and aligned to its elements.")
            if buffer.read_only is not False:
                raise InputError(f"{what} must be writable; the {type(y).__name__} is read-only, or does not say.")
            for kind, others in (("input", inputs), ("output", buffers)):
                for place, other in enumerate(others):
                    if buffer.overlaps(other):
                        raise InputError(f"{what} shares memory with {kind} {place}; give it memory of its own.")
            buffers.append(buffer)
        return buffers

    def new_outputs(
        self, kind: str, shapes: Sequence[tuple[int, ...]], inputs: Sequence[Buffer]
    ) -> tuple[list[Any], list[Buffer]]:
        """New outputs of a library's kind, and where they lie: on the first input's device, where memory has others."""
        device = inputs[0].device if inputs else (dlpack.CPU, 0)
        made = [
            self._memory.empty(kind, shape, dtype, device) for shape, dtype in zip(shapes, self._outputs, strict=True)
        ]
        return made, [buffer_of(y, f"Output {number}") for number, y in enumerate(made)]

    def zeros(self, sizes: Mapping[str, int]) -> list[Buffer]:
        """Inputs of zeros, at the sizes of the local symbols."""
        return [
            self._memory.zeros([sizes[n] if isinstance(n, str) else n for n in x.shape], dtype)
            for x, (dtype, _) in zip(self._stage.inputs, self._inputs, strict=True)
        ]

    def scratch(self, shapes: Sequence[tuple[int, ...]]) -> list[Buffer]:
        """Make outputs that nobody reads."""
        return [self._memory.zeros(shape, dtype) for shape, dtype in zip(shapes, self._outputs, strict=True)]

    def kind(self, given: Sequence[Any]) -> str:
        """The library of new outputs: that of the first input.

        Raises
        ------
        InputError
            When it has no dtype of one of the outputs.
        """
        kind = kind_of(given[0]) if given else NUMPY
        if kind not in self._able:
            for number, dtype in enumerate(self._outputs):
                if not has_dtype(kind, dtype):
                    raise InputError(
                        f"Output {number} is {dtype}, which {kind} has not. Give the first input as a torch or hidet "
                        "tensor, or give tensors of that dtype as outputs."
                    )
            self._able.add(kind)
        return kind

    def _check_device(self, what: str, buffer: Buffer) -> None:
        if not self._memory.holds(buffer.device):
            kind, number = buffer.device
            raise InputError(
                f"{what} must be on the {self._memory.name}; it is on {DEVICE_NAMES.get(kind, f'device type {kind}')} "
                f"{number}."
            )

    def _check_input(self, number: int, buffer: Buffer) -> None:
        what = f"Input {self._numbers[number]}"
        signature, dtype = self._stage.inputs[number], self._inputs[number][0]
        self._check_device(what, buffer)
        if buffer.dtype != dtype:
            raise InputError(f"{what} must be {dtype}; got {buffer.dtype}.")
        if not _fits(buffer.shape, signature):
            whole = "" if signature.shape == signature.whole_shape else f", a shard of {_text(signature.whole_shape)}"
            raise InputError(f"{what} must have the shape {_text(signature.shape)}{whole}; got {_text(buffer.shape)}.")


def _dtype(signature: TensorSignature) -> str:
    """Map a dtype to its name in NumPy and DLPack."""
    return "bool" if signature.dtype == "boolean" else signature.dtype


def _fits(shape: Sequence[int], signature: TensorSignature) -> bool:
    """Whether a shape fits the signature; its symbolic dims may have any size."""
    return len(shape) == len(signature.shape) and all(
        isinstance(extent, str) or size == extent for size, extent in zip(shape, signature.shape, strict=True)
    )


def _text(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"
