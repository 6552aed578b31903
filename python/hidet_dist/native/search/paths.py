"""Shortest paths in a graph whose edges are given on demand, found by the native solvers; see paths.h."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_double, c_int32, c_uint8
from typing import TypeAlias

from hidet_dist.native.search.library import library
from hidet_dist.native.search.signatures import PATHS

# ctypes arrays are passed as they are, at a fraction of the price of a NumPy array's pointer.
Nodes: TypeAlias = ctypes.Array[c_int32]
Flags: TypeAlias = ctypes.Array[c_uint8]

_REACHED = PATHS.constants["PATHS_REACHED"]
_NONE = PATHS.constants["PATHS_NONE"]
_NO_MEMORY = PATHS.constants["PATHS_NO_MEMORY"]


def nodes_of(numbers: Sequence[int]) -> Nodes:
    """Make the array of some nodes."""
    return (c_int32 * len(numbers))(*numbers)


def flags_of(flags: Sequence[bool]) -> Flags:
    """Make the array of some flags."""
    return (c_uint8 * len(flags))(*flags)


class NativePaths:
    """A graph whose nodes are numbers from 0, and the shortest paths from some of them."""

    def __init__(self) -> None:
        self._handle = library().hidet_dist_paths_create()
        if not self._handle:
            raise MemoryError("there is no memory for a graph of layouts")
        weakref.finalize(self, library().hidet_dist_paths_destroy, self._handle)

    def expand(self, node: int, after: Nodes, seconds: Sequence[float], communicates: Flags) -> None:
        """Give all edges of a node: where they lead, their seconds, and whether they communicate."""
        count = len(seconds)
        given = (c_double * count)(*seconds)
        _check_memory(library().hidet_dist_paths_expand(self._handle, node, count, after, given, communicates))

    def reach(self, source: int, targets: Nodes, expand: Callable[[int], None]) -> None:
        """Find the shortest paths from a node to some nodes.

        ``expand`` gives the edges of a node, by :meth:`expand`; it is called once for each node that they are needed
        of. Raises LookupError where no path leads to a target.
        """
        while (node := library().hidet_dist_paths_reach(self._handle, source, len(targets), targets)) >= 0:
            expand(node)
        if node == _NONE:
            raise LookupError(f"no path leads from node {source} to all of {list(targets)}")
        _check_memory(node)

    def seconds(self, source: int, targets: Nodes) -> list[float]:
        """Return the seconds of paths that were found."""
        result = (c_double * len(targets))()
        library().hidet_dist_paths_seconds(self._handle, source, len(targets), targets, result)
        return list(result)

    def communicating(self, source: int, targets: Nodes) -> list[int]:
        """Count the edges that communicate of paths that were found."""
        result = (c_int32 * len(targets))()
        library().hidet_dist_paths_communicating(self._handle, source, len(targets), targets, result)
        return list(result)

    def last_edge(self, source: int, target: int) -> tuple[int, int]:
        """Return the last edge of a path that was found: its first node, and its number among that node's edges."""
        edge = (c_int32 * 2)()
        library().hidet_dist_paths_last_edge(self._handle, source, target, edge)
        return edge[0], edge[1]

    @property
    def size(self) -> int:
        """The number of edges, and of nodes to which paths were found."""
        return int(library().hidet_dist_paths_size(self._handle))


def _check_memory(status: int) -> None:
    if status == _NO_MEMORY:
        raise MemoryError("the layouts of a tensor need more memory than there is")
    assert status == _REACHED
