"""Transport tables whose functions are Python's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hidet_dist.runtime.native.signatures import Transport

_FIELDS: dict[str, Any] = {name: kind for name, kind, *_ in Transport._fields_ if name != "context"}
_OPTIONAL = ("copy", "all_gather_blocks", "reduce_scatter_blocks", "all_to_all_blocks")

TRANSPORT_FUNCTIONS = tuple(name for name in _FIELDS if name not in _OPTIONAL)
"""The names of the functions that every transport has."""

TransportFunction = Callable[..., int]
"""A transport's function in Python: the native arguments without the context; it returns 0 or another number."""


def make_transport(functions: Mapping[str, TransportFunction]) -> Transport:
    """A transport for host memory made of Python functions, which must not raise. A null address is ``None``.

    ``functions`` has those of ``TRANSPORT_FUNCTIONS``; ``ValueError`` where it lacks one or has another. Blocks side by
    side are copied for it, to lie one behind the other.
    """
    if functions.keys() != set(TRANSPORT_FUNCTIONS):
        raise ValueError(f"a transport has {', '.join(TRANSPORT_FUNCTIONS)}, not {', '.join(functions)}")
    table = Transport()
    for name, function in functions.items():
        setattr(table, name, _FIELDS[name](_without_context(function)))
    return table


def _without_context(function: TransportFunction) -> TransportFunction:
    return lambda _context, *arguments: function(*arguments)


def deferred_transport(make: Callable[[], Transport]) -> Transport:
    """A transport whose functions are those of the transport that ``make()`` gives, which is called when one is.

    ``make`` must give the same one each time, and must not raise; only host memory is carried.
    """

    def forward(name: str) -> TransportFunction:
        return lambda _context, *arguments: getattr(make(), name)(None, *arguments)

    table = Transport()
    for name in TRANSPORT_FUNCTIONS:
        setattr(table, name, _FIELDS[name](forward(name)))
    return table
