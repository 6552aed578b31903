"""The module that each operator belongs to, from the names of the weights that it reads or lies between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SEPARATOR = "."


def parent(path: str) -> str:
    """The path of the module that a weight, or a module, is in: ``layers.0.fc1`` of ``layers.0.fc1.weight``."""
    return path.rpartition(SEPARATOR)[0]


def block(path: str) -> tuple[str, ...]:
    """The parts of a path up to its first number, such as ``("layers", "0")``; nothing where it has none."""
    parts = path.split(SEPARATOR)
    return next((tuple(parts[: n + 1]) for n, part in enumerate(parts) if part.isdecimal()), ())


def common(first: str, second: str) -> str:
    """The deepest module that two paths share."""
    shared = []
    for one, other in zip(first.split(SEPARATOR), second.split(SEPARATOR), strict=False):
        if one != other:
            break
        shared.append(one)
    return SEPARATOR.join(shared)


def operator_modules(
    inputs: Sequence[Sequence[str]],
    outputs: Sequence[Sequence[str]],
    weights: Mapping[str, str],
    named_after: Sequence[str | None],
) -> list[str]:
    """Find the module path of each operator.

    An operator named after a weight is in that weight's module. Any other lies between operators that are: the last one
    that it depends on and the first one that depends on it. It is in the deepest module that has both, if they are in
    the same layer; else with the one that it reads directly, or else with the one that it leads to.

    Parameters
    ----------
    inputs, outputs: sequences of names
        The tensors that each operator reads and makes, in execution order.
    weights: mapping
        The module path of each weight that has one.
    named_after: sequence
        The weight that each operator is named after, None where it is named after none.
    """
    count = len(inputs)
    own = [weights.get(name) if name is not None else None for name in named_after]
    maker = {name: number for number, names in enumerate(outputs) for name in names}
    before: list[int | None] = [None] * count  # the last operator with a module of its own that leads here
    after: list[int | None] = [None] * count
    direct: list[int | None] = [None] * count
    for number in range(count):
        makers = [maker[name] for name in inputs[number] if name in maker]
        direct[number] = max((m for m in makers if own[m] is not None), default=None)
        known = [m if own[m] is not None else before[m] for m in makers]
        before[number] = max((m for m in known if m is not None), default=None)
    for number in reversed(range(count)):
        first = number if own[number] is not None else after[number]
        for name in inputs[number]:
            made = maker.get(name)
            known_after = None if made is None else after[made]
            if made is not None and first is not None and (known_after is None or first < known_after):
                after[made] = first
    result = []
    for number in range(count):
        mine = own[number]
        if mine is None:
            left, right = (None if at is None else own[at] for at in (before[number], after[number]))
            if left is not None and right is not None and block(left) == block(right):
                mine = common(left, right)
            elif direct[number] is not None and left is not None:
                mine = SEPARATOR.join(block(left)) or left
            else:
                mine = right if right is not None else left
        result.append(mine or "")
    return result
