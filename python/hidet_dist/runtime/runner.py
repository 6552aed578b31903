"""What a call of a program runs: the program of one stage, or a stage's part of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.program import PreparedRun, StageProgram

if TYPE_CHECKING:
    from hidet_dist.runtime.pipeline.program import StepInterval


class Runner(Protocol):
    """Prepares calls of a program on one rank, and makes them."""

    @property
    def gives_results(self) -> bool:
        """Whether this rank returns the outputs of the graph."""

    def prepare(self, inputs: Sequence[Any], outputs: Sequence[Any] | None) -> tuple[Any, Mapping[str, int]]:
        """Check and place the inputs and outputs of a call; return it, and the sizes of symbolic dims it has."""

    def prepare_zeros(self, sizes: Mapping[str, int]) -> tuple[Any, Mapping[str, int]]:
        """Prepare a call on zeros whose outputs are discarded, at these whole sizes of symbolic dims."""

    def run(
        self, prepared: Any, number: int, record: bool = False
    ) -> tuple[list[Any], np.ndarray | list[StepInterval] | None]:
        """Make call ``number``; return the outputs and, with ``record``, the times of kernels or of steps."""


class StageRunner:
    """The program of a plan with one stage.

    Parameters
    ----------
    program: StageProgram
        The program.
    own: Communicator
        The communicator of the stage's ranks, which kernels use.
    communicator: Communicator
        The one in which the ranks agree on calls. It is another one where another program of the rank is a pipeline.
    """

    gives_results = True

    def __init__(self, program: StageProgram, own: Communicator, communicator: Communicator):
        self.prepare = program.prepare
        self.prepare_zeros = program.prepare_zeros
        self._program = program
        self._own, self._communicator = own, communicator

    def run(self, prepared: PreparedRun, number: int, record: bool = False) -> tuple[list[Any], np.ndarray | None]:
        """Make call ``number``; return the outputs and, with ``record``, the times of kernels."""
        if self._own is not self._communicator:
            self._own.begin_call(number)
            self._own.bind()
        return self._program.run(prepared, self._own, record)
