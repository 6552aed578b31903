"""Devices that ranks run their stages on: the protocol, and the host's processor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hidet_dist.artifacts.manifest import Manifest, StageManifest
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.launcher import Launcher
from hidet_dist.runtime.memory import HostMemory, Memory
from hidet_dist.runtime.program import StageProgram


@dataclass(frozen=True)
class RankPart:
    """One rank's part of one program.

    Attributes
    ----------
    stage: the rank's stage.
    launcher: its launcher.
    kernels: the addresses of each kernel's candidates.
    program: the program, made of them.
    """

    stage: StageManifest
    launcher: Launcher
    kernels: Sequence[Sequence[int]]
    program: StageProgram


class RankDevice(Protocol):
    """The device of one rank, for one stage."""

    @property
    def memory(self) -> Memory:
        """The memory of weights, workspace, inputs and outputs."""

    @property
    def number(self) -> int | None:
        """The number of the device among those of its kind; None for the host."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes now allocated in the device's memory; 0 on the host, whose memory is not counted."""

    def launcher(
        self,
        library: ctypes.CDLL,
        kernels: Sequence[Sequence[int]],
        data: Sequence[int],
        stage: StageManifest,
        states: Sequence[int],
    ) -> Launcher:
        """Make the launcher of a stage from its library and the addresses of kernels' candidates, data and states."""

    def choose_candidates(self, part: RankPart, communicator: Communicator, folder: Path, build: str) -> None:
        """Choose the fastest candidate of each kernel. All ranks of the stage call this together, and choose the same.

        Parameters
        ----------
        part: the rank's part of a program, with the launcher that :meth:`launcher` made.
        communicator: the communicator of the stage's ranks.
        folder: the artifact folder, where choices are remembered.
        build: the identity of this build of the stage.

        Raises
        ------
        HidetDistError
            When no candidate of a kernel runs on all ranks.
        CommunicationError
            When another rank fails.
        """


@dataclass(frozen=True)
class DeviceKind:
    """A kind of devices.

    Attributes
    ----------
    check: raises ``ConfigError`` on a host without such a device; called before ranks meet.
    open: opens a rank's device for a stage. The device must run code for the manifest's ``arch``.
    """

    check: Callable[[], None]
    open: Callable[[Manifest, StageManifest, int], RankDevice]


class HostDevice:
    """The host's processor. Its kernels have one candidate each."""

    number = None
    allocated_bytes = 0

    def __init__(self) -> None:
        self.memory = HostMemory()

    def launcher(
        self,
        library: ctypes.CDLL,
        kernels: Sequence[Sequence[int]],
        data: Sequence[int],
        stage: StageManifest,
        states: Sequence[int],
    ) -> Launcher:
        """Make the launcher, with the first candidate of each kernel."""
        tensors = len(stage.inputs) + len(stage.outputs)
        first = [candidates[0] for candidates in kernels]
        return Launcher(library, first, data, tensors, len(stage.launches), self.memory, states)

    def choose_candidates(self, part: RankPart, communicator: Communicator, folder: Path, build: str) -> None:
        """Keep the first candidate of each kernel."""


HOST = DeviceKind(lambda: None, lambda manifest, stage, rank: HostDevice())
