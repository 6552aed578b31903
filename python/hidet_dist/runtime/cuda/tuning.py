"""The choice among the candidates of each kernel on a CUDA device, the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hidet_dist.runtime.candidates import Choices
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.cuda.launcher import CudaLauncher
from hidet_dist.runtime.cuda.memory import CudaMemory
from hidet_dist.runtime.device import RankPart
from hidet_dist.runtime.program import PreparedRun

_TIMED_RUNS = 4  # the number of timed runs of a candidate, of which the fastest counts


class CandidateTuning:
    """The timing of the candidates of a stage's kernels, after which the launcher uses the fastest.

    Parameters
    ----------
    part: RankPart
        The rank's part of a program, on a CUDA device.
    memory: CudaMemory
        The program's memory.
    communicator: Communicator
        The communicator of the stage's ranks.
    cublas_version: int
        The version of the launcher's cuBLAS, or 0.
    without_cublas: str
        The reason why it has no cuBLAS.
    """

    def __init__(
        self,
        part: RankPart,
        memory: CudaMemory,
        communicator: Communicator,
        cublas_version: int,
        without_cublas: str,
    ):
        assert isinstance(part.launcher, CudaLauncher)
        self._stage, self._program, self._kernels = part.stage, part.program, part.kernels
        self._launcher = part.launcher
        self._memory = memory
        self._communicator = communicator
        self._cublas_version = cublas_version
        self._without_cublas = without_cublas

    def choose(self, folder: Path, identity: str) -> None:
        """Select the fastest candidate of each kernel, the same on all ranks. All ranks call this together.

        Parameters
        ----------
        folder: Path
            The artifact folder, where choices are remembered.
        identity: str
            The identity of this build of the artifacts.

        Raises
        ------
        HidetDistError
            When no candidate of a kernel runs on all ranks.
        CommunicationError
            When another rank fails.
        """
        stage, memory = self._stage, self._memory
        with memory.active():
            self._communicator.bind()
            usable, version, reason = self._usable()
            device = memory.driver.device_name(memory.device)
            choices = Choices(folder, identity, device, stage.candidates, usable, version, reason)
            chosen = self._fastest(choices) if choices.is_needed else (0,) * len(stage.candidates)
            for kernel, candidate in enumerate(chosen):
                self._launcher.use(kernel, self._kernels[kernel][candidate])
            if not self._calls_cublas(chosen):
                self._launcher.leave_cublas()

    def _fastest(self, choices: Choices) -> tuple[int, ...]:
        """Return the choice that the first rank remembers, or else time the candidates on all ranks and choose."""
        first = self._communicator.rank == 0
        prepared, _ = self._program.prepare_zeros({})
        earlier = choices.remembered() if first else None
        remembered = np.array([-1] * len(self._stage.candidates) if earlier is None else earlier, np.int32)
        chosen = tuple(int(x) for x in self._gather(remembered)[0])
        if -1 not in chosen:
            return chosen
        seconds = choices.times(lambda kernel, candidate: self._seconds(prepared, kernel, candidate))
        self._communicator.check()
        times = self._gather(np.array(seconds)).max(axis=0).tolist()
        chosen = choices.fastest(times)
        if first:
            choices.remember(chosen, times)
        return chosen

    def _seconds(self, prepared: PreparedRun, kernel: int, candidate: int) -> float:
        """Measure the least seconds per run, of several runs, that all launches of a kernel take with a candidate."""
        launcher = self._launcher
        nodes = [number for number, launch in enumerate(self._stage.launches) if launch.kernel == kernel]
        best = math.inf
        launcher.use(kernel, self._kernels[kernel][candidate])
        try:
            for _ in range(_TIMED_RUNS):
                launcher.record(prepared.addresses, prepared.sizes, self._communicator.check)
                self._memory.wait(self._communicator)
                best = min(best, launcher.seconds_of(nodes))
        finally:
            launcher.use(kernel, self._kernels[kernel][0])
        self._program.check_runtime()
        return best

    def _usable(self) -> tuple[tuple[int, ...], int, str]:
        """Return the number of candidates of each kernel that all ranks can run, cuBLAS's version or 0, and a reason.

        The reason says why candidates that call cuBLAS cannot run; it is empty if they can.
        """
        stage, version = self._stage, self._cublas_version
        if not any(stage.cublas):
            return stage.candidates, 0, ""
        versions = [int(x) for x in self._gather(np.array([version], np.int32))[:, 0]]
        if version and len(set(versions)) == 1:
            return stage.candidates, version, ""
        reason = self._without_cublas or f"not all ranks have the same version of cuBLAS: {versions}"
        usable = tuple(count - calls_cublas for count, calls_cublas in zip(stage.candidates, stage.cublas, strict=True))
        return usable, 0, reason

    def _calls_cublas(self, chosen: Sequence[int]) -> bool:
        """Tell whether a chosen candidate calls cuBLAS: the last one of a kernel that has such a candidate."""
        return any(
            calls and candidate == count - 1
            for candidate, count, calls in zip(chosen, self._stage.candidates, self._stage.cublas, strict=True)
        )

    def _gather(self, array: np.ndarray) -> np.ndarray:
        """Gather an array of the same size from each rank, as rows."""
        return array[None] if self._communicator.world_size == 1 else self._memory.all_gather(self._communicator, array)
