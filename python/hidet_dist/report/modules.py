"""Assignment of operators to modules, by the names of the weights that they or their neighbours read."""

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

    An operator named after a weight is in that weight's module. Any other operator lies between two such operators:
    the last one that it depends on, and the first one that depends on it. If both are in the same layer, the operator
    is in the deepest module that contains both. Otherwise it is in the layer of the first one if it reads that one's
    output directly, else in the module of the second one.

    Parameters
    ----------
    inputs, outputs: sequences of names
        The tensors that each operator reads and computes, in execution order.
    weights: mapping
        The module path of each weight that has one, by name.
    named_after: sequence
        The weight that each operator is named after; None for no weight.
    """
    module_of = [weights.get(name) if name is not None else None for name in named_after]
    producer_of = {name: number for number, names in enumerate(outputs) for name in names}
    producers = [[producer_of[name] for name in names if name in producer_of] for names in inputs]
    before, after = _nearest_before(producers, module_of), _nearest_after(producers, module_of)
    result = []
    for number, own in enumerate(module_of):
        module = own
        if module is None:
            left, right = (None if n is None else module_of[n] for n in (before[number], after[number]))
            if left is not None and right is not None and block(left) == block(right):
                module = common(left, right)
            elif left is not None and any(module_of[n] is not None for n in producers[number]):
                module = SEPARATOR.join(block(left)) or left
            else:
                module = right if right is not None else left
        result.append(module or "")
    return result


def _nearest_before(producers: Sequence[Sequence[int]], module_of: Sequence[str | None]) -> list[int | None]:
    """Find the last operator with a module on which each one depends; ``producers`` are those that it reads."""
    before: list[int | None] = []
    for read in producers:
        nearest = [n if module_of[n] is not None else before[n] for n in read]
        before.append(max((n for n in nearest if n is not None), default=None))
    return before


def _nearest_after(producers: Sequence[Sequence[int]], module_of: Sequence[str | None]) -> list[int | None]:
    """Find the first operator with a module that depends on each one."""
    after: list[int | None] = [None] * len(producers)
    for number in reversed(range(len(producers))):
        first = number if module_of[number] is not None else after[number]
        if first is None:
            continue
        for producer in producers[number]:
            known = after[producer]
            if known is None or first < known:
                after[producer] = first
    return after
