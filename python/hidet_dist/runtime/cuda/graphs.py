"""A whole program as a CUDA graph: captured once for each set of addresses and sizes, and replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from hidet_dist.runtime.cuda.driver import Driver

_MOST_GRAPHS = 64  # combinations of symbolic dims' sizes that graphs are kept for


class Graphs:
    """The graphs of one partition.

    A program runs as it is when it comes to new addresses, which loads its kernels and connects its collectives. It is
    captured when it comes to them again, and replayed from then on. All ranks come to the same point at the same call.

    Parameters
    ----------
    driver: Driver
        The CUDA driver.
    stream: int
        What the program is put on.
    """

    def __init__(self, driver: Driver, stream: int):
        self._driver = driver
        self._stream = stream
        self._executables: dict[Hashable, int | None] = {}  # None where it has run, but was not captured yet

    def run(self, key: Hashable, launch: Callable[[], None], check: Callable[[], None]) -> None:
        """Launch the program on the stream.

        Parameters
        ----------
        key: hashable
            All that makes it another graph: addresses, and sizes of symbolic dims.
        launch: callable
            Puts it on the stream, kernel by kernel.
        check: callable
            Raises what went wrong in that.
        """
        if key not in self._executables:
            if len(self._executables) >= _MOST_GRAPHS:
                self.clear()
            self._executables[key] = None
            launch()
            return
        executable = self._executables[key]
        if executable is None:
            executable = self._executables[key] = self._capture(launch, check)
        self._driver.call("cuGraphLaunch", executable, self._stream)

    def _capture(self, launch: Callable[[], None], check: Callable[[], None]) -> int:
        self._driver.begin_capture(self._stream)
        try:
            launch()
        finally:
            graph = self._driver.end_capture(self._stream)
        try:
            check()
            return self._driver.instantiate(graph)
        finally:
            self._driver.call("cuGraphDestroy", graph)

    def clear(self) -> None:
        """Free the graphs. None may be running."""
        while self._executables:
            _, executable = self._executables.popitem()
            if executable is not None:
                self._driver.call("cuGraphExecDestroy", executable)
