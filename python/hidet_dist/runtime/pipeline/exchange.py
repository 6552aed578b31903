"""The delivery of results to the ranks that return them, in a thread beside the one that computes.

Messages between stages go forward, and results mostly go back. In one thread, ranks could wait for each other in a
circle. So each rank has a separate thread and communicator for results, and computing does not wait for them. All ranks
share the order of these messages: by micro-batch, output, and receiving stage.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hidet_dist import native
from hidet_dist.runtime.pipeline.channel import MessageChannel
from hidet_dist.runtime.pipeline.messages import Inlet, Outlet


@dataclass(frozen=True)
class Route:
    """This rank's end of the delivery of one output to one stage: one of the two, or neither if it takes no part."""

    output: int
    outlet: Outlet | None
    inlet: Inlet | None


@dataclass(frozen=True)
class Computed:
    """A rank's results of one micro-batch.

    Attributes
    ----------
    shards: its shards of the graph's outputs, by their numbers.
    routes: the deliveries that it takes part in, in the order that all ranks share.
    """

    shards: Mapping[int, np.ndarray]
    routes: Sequence[Route]


class Exchange:
    """The exchange of results in one call, or one stream.

    Parameters
    ----------
    channel: MessageChannel
        The channel of results; it has no other use during the exchange.
    call: int
        The number of the call.

    Attributes
    ----------
    awaited: whether :meth:`take` waits.
    """

    def __init__(self, channel: MessageChannel, call: int):
        self._channel = channel
        self._call = call
        self.awaited = False
        self._todo: queue.SimpleQueue[Computed | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[dict[int, np.ndarray] | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hidet_dist-results", daemon=True)
        self._thread.start()
        atexit.register(self._abort)  # before communicators are closed, which were registered earlier

    def add(self, computed: Computed) -> None:
        """Queue this rank's results of the next micro-batch for the exchange."""
        self._todo.put(computed)

    def take(self) -> dict[int, np.ndarray]:
        """Return the parts that this rank received of the oldest micro-batch, once all its messages are complete.

        Raises CommunicationError.
        """
        self.awaited = True
        done = self._done.get()
        self.awaited = False
        if isinstance(done, BaseException):
            raise done
        return done

    def end(self) -> None:
        """Wait for the end of the thread: after all queued results, or when the communicator has failed."""
        self._todo.put(None)
        self._thread.join()
        atexit.unregister(self._abort)

    def _abort(self) -> None:
        self._channel.communicator.interrupt("its process ends within a call")
        self._todo.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._channel.communicator.begin_call(self._call)
            with self._channel.arrays.active():
                while (computed := self._todo.get()) is not None:
                    received = self._exchange(computed)
                    computed = None  # its memory is free for later results
                    self._done.put(received)
        except BaseException as error:
            self._done.put(error)
        finally:
            native.bind(None)

    def _exchange(self, computed: Computed) -> dict[int, np.ndarray]:
        """Send and receive the results of one micro-batch, given those of this rank; return what is received."""
        ends: list[Inlet | tuple[Outlet, np.ndarray]] = []
        outputs = []
        for route in computed.routes:
            if route.outlet is not None:
                ends.append((route.outlet, computed.shards[route.output]))
            if route.inlet is not None:
                ends.append(route.inlet)
                outputs.append(route.output)
        return dict(zip(outputs, self._channel.wait(self._channel.begin(ends)), strict=True))
