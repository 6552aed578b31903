"""The search for the shares of a mesh's first axis on a machine of unequal devices.

Along the first axis the devices of a machine may differ. Splitting a dim evenly makes the slowest device decide; shares
in proportion to the devices' rates do not. But only dims that are multiples of the sum of the shares are split, so the
sum must suit the graph. Proposals are the shares of least estimated work on the device that takes longest; each of them
is searched like a mesh of the user's, and so is the even mesh. Where equal parts of the weights fill a device's memory,
shares in proportion to the memory of the devices are, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hidet.graph import Operator

from hidet_dist.checks import is_list, shown
from hidet_dist.cost.model import PredictedCost, compute_seconds
from hidet_dist.errors import ConfigError
from hidet_dist.machine import Cluster, Device, Link
from hidet_dist.normalize import NormalGraph
from hidet_dist.rules.rule import Rule, RuleTable
from hidet_dist.search import tuning
from hidet_dist.search.limits import Limits
from hidet_dist.search.meshes import best_search
from hidet_dist.search.request import FamilyMember, SearchRequest
from hidet_dist.search.result import SearchResult
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.extents import extents_of
from hidet_dist.symbolic.planning import given_operator, planning_view, rule_table
from hidet_dist.view import GraphView

AUTO = "auto"
"""The value of ``shares`` for which shares are searched."""

_NO_LINK = Link(0.0, 1.0)  # of a mesh of one device, over which nothing is sent


def parse_shares(given: Any, mesh: DeviceMesh, what: str) -> tuple[tuple[int, ...], ...]:
    """Parse the shares of mesh axes by name; empty without any. Raises ConfigError for anything else."""
    if given is None:
        return ()
    if not isinstance(given, Mapping) or not all(is_list(of_axis) for of_axis in given.values()):
        raise ConfigError(
            f"{what} must map names of mesh axes to lists of whole numbers, such as {{'gpu': [11, 5]}}, or be "
            f"{AUTO!r}; got {shown(given)}."
        )
    for name in given:
        if name not in mesh.axis_names:
            raise ConfigError(f"{what} has the axis {shown(name)}; the mesh has the axes {', '.join(mesh.axis_names)}.")
    return tuple(tuple(given.get(name, ())) for name in mesh.axis_names)


def best_of_shares(
    request: SearchRequest, limits: Limits, search_on: Callable[[SearchRequest, Limits], SearchResult]
) -> SearchResult:
    """Search on the even mesh and on those with proposed shares of its first axis, and return the best result.

    Each search has an equal part of the limits. Within the gap the even mesh wins. Raises as
    :func:`hidet_dist.search.meshes.best_search` does, and ConfigError for given costs, which are of one mesh.
    """
    if request.cost_model is not None:
        raise ConfigError("A search for shares has the predicted costs: leave out cost_model, or give the shares.")
    proposed = proposed_meshes(request.members, request.cluster, request.rules, request.options.mem_budget)
    every = [request, *(request.on(replace(request.cluster, mesh=mesh)) for mesh in proposed)]
    searches = [(1 / (len(every) - number), functools.partial(search_on, one)) for number, one in enumerate(every)]
    return best_search(searches, limits, request.options.solver_gap)


def proposed_meshes(
    graphs: Sequence[FamilyMember], cluster: Cluster, rules: RuleTable | None = None, mem_budget: int | None = None
) -> list[DeviceMesh]:
    """Propose meshes with shares of the first axis in proportion to the rates of its devices, the best estimates first.

    The last one may be in proportion to their memory, unless all have the budget that is given. None are proposed for
    equal devices, or for one device along the axis. Graphs share their weights.
    """
    mesh = cluster.mesh
    devices = [group.device for group in cluster.groups for _ in range(group.count)]
    if len(devices) != mesh.shape[0] or mesh.is_uneven():
        return []
    others = ((),) * (mesh.ndim - 1)
    each = mesh.size // mesh.shape[0]
    memory = [nbytes * each for nbytes in cluster.memory_bytes] if mem_budget is None else None
    return [
        DeviceMesh(mesh.shape, mesh.axis_names, (shares, *others))
        for shares in proposed_shares(graphs, devices, rules, memory)
    ]


def proposed_shares(
    graphs: Sequence[FamilyMember],
    devices: Sequence[Device],
    rules: RuleTable | None = None,
    memory: Sequence[int] | None = None,
) -> list[tuple[int, ...]]:
    """Propose shares in proportion to the rates of devices, the best estimates first; none for equal devices.

    Behind them may be the best of those that divide the batch, dim 0 of the first input. Estimates leave out what is
    sent, and where a graph is split along its batch, that is little. Symbolic dims are not split. The last one is in
    proportion to ``memory``, in bytes along the axis, if equal parts of the weights do not fit it.
    """
    if all(device == devices[0] for device in devices):
        return []
    mesh = DeviceMesh((1,))
    views = [planning_view(one.graph, one.symbols or {}, mesh) for one in graphs]
    tables = [rule_table(view, mesh, rules) for view in views]
    weighted = list(zip(views, tables, (one.frequency for one in graphs), strict=True))
    rates = [
        1 / math.fsum(weight * _seconds(view, table, device) for view, table, weight in weighted) for device in devices
    ]
    # The work of operators, by the extents of the factors that may be split.
    work = [
        (weight * rule.definition.operations({}), _fixed_factors(rule, given_operator(view, number)))
        for view, table, weight in weighted
        for number, rule in enumerate(map(table.rule, view.operators))
        if rule.definition is not None
    ]
    total = sum(operations for operations, _ in work) or 1

    def estimate(shares: Sequence[int]) -> float:
        """Estimate the mean seconds of a unit of work; operators without a factor to split run on every device."""
        parts = sum(shares)
        split = sum(operations for operations, extents in work if any(extent % parts == 0 for extent in extents))
        longest = max(share / parts / rate for share, rate in zip(shares, rates, strict=True))
        return (split * longest + (total - split) / min(rates)) / total

    better = _better_than_even(rates, estimate)
    batch = _batch(graphs[0].graph)
    proposals = better[: tuning.PROPOSALS]
    if not any(batch % sum(shares) == 0 for shares in proposals):
        proposals += [shares for shares in better if batch % sum(shares) == 0][:1]
    if memory is not None:
        fitting = _shares_of_memory(views, memory, estimate)
        proposals += [shares for shares in fitting if shares not in proposals]
    return proposals


def _better_than_even(rates: Sequence[float], estimate: Callable[[Sequence[int]], float]) -> list[tuple[int, ...]]:
    """List shares in proportion to rates whose estimates are below that of equal ones, the best first."""
    estimates: dict[tuple[int, ...], float] = {}
    for parts in range(len(rates) + 1, tuning.MOST_PARTS + 1):
        shares = proportional(rates, parts)
        if math.gcd(*shares) == 1 and len(set(shares)) > 1:
            estimates[shares] = estimate(shares)
    even = estimate((1,) * len(rates))
    return [
        shares for _, shares in sorted((seconds, shares) for shares, seconds in estimates.items() if seconds < even)
    ]


def _batch(graph: NormalGraph) -> int:
    """Return the extent of dim 0 of the first input; 1 if there is none, or none that is a number."""
    extents = extents_of(graph.inputs[0]) if graph.inputs else ()
    return extents[0] if extents and isinstance(extents[0], int) else 1


def _shares_of_memory(
    views: Sequence[GraphView], memory: Sequence[int], estimate: Callable[[Sequence[int]], float]
) -> list[tuple[int, ...]]:
    """Select shares in proportion to memory with which weights fit it, of the least estimate; none where even ones do.

    If weights do not fit with any, it is those with which the fullest device has least too much.
    """
    # Graphs share their weights: those of the one that has most are nearly all.
    view = max(views, key=lambda one: sum(map(one.nbytes, one.weights)))
    weights = [(view.nbytes(name), view.shape(name)) for name in view.weights]

    def filled(shares: Sequence[int]) -> float:
        """Compute the fraction of the fullest device's memory that weights fill; those that are not split fill each."""
        parts = sum(shares)
        split = sum(nbytes for nbytes, shape in weights if any(extent % parts == 0 for extent in shape))
        whole = sum(nbytes for nbytes, _ in weights) - split
        fullest = max((split * share / parts + whole) / own for share, own in zip(shares, memory, strict=True))
        return max(fullest, tuning.WEIGHTS_FRACTION)

    even = (1,) * len(memory)
    every = [proportional(memory, parts) for parts in range(len(memory) + 1, tuning.MOST_PARTS + 1)]
    unlike = [shares for shares in every if math.gcd(*shares) == 1 and len(set(shares)) > 1]
    if filled(even) <= tuning.WEIGHTS_FRACTION or not unlike:
        return []
    best = min(unlike, key=lambda shares: (filled(shares), estimate(shares)))
    return [best] if filled(best) < filled(even) else []


