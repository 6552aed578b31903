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
    count = len(inputs)
    module_of = [weights.get(name) if name is not None else None for name in named_after]
    producer_of = {name: number for number, names in enumerate(outputs) for name in names}
    # Of each operator: the nearest operators named after a weight, on which it depends and that depend on it, and the
    # last one of the former whose output it reads.
    before: list[int | None] = [None] * count
    after: list[int | None] = [None] * count
    direct: list[int | None] = [None] * count
    for number in range(count):
        producers = [producer_of[name] for name in inputs[number] if name in producer_of]
        direct[number] = max((n for n in producers if module_of[n] is not None), default=None)
        nearest = [n if module_of[n] is not None else before[n] for n in producers]
        before[number] = max((n for n in nearest if n is not None), default=None)
    for number in reversed(range(count)):
        first = number if module_of[number] is not None else after[number]
        for name in inputs[number]:
            producer = producer_of.get(name)
            known = None if producer is None else after[producer]
            if producer is not None and first is not None and (known is None or first < known):
                after[producer] = first
    result = []
    for number in range(count):
        module = module_of[number]
        if module is None:
            left, right = (None if n is None else module_of[n] for n in (before[number], after[number]))
            if left is not None and right is not None and block(left) == block(right):
                module = common(left, right)
            elif direct[number] is not None and left is not None:
                module = SEPARATOR.join(block(left)) or left
            else:
                module = right if right is not None else left
        result.append(module or "")
    return result
