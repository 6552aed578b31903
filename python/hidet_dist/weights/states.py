"""States: tensors that calls of a graph read and write, and that outlive a call.

In a graph, a state is a symbolic tensor, its *old value*, like a weight by name. Operators with the trait ``updates``
compute its *new value* from it; the new value is among the graph's outputs. The middle of the graph is functional. Only
the ends are one memory: a program writes the new value where the old one is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import hidet
import torch
from hidet.graph import Operator, Tensor

from hidet_dist.errors import ConfigError
from hidet_dist.traits import traits_of
from hidet_dist.weights.named import InMemory

_MARK = "_hidet_dist_state"


@dataclass(frozen=True, eq=False)
class StateMark:
    """The mark of a state: its name, and its values before the first call; zeros if there are none."""

    name: str
    initial: torch.Tensor | None = None


def state(name: str, shape: Sequence[int], dtype: str = "float32", device: str = "cpu") -> Tensor:
    """Make a state: a tensor that is kept from call to call, and takes no memory while it is planned.

    The result is the value that a call finds. Use it in a graph like any tensor; it is not among the inputs of
    ``hidet.trace_from``. ``write_rows``, ``replace_state`` and ``shift_state`` make its new value, which must be among
    the outputs of ``hidet.trace_from``; it is no result of a call. A state without a new value is only read. Before the
    first call, a state is zero.

    Parameters
    ----------
    name: str
        Its name. Graphs of a family share the states of one name.
    shape: sequence of int
        Its shape, in elements.
    dtype: str
        hidet's name of its dtype.
    device: str
        The device of the graph.

    Raises
    ------
    ConfigError
        When the name is empty, the shape has anything but positive whole numbers, or hidet has no such dtype.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"A state's name must be a text that is not empty; got {name!r}.")
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in shape):
        raise ConfigError(f"The state {name!r} must have a shape of positive whole numbers; got {list(shape)}.")
    try:
        tensor = hidet.symbol(list(shape), dtype, device)
    except ValueError as error:
        raise ConfigError(f"The state {name!r} cannot have the dtype {dtype!r}: {error}") from error
    return _marked(tensor, StateMark(name))


def held_state(name: str, initial: torch.Tensor) -> Tensor:
    """Make a state with values before the first call, which stay in memory until the artifacts are written.

    Raises
    ------
    ConfigError
        As :func:`state`.
    """
    tensor = state(name, list(initial.shape), str(initial.dtype).removeprefix("torch."))
    return _marked(tensor, StateMark(name, initial.detach()))


def state_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Mark a symbolic tensor as the state that ``like`` is; return the tensor."""
    mark = state_mark_of(like)
    assert mark is not None
    return _marked(tensor, mark)


def is_state(tensor: Tensor) -> bool:
    """Whether a tensor is a state's old value."""
    return state_mark_of(tensor) is not None


def state_mark_of(tensor: Tensor) -> StateMark | None:
    """Return the mark of a state; None for any other tensor."""
    mark: StateMark | None = getattr(tensor, _MARK, None)
    return mark


def initial_of(tensor: Tensor) -> InMemory | None:
    """Return the values of a state before the first call; None if they are zeros."""
    mark = state_mark_of(tensor)
    return None if mark is None or mark.initial is None else InMemory(mark.initial)


def same_initial(a: Tensor, b: Tensor) -> bool:
    """Whether two states of one shape and dtype have the same values before the first call."""
    x, y = (None if given is None else given.data for given in (initial_of(a), initial_of(b)))
    if x is None or y is None:
        return all(given is None or not bool(given.any()) for given in (x, y))
    return x is y or torch.equal(x, y)


def is_value_of_state(tensor: Tensor) -> bool:
    """Whether a tensor is a state's old value, or what updates made of it."""
    return is_state(tensor) or updated_state(tensor) is not None


def updates_of(tensor: Tensor) -> list[Operator]:
    """List the updates that make a tensor from a state's old value, first to last; none for any other tensor."""
    chain: list[Operator] = []
    while tensor.op is not None and traits_of(tensor.op).updates is not None:
        chain.append(tensor.op)
        tensor = tensor.op.inputs[0]
    return chain[::-1] if is_state(tensor) else []


def updated_state(tensor: Tensor) -> Tensor | None:
    """Return the state whose new value a tensor is; None for any other tensor."""
    chain = updates_of(tensor)
    return chain[0].inputs[0] if chain else None


def new_values(outputs: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Map the states that a graph with these outputs updates to their new values.

    Raises
    ------
    ConfigError
        When a state has two new values.
    """
    new: dict[Tensor, Tensor] = {}
    for y in outputs:
        old = updated_state(y)
        if old is None:
            continue
        if new.setdefault(old, y) is not y:
            mark = state_mark_of(old)
            assert mark is not None
            raise ConfigError(
                f"The state {mark.name!r} has two new values among the outputs of the graph: let each update start "
                "from the result of the one before, and give the last result alone."
            )
    return new


def _marked(tensor: Tensor, mark: StateMark) -> Tensor:
    setattr(tensor, _MARK, mark)
    return tensor
