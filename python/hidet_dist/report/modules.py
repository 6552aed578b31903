"""The module of each operator, derived from the names of the weights that it or its neighbours read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SEPARATOR = "."


def parent(path: str) -> str:
    """Return the path of the parent of a weight or a module: ``layers.0.fc1`` of ``layers.0.fc1.weight``."""
    return path.rpartition(SEPARATOR)[0]


def block(path: str) -> tuple[str, ...]:
    """Return the parts of a path up to its first number, such as ``("layers", "0")``; empty if it has none."""
    parts = path.split(SEPARATOR)
    return next((tuple(parts[: n + 1]) for n, part in enumerate(parts) if part.isdecimal()), ())


def common(first: str, second: str) -> str:
    """Return the deepest module that contains two paths."""
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

    An operator named after a weight is in that weight's module. Any other is between two such operators: the last one
    that it depends on and the first one that depends on it. It is in the deepest module that contains both, if they are
    in the same layer; else in the module of the one that it reads directly, or else of the one that depends on it.

    Parameters
    ----------
    inputs, outputs: sequences of names
        The tensors that each operator reads and makes, in execution order.
    weights: mapping
        The module paths of weights, as far as they have one.
    named_after: sequence
        The weight that each operator is named after; None for no weight.
    """
    count = len(inputs)
    module_of = [weights.get(name) if name is not None else None for name in named_after]
    maker = {name: number for number, names in enumerate(outputs) for name in names}
    before: list[int | None] = [None] * count  # the last operator with a module of its own that leads here
    after: list[int | None] = [None] * count
    direct: list[int | None] = [None] * count
    for number in range(count):
        makers = [maker[name] for name in inputs[number] if name in maker]
        direct[number] = max((m for m in makers if module_of[m] is not None), default=None)
        known = [m if module_of[m] is not None else before[m] for m in makers]
        before[number] = max((m for m in known if m is not None), default=None)
    for number in reversed(range(count)):
        first = number if module_of[number] is not None else after[number]
        for name in inputs[number]:
            producer = maker.get(name)
            known_after = None if producer is None else after[producer]
            if producer is not None and first is not None and (known_after is None or first < known_after):
                after[producer] = first
    result = []
    for number in range(count):
        module = module_of[number]
        if module is None:
            left, right = (None if at is None else module_of[at] for at in (before[number], after[number]))
            if left is not None and right is not None and block(left) == block(right):
                module = common(left, right)
            elif direct[number] is not None and left is not None:
                module = SEPARATOR.join(block(left)) or left
            else:
                module = right if right is not None else left
        result.append(module or "")
    return result
