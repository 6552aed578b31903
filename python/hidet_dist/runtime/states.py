"""The states of a rank: memory that programs read and write, and that outlives their calls."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hidet_dist.artifacts.manifest import StateSignature
from hidet_dist.errors import InputError
from hidet_dist.runtime.memory import dtype_bytes
from hidet_dist.runtime.recycling import aligned
from hidet_dist.runtime.tensors import NUMPY, TORCH, Buffer, buffer_of, has_dtype, host_tensor


class States:
    """The states of a rank, in host memory. Pages that nothing has written to take no memory.

    Parameters
    ----------
    signatures: sequence of StateSignature
        The states, by names of their own.
    initial: mapping of str to int
        The addresses of their values before the first call, by their names in the data; zeros for those without any.
    """

    def __init__(self, signatures: Sequence[StateSignature], initial: Mapping[str, int]):
        self._signatures = {state.name: state for state in signatures}
        self._initial = {state.name: initial[state.initial] for state in signatures if state.initial}
        self._held = {state.name: aligned(_nbytes(state), zeros=True) for state in signatures}
        for name in self._initial:
            self._reset(name)
        self._lent: list[tuple[Sequence[str], Callable[[Sequence[int]], None]]] = []

    @property
    def signatures(self) -> Mapping[str, StateSignature]:
        """The states by name."""
        return self._signatures

    def addresses(self, names: Sequence[str]) -> list[int]:
        """Return the addresses of some states."""
        return [self._held[name].ctypes.data for name in names]

    def lend(self, names: Sequence[str], take: Callable[[Sequence[int]], None]) -> None:
        """Have ``take`` called with the addresses of some states whenever these change."""
        self._lent.append((names, take))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within the block, programs read and write other memory, of zeros, so that the states stay as they are."""
        if not self._held:
            yield
            return
        own, self._held = self._held, {name: aligned(held.nbytes, zeros=True) for name, held in self._held.items()}
        self._tell()
        try:
            yield
        finally:
            self._held = own
            self._tell()

    def _tell(self) -> None:
        for names, take in self._lent:
            if names:
                take(self.addresses(names))

    def reset(self) -> None:
        """Give all states the values that they had before the first call."""
        for name in self._signatures:
            self._reset(name)

    def save(self) -> dict[str, Any]:
        """Copy the states: NumPy arrays by name, or torch tensors of dtypes that NumPy lacks."""
        saved = {}
        for name, state in self._signatures.items():
            held = self._held[name]
            kind = NUMPY if has_dtype(NUMPY, state.dtype) else TORCH
            saved[name] = copy = host_tensor(kind, state.shape, state.dtype)
            ctypes.memmove(buffer_of(copy, name).address, held.ctypes.data, held.nbytes)
        return saved

    def checked(self, values: Mapping[str, Any]) -> dict[str, Buffer]:
        """Return the memory of values for some states, by name.

        Raises
        ------
        InputError
            When there is no state of a name, or a value has another dtype or shape, or is not in host memory.
        """
        buffers = {}
        for name, value in values.items():
            state = self._signatures.get(name)
            if state is None:
                raise InputError(f"There is no state {name!r}; there are {', '.join(self._signatures) or 'none'}.")
            buffer = buffer_of(value, f"The state {name}")
            if (buffer.dtype, buffer.shape) != (state.dtype, state.shape):
                raise InputError(
                    f"The state {name} must be {state.dtype}{list(state.shape)}, a shard of {list(state.whole_shape)}; "
                    f"got {buffer.dtype}{list(buffer.shape)}."
                )
            buffers[name] = buffer.packed()
        return buffers

    def load(self, buffers: Mapping[str, Buffer]) -> None:
        """Give states values that :meth:`checked` returned; the others stay as they are."""
        for name, buffer in buffers.items():
            held = self._held[name]
            ctypes.memmove(held.ctypes.data, buffer.address, held.nbytes)

    def close(self) -> None:
        """Free the memory. Its addresses must not be used any more."""
        self._signatures, self._initial, self._held, self._lent = {}, {}, {}, []

    def _reset(self, name: str) -> None:
        held = self._held[name]
        if name in self._initial:
            ctypes.memmove(held.ctypes.data, self._initial[name], held.nbytes)
        else:
            held.fill(0)


def _nbytes(state: StateSignature) -> int:
    return math.prod(state.shape) * dtype_bytes(state.dtype)
