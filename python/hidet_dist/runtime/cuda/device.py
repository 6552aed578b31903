"""A CUDA device as the device of a rank."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from hidet_dist.artifacts.manifest import Manifest, StageManifest
from hidet_dist.errors import ConfigError
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.cuda.cublas import PartitionCublas
from hidet_dist.runtime.cuda.driver import DeviceError, check_architecture, device_of_rank
from hidet_dist.runtime.cuda.launcher import CudaLauncher
from hidet_dist.runtime.cuda.memory import CudaMemory
from hidet_dist.runtime.cuda.tuning import CandidateTuning
from hidet_dist.runtime.device import DeviceKind, RankPart


def open_cuda_device(manifest: Manifest, stage: StageManifest, rank: int) -> CudaDevice:
    """Open the device of a rank. Raises ConfigError if no device runs the manifest's code."""
    number = device_of_rank(rank)
    check_architecture(manifest.arch, number)
    return CudaDevice(CudaMemory(number, static=stage.cuda_graph))


class CudaDevice:
    """A CUDA device; see :class:`hidet_dist.runtime.device.RankDevice`."""

    def __init__(self, memory: CudaMemory):
        self.memory = memory
        self._cublas_version = 0
        self._without_cublas = ""  # the reason why there is no cuBLAS

    @property
    def number(self) -> int:
        """The CUDA device's number."""
        return self.memory.device

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated on the device for weights, workspace and staging."""
        return self.memory.allocated_bytes

    def launcher(
        self,
        library: ctypes.CDLL,
        kernels: Sequence[Sequence[int]],
        data: Sequence[int],
        stage: StageManifest,
        states: Sequence[int],
    ) -> CudaLauncher:
        """Make the launcher, with the first candidate of each kernel, and with cuBLAS where kernels call it."""
        cublas = None
        if any(stage.cublas):
            try:
                cublas = PartitionCublas(self.memory)
                self._cublas_version = cublas.version
            except (ConfigError, DeviceError) as error:
                self._without_cublas = str(error)
        return CudaLauncher(
            library,
            [candidates[0] for candidates in kernels],
            data,
            len(stage.inputs) + len(stage.outputs),
            len(stage.launches),
            self.memory,
            stage.cuda_graph,
            cublas,
            states,
        )

    def choose_candidates(self, part: RankPart, communicator: Communicator, folder: Path, build: str) -> None:
        """Time the candidates on this device, unless the choice is remembered."""
        tuning = CandidateTuning(part, self.memory, communicator, self._cublas_version, self._without_cublas)
        tuning.choose(folder, build)


def _check() -> None:
    device_of_rank(0)


GPU = DeviceKind(_check, open_cuda_device)
