"""Transport tables whose functions are Python's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hidet_dist.runtime.native.codes import FAILED, OK
from hidet_dist.runtime.native.signatures import Transport

_FIELDS: dict[str, Any] = dict(Transport._fields_)
_OPTIONAL = ("copy", "all_gather_blocks", "reduce_scatter_blocks", "all_to_all_blocks")

TransportFunction = Callable[..., int]
"""A transport's function in Python: the native arguments without the context; it returns 0 or another number."""


def make_transport(
    all_reduce: TransportFunction,
    all_gather: TransportFunction,
    reduce_scatter: TransportFunction,
    all_to_all: TransportFunction,
    broadcast: TransportFunction,
    send_recv: TransportFunction,
) -> Transport:
    """A transport for host memory made of Python functions, which must not raise. A null address is ``None``.

    Blocks side by side are copied for it, to lie one behind the other.
    """
    functions = {
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
        "broadcast": broadcast,
        "send_recv": send_recv,
    }
    table = Transport()
    for name, function in functions.items():
        setattr(table, name, _FIELDS[name](_without_context(function)))
    return table


def _without_context(function: TransportFunction) -> TransportFunction:
    return lambda _context, *arguments: function(*arguments)


def answer(
    run: Callable[[], None],
    fail: Callable[[str], None],
    blame_peer: Callable[[], None],
    interrupt: Callable[[BaseException], None],
) -> int:
    """Run something that native code waits for: nothing may be raised there, so that it is recorded.

    Of what is raised, ``fail`` is told the message. A ``RuntimeError`` is another rank's doing (``blame_peer``);
    ``interrupt`` gets what is no failure, such as KeyboardInterrupt.
    """
    try:
        run()
    except RuntimeError as error:
        blame_peer()
        fail(str(error))
        return FAILED
    except BaseException as error:
        if not isinstance(error, Exception):
            interrupt(error)
        fail(f"{type(error).__name__}: {error}")
        return FAILED
    return OK


def deferred_transport(make: Callable[[], Transport]) -> Transport:
    """A transport whose functions are those of the transport that ``make()`` gives, which is called when one is.

    ``make`` must give the same one each time, and must not raise; only host memory is carried.
    """

    def forward(name: str) -> TransportFunction:
        return lambda _context, *arguments: getattr(make(), name)(None, *arguments)

    table = Transport()
    for name, kind in _FIELDS.items():
        if name not in ("context", *_OPTIONAL):
            setattr(table, name, kind(forward(name)))
    return table