def _fixed_factors(rule: Rule, op: Operator) -> set[int]:
    """Return the extents of the factors that index no symbolic dim of the given operator ``op``."""
    tensors = zip((*rule.in_layouts, *rule.out_layouts), (*op.inputs, *op.outputs), strict=True)
    symbolic = {
        digit
        for layout, x in tensors
        for digits, extent in zip(layout, extents_of(x), strict=True)
        if not isinstance(extent, int)
        for digit in digits or ()
    }
    return {factor.extent for factor in rule.factors if factor not in symbolic}


def proportional(rates: Sequence[float], parts: int) -> tuple[int, ...]:
    """Divide whole parts in proportion to rates, at least one each, so that the longest time is least.

    Each part goes to the device that has the least time with it (the divisor method of Jefferson, or D'Hondt).
    """
    shares = [1] * len(rates)
    for _ in range(parts - len(rates)):
        number = min(range(len(rates)), key=lambda device: ((shares[device] + 1) / rates[device], device))
        shares[number] += 1
    return tuple(shares)


def _seconds(view: GraphView, table: RuleTable, device: Device) -> float:
    """Predict the seconds of all operators on one device, without launches, which are not divided."""
    model = PredictedCost(Cluster(table.mesh, (_NO_LINK,), replace(device, launch_seconds=0.0)))
    seconds = 0.0
    for number, op in enumerate(view.operators):
        seconds += compute_seconds(model, view, number, table(op)[1][0], None, table.mesh)
    return seconds or math.inf
