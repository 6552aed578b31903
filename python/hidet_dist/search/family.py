"""One layout of the weights for several graphs that share them: prefill and decode, or inputs of several lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import hidet

from hidet_dist.cost.model import CostModel, PredictedCost
from hidet_dist.errors import ConfigError, InfeasibleError, SolverError
from hidet_dist.machine import Cluster
from hidet_dist.normalize import NormalGraph
from hidet_dist.search.formulation import Formulation, formulate
from hidet_dist.search.labels import label_stage, parse_names, tensor_labels
from hidet_dist.search.optimum import optimize
from hidet_dist.search.options import SearchOptions, SolveOptions
from hidet_dist.search.pins import Pins, parse_pins
from hidet_dist.search.planner import collector_paused, limits_as_errors, memory_budget, warn_of_limit
from hidet_dist.search.problem import (
    Activations,
    ConvertedTensor,
    Edge,
    LiveInterval,
    Problem,
    Solution,
    restricted,
)
from hidet_dist.search.solution import write_stage
from hidet_dist.spec import Plan, TensorShardSpec
from hidet_dist.symbolic.planning import check_specs, planning_view
from hidet_dist.view import GraphView, graph_symbols

Specs = Sequence[TensorShardSpec | None] | None


@dataclass(frozen=True)
class Family:
    """Plans of several graphs in which shared weights have the same specs.

    ``seconds`` is the weighted sum of the plans' times; no plans with shared weights have a sum below
    ``bound_seconds``; ``gap`` is relative to ``seconds``. ``param_specs`` are the layouts of all weights, by the user's
    names or else by graph and weight (``0:w3``). ``time_limit_reached`` is whether the time limit cut the search short.
    """

    plans: tuple[Plan, ...]
    seconds: float
    gap: float
    bound_seconds: float
    param_specs: dict[str, TensorShardSpec]
    time_limit_reached: bool = False


def search_family(
    graphs: Sequence[NormalGraph],
    cluster: Cluster,
    weights: Sequence[float] | None = None,
    options: SearchOptions | None = None,
    *,
    names: Sequence[Any] | Any = None,
    pins: Sequence[Mapping[str, Any] | None] | None = None,
    input_specs: Sequence[Specs] | None = None,
    output_specs: Sequence[Specs] | None = None,
    cost_model: CostModel | None = None,
    **changes: Any,
) -> Family:
    """Find the layout of shared weights, and a plan for each graph, of least weighted sum of predicted times.

    Weights are shared where graphs have the same tensor, or tensors of the same name in ``names``. They are held once.

    Parameters
    ----------
    graphs: sequence of NormalGraph
        The graphs in normal form.
    cluster: Cluster
        The machine, with the mesh to plan for.
    weights: sequence of float, optional
        How much a run of each graph counts, above 0; 1 each when not given.
    options: SearchOptions, optional
        As for :func:`hidet_dist.search.search`; ``mem_budget`` is for the weights of all graphs together. Names, pins
        and specs are given for each graph instead.
    names: Module, mapping of names to tensors, or a sequence of these, one a graph; optional
        What the user calls tensors; one for all graphs is right where they are of one module.
    pins, input_specs, output_specs: sequences, optional
        As for :func:`hidet_dist.search.search`, one a graph. A pin of a shared weight holds for all graphs.
    cost_model: CostModel, optional
        The cost of the parts of a plan; predicted for the cluster when not given.
    changes:
        Fields of the options, by name, that differ from ``options``.

    Raises
    ------
    ConfigError
        When the arguments do not fit the graphs, or weights of one name differ in shape or dtype.
    InfeasibleError
        When no plans fit the budget.
    SolverError
        When nothing was found in time.

    Warns
    -----
    SearchLimitWarning
        When the plans are the best that were known when the time limit was reached.
    """
    options = SearchOptions.of(options, changes)
    for key in ("names", "pins", "input_specs", "output_specs"):
        if getattr(options, key) is not None:
            raise ConfigError(f"search_family takes {key} for each graph, as an argument; the options have some.")
    limits = options.limits()
    count = len(graphs)
    if not count:
        raise ConfigError("search_family needs at least one graph.")
    frequencies = [1.0] * count if weights is None else list(map(float, weights))
    if len(frequencies) != count or not all(f > 0 and math.isfinite(f) for f in frequencies):
        raise ConfigError(f"weights must have a number above 0 for each of the {count} graphs; got {weights!r}.")
    budget = memory_budget(cluster, options.mem_budget)
    model = PredictedCost(cluster) if cost_model is None else cost_model
    named = [parse_names(one) for one in _each("names", names, count)]
    pins_of, ins, outs = (
        _each(what, given, count)
        for what, given in (("pins", pins), ("input_specs", input_specs), ("output_specs", output_specs))
    )
    declared = options.symbols or {}
    views = [
        planning_view(graph, {name: declared[name] for name in graph_symbols(graph) if name in declared}, cluster.mesh)
        for graph in graphs
    ]
    for view, i, o in zip(views, ins, outs, strict=True):
        check_specs(view, cluster.mesh, "input", view.inputs, i)
        check_specs(view, cluster.mesh, "output", view.outputs, o)
    pinned = [
        Pins(view, cluster.mesh, parse_pins(given_pins), tensors)
        for view, given_pins, tensors in zip(views, pins_of, named, strict=True)
    ]
    with collector_paused(), limits_as_errors(limits):
        formulations = [
            formulate(view, cluster, model, replace(options, input_specs=i, output_specs=o), graph_pins, None, limits)
            for view, i, o, graph_pins in zip(views, ins, outs, pinned, strict=True)
        ]
        joint = _Joint(views, formulations, frequencies, budget, named)
        solution = _solve(joint, options.solve_options(limits))
        stages = [
            label_stage(view, write_stage(view, cluster, model, formulation, joint.picks(g, solution.choices)), tensors)
            for g, (view, formulation, tensors) in enumerate(zip(views, formulations, named, strict=True))
        ]
    specs: dict[str, TensorShardSpec] = {}
    for g, stage in enumerate(stages):
        for weight in stage.weights:
            specs.setdefault(weight.label or f"{g}:{weight.name}", weight.spec)
    seconds = math.fsum(f * stage.seconds for f, stage in zip(frequencies, stages, strict=True))
    warn_of_limit(limits, solution.gap)
    plans = tuple(Plan((stage,)) for stage in stages)
    return Family(plans, seconds, solution.gap, seconds * (1 - solution.gap), specs, limits.time_reached)


def _each(what: str, given: Any, count: int) -> list[Any]:
    """Give each graph its value."""
    if what == "names" and (given is None or isinstance(given, Mapping | hidet.nn.Module)):
        return [given] * count
    if given is None:
        return [None] * count
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != count:
        raise ConfigError(f"{what} must be a list with an entry for each of the {count} graphs; got {given!r}.")
    return list(given)


class _Joint:
    """The problems of all graphs as one: a weight that is shared is one entity, read by the operators of all of them.

    Attributes
    ----------
    problem: the joint problem; costs are weighted.
    entities: for each graph the joint entity of each of its own.
    kept: for each graph and each of its entities the own choice of each joint choice; None where they are the same.
    shared: the joint entities of weights that several graphs have.
    """

    def __init__(
        self,
        views: Sequence[GraphView],
        formulations: Sequence[Formulation],
        frequencies: Sequence[float],
        budget: int,
        named: Sequence[Mapping[str, hidet.Tensor]],
    ):
        self.views, self.formulations, self.frequencies = views, formulations, frequencies
        cost: list[list[float]] = []
        collectives: list[list[int]] = []
        memory: list[list[int]] = []
        self.entities: list[list[int]] = []
        self.kept: list[dict[int, list[int]]] = [{} for _ in views]
        # The program points of one graph follow those of the other.
        start = [0, *accumulate(formulation.problem.activations.points for formulation in formulations)]
        intervals: list[LiveInterval] = []
        converted: dict[int, ConvertedTensor] = {}
        groups = _groups(views, named)
        common = {group: self._common(group) for group in dict.fromkeys(groups.values())}
        first: dict[tuple[tuple[int, int], ...], int] = {}
        for g, formulation in enumerate(formulations):
            entities = []
            for entity, costs in enumerate(formulation.problem.cost):
                group = groups.get((g, entity - formulation.weights.start)) if entity in formulation.weights else None
                kept = range(len(costs))
                if group is not None:
                    specs = formulation.weight_specs[entity - formulation.weights.start]
                    self.kept[g][entity] = [specs.index(spec) for spec in common[group]]
                    if group in first:
                        entities.append(first[group])
                        continue
                    first[group] = len(cost)
                    kept_choices: Sequence[int] = self.kept[g][entity]
                else:
                    kept_choices = kept
                entities.append(len(cost))
                cost.append([frequencies[g] * costs[k] for k in kept_choices])
                collectives.append([formulation.problem.collectives[entity][k] for k in kept_choices])
                nbytes = [formulation.problem.memory[entity][k] for k in kept_choices]
                if entity >= formulation.weights.stop:  # an input or output is held while its graph runs
                    points = formulation.problem.activations.points
                    intervals.append(LiveInterval(entities[-1], start[g], start[g] + points - 1, tuple(nbytes)))
                    nbytes = [0] * len(nbytes)
                memory.append(nbytes)
            self.entities.append(entities)
        self.shared = [first[group] for group in first if len(group) > 1]
        edges: list[Edge] = []
        tensors = 0
        for g, formulation in enumerate(formulations):
            weighted: dict[int, tuple[tuple[float, ...], ...]] = {}
            for edge in formulation.problem.edges:
                if id(edge.convert) not in weighted:
                    weighted[id(edge.convert)] = tuple(
                        tuple(frequencies[g] * seconds for seconds in line) for line in edge.convert
                    )
                produced = edge.produced
                if edge.producer in self.kept[g]:
                    produced = tuple(produced[k] for k in self.kept[g][edge.producer])
                producer, consumer = self.entities[g][edge.producer], self.entities[g][edge.consumer]
                convert = weighted[id(edge.convert)]
                span = edge.begin + start[g], edge.end + start[g]
                own = tensors + edge.tensor, producer, consumer, produced, edge.consumed, convert
                edges.append(Edge(*own, *span, edge.collectives))
            activations = formulation.problem.activations
            for interval in activations.intervals:
                entity = self.entities[g][interval.entity]
                intervals.append(
                    LiveInterval(entity, interval.begin + start[g], interval.end + start[g], interval.nbytes)
                )
            converted.update((tensors + tensor, memory_) for tensor, memory_ in activations.tensors.items())
            tensors += 1 + max((edge.tensor for edge in formulation.problem.edges), default=0)
        activations = Activations(start[-1], tuple(intervals), converted)
        self.problem = Problem(cost, memory, budget, edges, activations, collectives)

    def _common(self, group: tuple[tuple[int, int], ...]) -> list[TensorShardSpec]:
        """The specs that a shared weight may have in all graphs."""
        (g, w), *others = group
        name = self.views[g].weights[w]
        whole = self._what(g, name)
        specs = self.formulations[g].weight_specs[w]
        for h, v in others:
            other = self.views[h].weights[v]
            what = self._what(h, other)
            if what != whole:
                raise ConfigError(
                    f"Weights of one name are shared, but {name} of graph {g} is {whole} and {other} of graph {h} is "
                    f"{what}."
                )
            left = [spec for spec in specs if spec in self.formulations[h].weight_specs[v]]
            if not left:
                one, two = (
                    "; ".join(map(str, self.formulations[a].pins.tensors.get(self.views[a].weights[b], [])))
                    for a, b in ((g, w), (h, v))
                )
                raise ConfigError(
                    f"The pins {one} of graph {g} and {two} of graph {h} contradict each other: they share the weight."
                )
            specs = left
        return specs

    def _what(self, g: int, name: str) -> str:
        return f"{self.views[g].tensors[name].dtype.name}{list(self.views[g].shape(name))}"

    def picks(self, g: int, choices: Sequence[int]) -> list[int]:
        """The choices of a graph's own entities in a solution of the joint problem."""
        return [
            self.kept[g][entity][choices[e]] if entity in self.kept[g] else choices[e]
            for entity, e in enumerate(self.entities[g])
        ]

    def with_layout_of(self, g: int, picks: Sequence[int]) -> Problem | None:
        """The joint problem with weights as in a plan of one graph; None where the others do not allow that."""
        fixed = {}
        for entity, kept in self.kept[g].items():
            if picks[entity] not in kept:
                return None
            fixed[self.entities[g][entity]] = kept.index(picks[entity])
        return narrowed(self.problem, fixed)


