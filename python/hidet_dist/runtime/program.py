"""A stage's compiled program with its memory, which prepares and makes runs at any sizes of its symbolic dims."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hidet_dist.artifacts.manifest import StageManifest
from hidet_dist.errors import HidetDistError, InputError
from hidet_dist.runtime import dlpack
from hidet_dist.runtime.arguments import CallSignature
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.kept import Kept
from hidet_dist.runtime.launcher import Launcher
from hidet_dist.runtime.memory import Memory
from hidet_dist.runtime.tensors import TensorBuffer


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to be launched.

    Attributes
    ----------
    sizes: the sizes of the local symbolic dims.
    inputs, outputs: the memory of inputs and outputs.
    results: the outputs as they are returned to the caller.
    addresses: the addresses at which kernels read the inputs, then those at which they write the outputs.
    """

    sizes: tuple[int, ...]
    inputs: Sequence[TensorBuffer]
    results: list[Any]
    outputs: Sequence[TensorBuffer]
    addresses: list[int]


def with_planned(planned: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the planned sizes of symbolic dims, with some others. Raises InputError for dims that there are not."""
    unknown = sorted(set(sizes) - set(planned))
    if unknown:
        raise InputError(
            f"The program has no symbolic dim {', '.join(unknown)}; it has {', '.join(planned) or 'none'}."
        )
    return {**planned, **sizes}


class StageProgram:
    """One stage's program on one rank.

    hidet's runtime has one table of symbolic dims' sizes per process. Preparing a run writes it, and the run reads it,
    so no other program may be prepared in between.

    Parameters
    ----------
    stage: StageManifest
        The stage.
    launcher: Launcher
        Its launcher.
    memory: Memory
        The memory in which its tensors lie.
    runtime: ctypes.CDLL
        hidet's runtime library.
    parts: mapping, optional
        The rank's unequal parts, by the names of their symbols. They are passed to hidet's runtime with
        the sizes of symbolic dims.
    """

    def __init__(
        self,
        stage: StageManifest,
        launcher: Launcher,
        memory: Memory,
        runtime: ctypes.CDLL,
        parts: Mapping[str, int] | None = None,
    ):
        self._stage = stage
        self._launcher = launcher
        self._memory = memory
        self._runtime = runtime
        self._parts = dict(parts or {})
        self._signature = CallSignature(stage, memory)
        # By the sizes of the symbolic dims: the outputs' shapes, and the bytes of workspace.
        self._shapes: Kept[tuple[int, ...], list[tuple[int, ...]]] = Kept()
        self._workspaces: Kept[tuple[int, ...], int] = Kept()
        if not stage.symbols:
            self._shapes_at({})
            self._reserve_workspace({})
        self.check_runtime()

    def prepare(self, inputs: Sequence[Any], outputs: Sequence[Any] | None) -> tuple[PreparedRun, Mapping[str, int]]:
        """Check and place the inputs and outputs of a run, and allocate memory for its activations.

        Parameters
        ----------
        inputs: sequence of tensors
            The rank's shards.
        outputs: sequence of tensors, optional
            Tensors for the results; new ones by default.

        Returns
        -------
        The run, and the sizes of the local symbolic dims.

        Raises
        ------
        InputError
            When inputs or outputs do not fit the program.
        MemoryError, DeviceError
            When there is not enough memory.
        """
        signature = self._signature
        given = signature.inputs(inputs)
        sizes = signature.sizes(given)
        kind = signature.kind(inputs) if outputs is None else None
        shapes = self._checked_shapes(sizes)
        arguments = signature.packed(given)  # once their sizes are known to make sense
        signature.check_indices(arguments, sizes)
        if outputs is None:
            assert kind is not None
            device = arguments[0].device if arguments else (dlpack.CPU, 0)
            results, buffers = signature.new_outputs(kind, shapes, device)
        else:
            results, buffers = list(outputs), signature.outputs(outputs, shapes, arguments)
        return self._placed(sizes, arguments, results, buffers), sizes

    def prepare_zeros(self, sizes: Mapping[str, int]) -> tuple[PreparedRun, Mapping[str, int]]:
        """Prepare a run on zeros whose outputs are discarded.

        ``sizes`` has global sizes of symbolic dims, by name; the others have the sizes that the plan was made for.
        """
        stage = self._stage
        whole = with_planned({symbol.name: symbol.size for symbol in stage.symbols}, sizes)
        arguments = self._signature.zeros(
            {each.name: whole[each.symbol] // each.shards for each in stage.local_symbols}
        )
        local = self._signature.sizes(arguments)
        buffers = self._signature.scratch(self._checked_shapes(local))
        return self._placed(local, arguments, [], buffers), local

    def output_shapes(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """Return the outputs' shapes at these sizes of local symbols. Raises InputError if one of them is empty."""
        return self._checked_shapes(sizes)

    def place(
        self, inputs: Sequence[TensorBuffer], outputs: Sequence[TensorBuffer], sizes: Mapping[str, int]
    ) -> PreparedRun:
        """Prepare a run on tensors that are known to fit the program at these ``sizes`` of local symbols."""
        self._shapes_at(sizes)
        return self._placed(sizes, inputs, [], outputs)

    def run(
        self, prepared: PreparedRun, communicator: Communicator, record: bool = False
    ) -> tuple[list[Any], np.ndarray | None]:
        """Make a run. Returns the outputs, and with ``record`` the times of kernels: int64[launches, 2], in ns.

        Raises
        ------
        CommunicationError
            When a collective failed.
        HidetDistError
            When a kernel failed.
        """

        def check() -> None:
            communicator.check()
            self.check_runtime()

        launcher, memory = self._launcher, self._memory
        launch = launcher.record if record else launcher.launch
        launch(prepared.addresses, prepared.sizes, check)
        memory.wait(communicator)
        times = launcher.times() if record else None
        self.check_runtime()
        memory.deliver(prepared.outputs, prepared.addresses[len(prepared.inputs) :])
        return prepared.results, times

    def check_runtime(self) -> None:
        """Raise HidetDistError if hidet's runtime has recorded an error."""
        message = self._runtime.hidet_get_last_error()
        if message is not None:
            raise HidetDistError(f"hidet's runtime reports: {message.decode(errors='replace')}")

    def _placed(
        self,
        sizes: Mapping[str, int],
        arguments: Sequence[TensorBuffer],
        results: list[Any],
        outputs: Sequence[TensorBuffer],
    ) -> PreparedRun:
        self._reserve_workspace(sizes)  # another program of the rank may have made room for more since
        return PreparedRun(tuple(sizes.values()), arguments, results, outputs, self._memory.stage(arguments, outputs))

    def _checked_shapes(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """Return the outputs' shapes, as :meth:`_shapes_at`. Raises InputError if one of them would be empty."""
        shapes = self._shapes_at(sizes)
        for number, (shape, signature) in enumerate(zip(shapes, self._stage.outputs, strict=True)):
            if min(shape, default=1) < 1:
                written = ", ".join(map(str, signature.shape))
                raise InputError(f"The inputs are too small: output {number}, [{written}], would be {list(shape)}.")
        return shapes

    def _shapes_at(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """Return the outputs' shapes, after passing the sizes of symbolic dims to hidet's runtime, for kernels."""
        for name, size in (*self._parts.items(), *sizes.items()):
            self._runtime.set_symbol_value(name.encode(), size)
        return self._shapes.get(tuple(sizes.values()), self._output_shapes)

    def _reserve_workspace(self, sizes: Mapping[str, int]) -> None:
        """Reserve memory for the activations at these sizes, which hidet's runtime already has."""
        self._launcher.reserve(self._workspaces.get(tuple(sizes.values()), self._launcher.workspace_bytes))

    def _output_shapes(self) -> list[tuple[int, ...]]:
        return [
            self._launcher.output_shape(number, len(y.shape))
            if y.is_symbolic
            else tuple(int(extent) for extent in y.shape)
            for number, y in enumerate(self._stage.outputs)
        ]
