"""A rank's part of a model: the program of a step, for a language model over pools that the rank holds."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from hidet_dist.artifacts.opened import OpenedArtifacts
from hidet_dist.llm.sizes import StepSizes
from hidet_dist.llm.step import StepInputs
from hidet_dist.llm.stored import StoredModel
from hidet_dist.runtime.partition import LoadedPartition
from hidet_dist.runtime.team import Team
from hidet_dist.runtime.threads import end_threads

_NO_LOGITS = np.zeros(1, np.int64)


class PartitionModel:
    """A rank of a language model, or of an encoder, that was built. All ranks make the same calls, in the same order.

    Parameters
    ----------
    stored: StoredModel
        The model.
    timeout_seconds: float, optional
        How long the ranks wait for one another; the session's time-out by default.
    led: bool
        Whether rank 0 checks the inputs of each step and tells them to the others, as
        :class:`hidet_dist.llm.ranks.LeadingModel` does: the ranks then need not compare them again.
    opened: OpenedArtifacts, optional
        What :meth:`StoredModel.verifying` gives; the model closes it.

    Raises
    ------
    HidetDistError
        As :func:`hidet_dist.load_partition`.
    """

    def __init__(
        self,
        stored: StoredModel,
        timeout_seconds: float | None = None,
        led: bool = False,
        opened: OpenedArtifacts | None = None,
    ):
        self._led = led
        self._sizes = stored.sizes
        self._partition = LoadedPartition(stored.artifacts, None, timeout_seconds, opened)
        self._thread = threading.get_ident()
        self._encodes = stored.pooling is not None
        symbols = ("tokens", "sequences", *(("columns",) if self._encodes else ("pages", "wanted")))
        try:
            self._partition.warm_up(dict.fromkeys(symbols, 1))
            end_threads()  # another thread may call from now on
            self._team = Team.of_this_thread()
        except BaseException:
            self._partition.close()
            raise

    @property
    def sizes(self) -> StepSizes:
        """The sizes of the model."""
        return self._sizes

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Compute one step, and return the logits of the tokens that are wanted [R, vocabulary].

        For an encoder these are the tokens' vectors. Each token attends to all of its text: to as many rows as its
        text has tokens in the step.

        Raises
        ------
        InputError, CallError
            When the step was refused, on all ranks. Nothing was written.
        CommunicationError, HidetDistError
            When a rank failed or died. Later steps are not possible.
        """
        if not self._led:
            inputs.check(self._sizes)
        self._attach()
        begin = self._team.begin()
        logits = self._run(inputs)
        self._team.end(begin)
        return logits

    def _run(self, inputs: StepInputs) -> NDArray[np.float32]:
        run = self._partition.run_agreed if self._led else self._partition.run
        if self._encodes:
            lengths = np.bincount(inputs.sequences)[inputs.sequences]
            vectors: NDArray[np.float32] = run(
                [inputs.tokens, inputs.positions, inputs.sequences, lengths, inputs.tables]
            )[0]
            return vectors[inputs.wanted]
        count = len(inputs.wanted)
        # A program's tensors have at least one element: a step that wants no logits computes those of one token.
        wanted = inputs.wanted if count else _NO_LOGITS
        per_token = (inputs.tokens, inputs.positions, inputs.slots, inputs.sequences, inputs.lengths)
        logits: NDArray[np.float32] = run([*per_token, inputs.tables, wanted])[0]
        return logits[:count]

    def reset(self) -> None:
        """Forget all sequences. All ranks call it together."""
        self._attach()
        self._partition.reset()

    def close(self) -> None:
        """Release the rank's memory. It may be called twice."""
        self._partition.close()

    def _attach(self) -> None:
        """Have the calling thread call the partition from now on."""
        if self._thread != threading.get_ident():
            self._partition.attach()
            self._thread = threading.get_ident()
            self._team = Team.of_this_thread()
