"""Streams: batches that keep a pipeline full, and their results in order."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

from hidet_dist.runtime.calls import Calls
from hidet_dist.runtime.pipeline.program import PipelinedProgram, PreparedCall


class ResultStream(Iterator[Any]):
    """The results of batches, in order.

    All ranks iterate over it to the end, with equally many batches. Where the batches have a length, the last result is
    the end; else the attempt to get one more. A batch that a rank refuses ends the stream and the
    partition on all ranks, because other ranks may have sent results of later batches.

    Parameters
    ----------
    program: PipelinedProgram
        This rank's program.
    calls: Calls
        The calls of the partition, which has begun a stream.
    batches: iterable
        The inputs of each batch: a sequence of them, or the only one.
    finish: function
        Agrees with the other ranks on the end of the stream.
    """

    def __init__(self, program: PipelinedProgram, calls: Calls, batches: Iterable[Any], finish: Callable[[], None]):
        self._program, self._calls, self._finish = program, calls, finish
        self._batches = iter(batches)
        self._pending: deque[PreparedCall] = deque()
        self._taken = True  # whether there may be batches left
        self._left = len(batches) if isinstance(batches, Sized) else None  # the number of results that are left
        self._open = True
        calls.streaming = True

    def __next__(self) -> Any:
        """Return the results of the next batch, as a call returns them.

        Raises
        ------
        InputError
            When this rank refuses a batch.
        CommunicationError
            When a message or a collective failed on this rank or another.
        """
        if not self._open:
            raise StopIteration
        self._calls.check_caller()  # a thread that must not call ends nothing
        try:
            while self._taken and len(self._pending) <= self._program.lag:
                try:
                    batch = next(self._batches)
                except StopIteration:
                    self._taken = False
                    break
                self._calls.go_on(functools.partial(self._take, batch))
            results = [self._calls.go_on(self._results)] if self._pending else []
            if results and self._left is not None:
                self._left -= 1
            if not results or self._left == 0:
                self._open = False
                self._program.end()
                self._finish()
                self._calls.streaming = False
        except BaseException as error:
            self._end_by(error)
            raise
        if not results:
            raise StopIteration
        return results[0]

    def close(self) -> None:
        """Leave the stream. Before its end, this ends the partition on all ranks, which name this one.

        Deleting the stream does the same, as a loop does that is left by ``break`` or an exception.

        Raises
        ------
        HidetDistError
            When this thread may not call the partition, or is in a call.
        """
        if self._open:
            self._calls.leave(self._leave)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self._calls.drop(self._leave)

    def _leave(self) -> None:
        self._open = False
        self._calls.streaming = False
        self._program.leave()

    def _take(self, batch: Any) -> None:
        inputs = batch if isinstance(batch, Sequence) else [batch]
        prepared, _ = self._program.prepare(inputs, None)
        self._program.process(prepared)
        self._pending.append(prepared)

    def _results(self) -> Any:
        outputs = self._program.collect(self._pending.popleft())
        if not self._program.gives_results:
            return None
        return outputs[0] if len(outputs) == 1 else outputs

    def _end_by(self, error: BaseException) -> None:
        self._open = False
        self._calls.streaming = False
        self._program.fail(error)
