"""The states of a rank: memory that programs read and write, and that outlives their calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hidet_dist.artifacts.manifest import StateSignature
from hidet_dist.errors import InputError
from hidet_dist.runtime.memory import Memory, dtype_bytes
from hidet_dist.runtime.tensors import NUMPY, TORCH, TensorBuffer, buffer_of, has_dtype, host_tensor


class States:
    """The states of a rank, in the memory of its programs.

    Parameters
    ----------
    signatures: sequence of StateSignature
        The states, by names of their own.
    initial: mapping of str to int
        The addresses of their values before the first call, by their names in the data; zeros for those without any.
    memory: Memory
        The memory of the programs.
    """

    def __init__(self, signatures: Sequence[StateSignature], initial: Mapping[str, int], memory: Memory):
        self._memory = memory
        self._signatures = {state.name: state for state in signatures}
        self._initial = {state.name: initial[state.initial] for state in signatures if state.initial}
        self._nbytes = {state.name: math.prod(state.local_shape) * dtype_bytes(state.dtype) for state in signatures}
        self._held = {name: memory.reserve_zeros(nbytes) for name, nbytes in self._nbytes.items()}
        for name in self._initial:
            self._reset(name)
        self._are_initial = True
        self._lent: list[tuple[Sequence[str], Callable[[Sequence[int]], None]]] = []

    @property
    def signatures(self) -> Mapping[str, StateSignature]:
        """The states by name."""
        return self._signatures

    def addresses(self, names: Sequence[str]) -> list[int]:
        """Return the addresses of some states."""
        return [self._held[name] for name in names]

    def lend(self, names: Sequence[str], take: Callable[[Sequence[int]], None]) -> None:
        """Have ``take`` called with the addresses of some states whenever these change."""
        self._lent.append((names, take))

    def begin_run(self) -> None:
        """Note that a call may write states from now on."""
        self._are_initial = False

    @contextmanager
    def aside(self, lost: Callable[[str], None]) -> Iterator[None]:
        """Within the block, programs find states of zeros; behind it, states are as before.

        Where memory of zeros takes none, programs read and write such memory meanwhile. Elsewhere a second memory of
        that size might not be there: the states stay where they are, and values that are not those before the first
        call are kept in the host's memory.

        Parameters
        ----------
        lost: function
            Called with a reason where the values could not be put back.
        """
        if not self._held:
            yield
            return
        with self._in_other_memory() if self._memory.zeros_are_free else self._kept(lost):
            yield

    @contextmanager
    def _in_other_memory(self) -> Iterator[None]:
        own = self._held
        self._held = {name: self._memory.reserve_zeros(nbytes) for name, nbytes in self._nbytes.items()}
        self._tell()
        try:
            yield
        finally:
            other, self._held = self._held, own
            self._tell()
            for address in other.values():
                self._memory.release(address)

    @contextmanager
    def _kept(self, lost: Callable[[str], None]) -> Iterator[None]:
        kept = {} if self._are_initial else {name: np.empty(nbytes, np.uint8) for name, nbytes in self._nbytes.items()}
        for name, value in kept.items():
            self._memory.copy(value.ctypes.data, self._held[name], value.nbytes)
        try:
            for name, nbytes in self._nbytes.items():
                self._memory.clear(self._held[name], nbytes)
            yield
        finally:
            try:
                for name in self._held:
                    if name in kept:
                        self._memory.copy(self._held[name], kept[name].ctypes.data, self._nbytes[name])
                    else:
                        self._reset(name)
            except BaseException as error:
                lost(f"the values of states could not be put back: {error}")
                raise

    def _tell(self) -> None:
        for names, take in self._lent:
            if names:
                take(self.addresses(names))

    def reset(self) -> None:
        """Give all states the values that they had before the first call."""
        for name in self._signatures:
            self._reset(name)
        self._are_initial = True

    def save(self) -> dict[str, Any]:
        """Copy the states: NumPy arrays by name, or torch tensors of dtypes that NumPy lacks."""
        saved = {}
        for name, state in self._signatures.items():
            kind = NUMPY if has_dtype(NUMPY, state.dtype) else TORCH
            saved[name] = copy = host_tensor(kind, state.local_shape, state.dtype)
            self._memory.copy(buffer_of(copy, name).address, self._held[name], self._nbytes[name])
        return saved

    def checked(self, values: Mapping[str, Any]) -> dict[str, TensorBuffer]:
        """Return the memory of values for some states, by name.

        Raises
        ------
        InputError
            When there is no state of a name, or a value has another dtype or shape, or is on another device.
        """
        buffers = {}
        for name, value in values.items():
            state = self._signatures.get(name)
            if state is None:
                raise InputError(f"There is no state {name!r}; there are {', '.join(self._signatures) or 'none'}.")
            what = f"The state {name}"
            buffer = buffer_of(value, what)
            if (buffer.dtype, buffer.shape) != (state.dtype, state.local_shape):
                raise InputError(
                    f"The state {name} must be {state.dtype}{list(state.shape)}, a shard of {list(state.whole_shape)}; "
                    f"got {buffer.dtype}{list(buffer.shape)}."
                )
            if not self._memory.holds(buffer.device):
                raise InputError(f"{what} must be on the {self._memory.name}; give a tensor there.")
            buffers[name] = self._memory.packed(buffer, what)
        return buffers

    def load(self, buffers: Mapping[str, TensorBuffer]) -> None:
        """Give states values that :meth:`checked` returned; the others stay as they are."""
        self._are_initial = False
        for name, buffer in buffers.items():
            self._memory.copy(self._held[name], buffer.address, self._nbytes[name])

    def close(self) -> None:
        """Free the memory. Its addresses must not be used any more."""
        self._signatures, self._initial, self._held, self._lent = {}, {}, {}, []

    def _reset(self, name: str) -> None:
        if name in self._initial:
            self._memory.copy(self._held[name], self._initial[name], self._nbytes[name])
        else:
            self._memory.clear(self._held[name], self._nbytes[name])