def narrowed(problem: Problem, fixed: Mapping[int, int]) -> Problem:
    """Fix the choices of some entities; those entities have one choice left."""
    every = [[fixed[e]] if e in fixed else list(range(len(costs))) for e, costs in enumerate(problem.cost)]
    return restricted(problem, every)


def _groups(
    views: Sequence[GraphView], named: Sequence[Mapping[str, hidet.Tensor]]
) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
    """Map each weight (graph and number) to all that are the same: the same tensor, or of the same name."""
    result: dict[Any, list[tuple[int, int]]] = {}
    for g, view in enumerate(views):
        labels = tensor_labels(view, named[g])
        for w, name in enumerate(view.weights):
            key: Any = labels.get(name, view.tensors[name])
            result.setdefault(key, []).append((g, w))
    return {place: tuple(members) for members in result.values() for place in members}


def _solve(joint: _Joint, options: SolveOptions) -> Solution:
    """Solve the joint problem.

    Each graph by itself gives a bound, and its layout of the weights a candidate for all. Often one of these is as good
    as the bound allows; otherwise all graphs are planned together.
    """

    gap = options.gap
    finer = replace(options, gap=gap / 4)
    best: tuple[float, tuple[int, ...]] = (math.inf, ())
    bound = 0.0
    for g, formulation in enumerate(joint.formulations):
        own = optimize(formulation.problem, finer)
        bound += joint.frequencies[g] * own.seconds * (1 - own.gap)
        problem = joint.with_layout_of(g, own.choices)
        if problem is None:
            continue
        try:
            result = optimize(problem, finer)
        except (InfeasibleError, SolverError):  # this layout leaves no room for the weights of other graphs
            continue
        fixed = {joint.entities[g][e]: kept.index(own.choices[e]) for e, kept in joint.kept[g].items()}
        choices = tuple(fixed.get(e, k) for e, k in enumerate(result.choices))
        best = min(best, (result.seconds, choices))
    if best[0] - bound <= gap * best[0] and best[1]:
        return Solution(best[1], best[0], max(0.0, 1 - bound / best[0]) if best[0] else 0.0)
    try:
        together = optimize(joint.problem, options)
    except SolverError:
        if not best[1]:
            raise
        return Solution(best[1], best[0], 1 - bound / best[0])
    bound = max(bound, together.seconds * (1 - together.gap))
    best = min(best, (together.seconds, together.choices))
    return Solution(best[1], best[0], max(0.0, 1 - bound / best[0]) if best[0] else 0.0)
