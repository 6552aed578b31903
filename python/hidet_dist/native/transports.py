"""Transport tables whose functions are written in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hidet_dist.native.signatures import TransportTable

_FIELDS: dict[str, Any] = {name: kind for name, kind, *_ in TransportTable._fields_ if name != "context"}
_OPTIONAL = (
    *("copy", "read"),
    *("all_gather_blocks", "reduce_scatter_blocks", "all_to_all_blocks"),
    *("gather_rows", "reduce_scatter_rows"),
)

TRANSPORT_FUNCTIONS = tuple(name for name in _FIELDS if name not in _OPTIONAL)
"""The names of the functions that every transport has."""

TransportFunction = Callable[..., int]
"""A transport's function in Python: it takes the native arguments without the context, and returns a status code."""


def make_transport(functions: Mapping[str, TransportFunction]) -> TransportTable:
    """Make a transport for host memory from Python functions, which must not raise. A null address is ``None``.

    ``functions`` has exactly those of ``TRANSPORT_FUNCTIONS``; otherwise ``ValueError`` is raised. The native library
    copies blocks that lie side by side, and wanted rows, so that these functions see contiguous ones.
    """
    if functions.keys() != set(TRANSPORT_FUNCTIONS):
        raise ValueError(f"a transport has {', '.join(TRANSPORT_FUNCTIONS)}, not {', '.join(functions)}")
    table = TransportTable()
    for name, function in functions.items():
        setattr(table, name, _FIELDS[name](_without_context(function)))
    return table


def _without_context(function: TransportFunction) -> TransportFunction:
    return lambda _context, *arguments: function(*arguments)


def deferred_transport(make: Callable[[], TransportTable]) -> TransportTable:
    """Make a transport for host memory that forwards each call to the transport that ``make()`` returns.

    ``make`` is called in each of them; it must return the same transport each time, and must not raise.
    """

    def forward(name: str) -> TransportFunction:
        return lambda _context, *arguments: getattr(make(), name)(None, *arguments)

    table = TransportTable()
    for name in TRANSPORT_FUNCTIONS:
        setattr(table, name, _FIELDS[name](forward(name)))
    return table
