"""Capture and replay of a whole program as a CUDA graph, one for each combination of addresses and sizes."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from hidet_dist.runtime.cuda.driver import Driver

_MOST_GRAPHS = 64  # the number of combinations of addresses and sizes for which graphs are kept


class Graphs:
    """The CUDA graphs of one partition.

    The first run with a key is launched kernel by kernel, which loads the kernels and connects the collectives. The
    second run is captured, and later ones are replayed. All ranks do the same in the same call.

    Parameters
    ----------
    driver: Driver
        The CUDA driver.
    stream: int
        The stream that the program is launched on.
    """

    def __init__(self, driver: Driver, stream: int):
        self._driver = driver
        self._stream = stream
        self._executables: dict[Hashable, int | None] = {}  # None for a key that has run once, uncaptured

    def run(self, key: Hashable, launch: Callable[[], None], check: Callable[[], None]) -> None:
        """Launch the program on the stream.

        Parameters
        ----------
        key: hashable
            The identity of the graph: addresses, and sizes of symbolic dims.
        launch: callable
            Launches the program on the stream, kernel by kernel.
        check: callable
            Raises the errors of launching.
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
