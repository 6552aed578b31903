"""Families of layers, and the layers whose plans differ from most of their family."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hidet_dist.report.data import ACTIVATION, Communication, LayerFamily, Operator, Tensor, Variant
from hidet_dist.report.modules import SEPARATOR

_MOST_OPERATORS = 3  # differences of operators that are listed one by one


@dataclass
class _Member:
    """The plan of one layer, with names relative to the layer."""

    weights: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    operators: list[tuple[str, str]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    collectives: Counter[str] = field(default_factory=Counter)

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for layers with equal plans."""
        return (
            tuple(sorted(self.weights.items())),
            tuple(self.operators),
            tuple(sorted(self.collectives.items())),
        )


def families(
    tensors: Sequence[Tensor], operators: Sequence[Operator], communications: Sequence[Communication]
) -> tuple[LayerFamily, ...]:
    """Group modules whose paths differ only in a number, and find those whose plans differ from most."""
    members: dict[str, dict[int, _Member]] = defaultdict(lambda: defaultdict(_Member))
    for tensor in tensors:
        if tensor.kind != ACTIVATION and tensor.label:
            for prefix, number, rest in _splits(tensor.label):
                if rest:
                    members[prefix][number].weights[rest] = tensor.spec, tensor.shape
    for operator in operators:
        for prefix, number, _ in _splits(operator.module):
            member = members[prefix][number]
            member.operators.append((operator.kind, operator.spec))
            member.numbers.append(operator.index)
    for communication in communications:
        for prefix, number, _ in _splits(communication.module):
            members[prefix][number].collectives[communication.step] += 1
    return tuple(_family(prefix, dict(member)) for prefix, member in sorted(members.items()) if len(member) > 1)


def _splits(path: str) -> Iterator[tuple[str, int, str]]:
    """Yield each number in a path, with the path before and after it."""
    parts = path.split(SEPARATOR)
    for n, part in enumerate(parts):
        if n and part.isdecimal() and len(part) < 7:
            yield SEPARATOR.join(parts[:n]), int(part), SEPARATOR.join(parts[n + 1 :])


def _family(prefix: str, members: dict[int, _Member]) -> LayerFamily:
    """Group the layers of a family by their plans; of groups of equal size, the usual one has the middle layer."""
    numbers = sorted(members)
    middle = numbers[len(numbers) // 2]
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number in numbers:
        alike[members[number].key].append(number)
    usual = max(alike.values(), key=lambda group: (len(group), middle in group))
    representative = members[usual[len(usual) // 2]]
    variants = tuple(
        Variant(tuple(group), tuple(_differences(members[group[0]], representative)))
        for group in alike.values()
        if group is not usual
    )
    return LayerFamily(prefix, tuple(numbers), tuple(usual), variants)


def _differences(layer: _Member, usual: _Member) -> Iterator[str]:
    """Describe the differences of a layer's plan from the usual one."""
    for name in [*usual.weights, *(name for name in layer.weights if name not in usual.weights)]:
        if name not in layer.weights:
            yield f"has no {name}"
        elif name not in usual.weights:
            yield f"has {name}, {layer.weights[name][0]}, which the others lack"
        else:
            (spec, shape), (usual_spec, usual_shape) = layer.weights[name], usual.weights[name]
            if shape != usual_shape:
                yield f"{name} has the shape {list(shape)}, not {list(usual_shape)}"
            if spec != usual_spec:
                yield f"{name} is {spec}, not {usual_spec}"
    for step in sorted({*layer.collectives, *usual.collectives}):
        excess = layer.collectives[step] - usual.collectives[step]
        if excess:
            yield f"{abs(excess)} {step} {'more' if excess > 0 else 'fewer'}"
    if [kind for kind, _ in layer.operators] == [kind for kind, _ in usual.operators]:
        others = [
            f"{kind} {number} is {spec}, not {usual_spec}"
            for number, (kind, spec), (_, usual_spec) in zip(
                layer.numbers, layer.operators, usual.operators, strict=True
            )
            if spec != usual_spec
        ]
        yield from others[:_MOST_OPERATORS]
        if len(others) > _MOST_OPERATORS:
            yield f"{len(others) - _MOST_OPERATORS} more operators have other specs"
    elif len(layer.operators) != len(usual.operators):
        yield f"has {len(layer.operators)} operators, not {len(usual.operators)}"
    else:
        yield "has other operators"
