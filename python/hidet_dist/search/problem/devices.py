"""Problems whose plans must fit the budgets of several devices, which hold shards of unlike sizes.

Each device has program points of its own: those of the first one, then those of the next. A tensor whose conversions
hold memory has a copy for each further device, with the same specs, that costs nothing. Where budgets differ, the
difference to the greatest one is held on the device throughout. So there is one budget, and solvers need not know.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from hidet_dist.search.problem.problem import Activations, ConvertedTensor, Edge, LiveInterval, Problem


@dataclass(frozen=True)
class DeviceMemory:
    """The budget of a device, and the memory that choices take there: the fields of :class:`Problem`."""

    budget: int
    memory: Sequence[Sequence[int]]
    activations: Activations


def on_devices(
    cost: Sequence[Sequence[float]],
    edges: Sequence[Edge],
    collectives: Sequence[Sequence[int]],
    devices: Sequence[DeviceMemory],
) -> Problem:
    """Make the problem of plans that fit all ``devices``, which have program points and tensors of the same numbers.

    Its edges begin with the given ones.
    """
    first = devices[0]
    if len(devices) == 1:
        return Problem(cost, first.memory, first.budget, edges, first.activations, collectives)
    points, tensors = first.activations.points, 1 + max((edge.tensor for edge in edges), default=0)
    budget = max(device.budget for device in devices)
    least = _least([device.memory for device in devices])
    intervals: list[LiveInterval] = []
    converted: dict[int, ConvertedTensor] = {}
    every = list(edges)
    for number, device in enumerate(devices):
        begin, end = number * points, (number + 1) * points - 1
        if device.budget < budget:
            intervals.append(LiveInterval(0, begin, end, (budget - device.budget,) * len(cost[0])))
        intervals += _beyond(device.memory, least, begin, end)
        intervals += [
            replace(one, begin=one.begin + begin, end=one.end + begin) for one in device.activations.intervals
        ]
        own = device.activations.tensors
        converted.update((number * tensors + tensor, memory) for tensor, memory in own.items())
        if number:
            every += _copies([edge for edge in edges if edge.tensor in own], number * tensors, begin)
    activations = Activations(len(devices) * points, tuple(intervals), converted)
    return Problem(cost, least, budget, every, activations, collectives)


def _least(memories: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Return the bytes that each choice of each entity takes on all devices; equal entities share their list."""
    known: dict[Hashable, list[int]] = {}
    result = []
    for own in zip(*memories, strict=True):
        key = tuple(map(id, own))
        if key not in known:
            known[key] = [min(nbytes) for nbytes in zip(*own, strict=True)]
        result.append(known[key])
    return result


def _beyond(memory: Sequence[Sequence[int]], least: list[list[int]], begin: int, end: int) -> list[LiveInterval]:
    """List what a device holds during the whole run beyond what all devices hold; equal entities share their bytes."""
    known: dict[Hashable, tuple[int, ...]] = {}
    intervals = []
    for entity, (own, common) in enumerate(zip(memory, least, strict=True)):
        key = id(own), id(common)
        if key not in known:
            known[key] = tuple(a - b for a, b in zip(own, common, strict=True))
        if any(known[key]):
            intervals.append(LiveInterval(entity, begin, end, known[key]))
    return intervals


def _copies(edges: Sequence[Edge], tensors: int, points: int) -> list[Edge]:
    """Copy edges for a device: their tensors and points are numbered behind those before, and they cost nothing."""
    free: dict[int, tuple[tuple[float, ...], ...]] = {}
    result = []
    for edge in edges:
        if id(edge.convert) not in free:
            free[id(edge.convert)] = tuple((0.0,) * len(line) for line in edge.convert)
        result.append(
            replace(
                edge,
                tensor=tensors + edge.tensor,
                convert=free[id(edge.convert)],
                begin=points + edge.begin,
                end=points + edge.end,
                collectives=(),
            )
        )
    return result
