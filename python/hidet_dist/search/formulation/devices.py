"""The devices whose memory limits plans: where parts are unequal, they hold shards of unlike sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hidet_dist.errors import InfeasibleError
from hidet_dist.machine import Cluster
from hidet_dist.search import tuning
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.spec import DeviceMesh, StagePlan
from hidet_dist.view import GraphView


@dataclass(frozen=True)
class DeviceBudget:
    """The bytes that the device at a coordinate may hold; without one, a device whose shards are the largest ones."""

    coordinate: tuple[int, ...] | None
    nbytes: int

    def __str__(self) -> str:
        return "a device" if self.coordinate is None else f"on the device at {self.coordinate}"


@dataclass(frozen=True)
class DeviceHeld:
    """The peak bytes that a device holds during each operator of a plan, and for the graph outputs, and its budget."""

    device: DeviceBudget
    live_bytes: list[int]

    @property
    def most(self) -> int:
        """The most bytes that the device holds."""
        return max(self.live_bytes)

    @property
    def excess(self) -> int:
        """The bytes beyond the budget; below 0 if the plan fits."""
        return self.most - self.device.nbytes

    def __str__(self) -> str:
        return f"{self.most} bytes {self.device}"


def device_budgets(cluster: Cluster, mem_budget: int | None) -> tuple[int, ...]:
    """List the bytes that the devices at each coordinate of the first mesh axis may hold.

    They are the given ones on all devices, or the memory of each.
    """
    return cluster.memory_bytes if mem_budget is None else (mem_budget,) * cluster.mesh.shape[0]


def memory_budget(cluster: Cluster, mem_budget: int | None) -> int:
    """Return the bytes that each device may hold, the one of least memory included."""
    return min(device_budgets(cluster, mem_budget))


def with_budget(cluster: Cluster, mem_budget: int | None, nbytes: int) -> tuple[Cluster, int | None]:
    """Return the machine and the given budget, changed so that the device of the least budget may hold ``nbytes``.

    The budgets of all devices change by as many bytes.
    """
    if mem_budget is None and len(set(cluster.memory_bytes)) > 1:
        return cluster.with_memory(nbytes), None
    return cluster, nbytes


def limiting_devices(
    cluster: Cluster, mem_budget: int | None, parts: Iterable[tuple[int, tuple[int, ...]]]
) -> tuple[DeviceBudget, ...]:
    """Select the devices whose budgets limit plans: a plan that fits them fits all.

    A device that has no greater part than another one, in none of the mesh's shares and of the ``parts`` by axis, and
    no smaller budget, holds what the other one may hold at most. So there is one device unless parts are unequal, and
    often even then. Of very many, one takes the place: with the largest shards, and the least budget.
    """
    return _limiting(device_budgets(cluster, mem_budget), _lists(cluster.mesh, parts))


def _limiting(budgets: Sequence[int], of_axes: list[list[tuple[int, ...]]]) -> tuple[DeviceBudget, ...]:
    of_axes[0].append(tuple(-nbytes for nbytes in budgets))
    fullest = [_greatest(list(zip(*lists, strict=True))) for lists in of_axes]
    coordinates = list(itertools.islice(itertools.product(*fullest), tuning.MOST_LIMITING_DEVICES + 1))
    if len(coordinates) == 1 or len(coordinates) > tuning.MOST_LIMITING_DEVICES:
        return (DeviceBudget(None, min(budgets)),)
    return tuple(DeviceBudget(coordinate, budgets[coordinate[0]]) for coordinate in coordinates)


def _greatest(values: list[tuple[int, ...]]) -> list[int]:
    """Return the positions of values of which no other one is as great in all, the first of equal ones."""
    return [
        here
        for here, own in enumerate(values)
        if not any(
            all(a >= b for a, b in zip(other, own, strict=True)) and (other != own or there < here)
            for there, other in enumerate(values)
            if there != here
        )
    ]


def for_the_least(error: InfeasibleError, budgets: Sequence[int]) -> InfeasibleError:
    """Say of a refusal of the greatest of unlike budgets what it is for the device of the least one.

    Its budget, and all others by as many bytes, would have to be greater.
    """
    more = max(budgets) - min(budgets)
    if not more:
        return error
    unlike = " and ".join(map(str, sorted(set(budgets))))
    return InfeasibleError(
        f"No plan fits the devices' budgets of {unlike} bytes. Give each of them "
        f"{error.least_budget - max(budgets)} bytes more, or give more devices.",
        error.least_budget - more,
        error.bound_bytes - more,
    )


def held_by_fullest(view: GraphView, stage: StagePlan, cluster: Cluster, mem_budget: int | None) -> DeviceHeld:
    """Compute what a plan holds on the device that exceeds its budget most, or has the least room left.

    Raises SpecError for a spec that does not fit the graph.
    """
    places = cluster.device.places_shards
    devices = limiting_devices_of(stage, cluster, mem_budget)
    return max(
        (DeviceHeld(device, live_bytes(view, stage, places, device.coordinate)) for device in devices),
        key=lambda held: held.excess,
    )


def held_by_ranks(view: GraphView, stage: StagePlan, cluster: Cluster, mem_budget: int | None) -> list[DeviceHeld]:
    """Compute what a plan holds on the device of each rank. Raises SpecError for a spec that does not fit the graph."""
    budgets, places = device_budgets(cluster, mem_budget), cluster.device.places_shards
    parts = _parts_of(stage)
    known: dict[tuple[tuple[int, ...], ...], list[int]] = {}  # by the parts of the device: equal ones hold the same
    held = []
    for rank in range(stage.mesh.size):
        at = stage.mesh.coordinate(rank)
        own = tuple(tuple(of_axis[c] for of_axis in lists) for c, lists in zip(at, parts, strict=True))
        if own not in known:
            known[own] = live_bytes(view, stage, places, at)
        held.append(DeviceHeld(DeviceBudget(at, budgets[at[0]]), known[own]))
    return held


def _parts_of(stage: StagePlan) -> list[list[tuple[int, ...]]]:
    """List the parts of each mesh axis that specs of a plan have, and the mesh's shares."""
    specs = {tensor.spec for tensor in (*stage.stored, *stage.outputs)}
    specs.update(spec for op in stage.operators for spec in (*op.spec.in_specs, *op.spec.out_specs))
    return _lists(stage.mesh, sorted({pair for spec in specs for pair in spec.parts}))


def _lists(mesh: DeviceMesh, parts: Iterable[tuple[int, tuple[int, ...]]]) -> list[list[tuple[int, ...]]]:
    """List the parts of each mesh axis: its shares, and those of ``parts``."""
    of_axes: list[list[tuple[int, ...]]] = [[mesh.shares_of(axis)] for axis in range(mesh.ndim)]
    for axis, of_axis in parts:
        of_axes[axis].append(of_axis)
    return of_axes


def limiting_devices_of(stage: StagePlan, cluster: Cluster, mem_budget: int | None) -> tuple[DeviceBudget, ...]:
    """Select the devices whose budgets limit a plan that is made, as :func:`limiting_devices` does."""
    return _limiting(device_budgets(cluster, mem_budget), _parts_of(stage))
