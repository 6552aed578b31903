"""One layout of the weights for several graphs that share them: prefill and decode, or inputs of several lengths."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import hidet

from hidet_dist.cost.model import PredictedCost
from hidet_dist.errors import ConfigError, InfeasibleError, SolverError
from hidet_dist.frugal import collector_paused
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search import tuning
from hidet_dist.search.budget.optimum import optimize
from hidet_dist.search.choice_sets import ChoiceSet
from hidet_dist.search.formulation.devices import for_the_least, limiting_devices
from hidet_dist.search.formulation.formulate import Formulation, formulate
from hidet_dist.search.formulation.labels import label_stage, parse_names, tensor_labels
from hidet_dist.search.formulation.parts import offered_parts
from hidet_dist.search.formulation.pins import Pins, parse_pins
from hidet_dist.search.formulation.solution import StageCosts, write_stage
from hidet_dist.search.in_time import plan_in_time
from hidet_dist.search.limits import Limits, limits_as_errors
from hidet_dist.search.options import SearchOptions, SolveOptions
from hidet_dist.search.problem import Activations, ConvertedTensor, Edge, LiveInterval, Problem, Solution, restricted
from hidet_dist.search.problem.devices import DeviceMemory, on_devices
from hidet_dist.search.request import FamilyMember, SearchRequest
from hidet_dist.search.result import SearchResult
from hidet_dist.spec import DeviceMesh, Plan, StagePlan, TensorShardSpec
from hidet_dist.symbolic.planning import check_specs, planning_view, rule_table
from hidet_dist.view import GraphView


def search_members(members: Sequence[FamilyMember], request: SearchRequest, limits: Limits) -> SearchResult:
    """Search for graphs that share weights and states, on one mesh.

    Names, pins and specs come from the members; the options must have none. Raises as
    :func:`hidet_dist.search.search` does.
    """
    cluster, options, offered = request.cluster, request.options, request.offered
    _check_given(members, request)
    model = PredictedCost(cluster) if request.cost_model is None else request.cost_model
    named = [parse_names(member.names) for member in members]
    labelled = [(names, member.same) for names, member in zip(named, members, strict=True)]
    views = [_view_of(member, options, cluster.mesh) for member in members]
    pinned = [
        Pins(view, cluster.mesh, parse_pins(member.pins), tensors)
        for view, member, tensors in zip(views, members, named, strict=True)
    ]
    rules = RuleTable(cluster.mesh) if request.rules is None else request.rules
    with collector_paused(), limits_as_errors(limits):
        if offered is None:
            offered = offered_parts(pinned, rules, options.unequal_parts, options.mode == "search")
        budgets = [device.nbytes for device in limiting_devices(cluster, options.mem_budget, offered.parts)]
        parted = rules if rules.offered == offered else RuleTable(cluster.mesh, rules, offered)  # of all members
        sharing = shared_weights([held_keys(view, *each) for view, each in zip(views, labelled, strict=True)])

        def formulated(part: Limits | None, choice_set: ChoiceSet) -> _Joint:
            if choice_set is not ChoiceSet.ALL:
                _pin_in_all(views, pinned, sharing)
            formulations = []
            for view, member, pins in zip(views, members, pinned, strict=True):
                own = replace(options, input_specs=member.input_specs, output_specs=member.output_specs)
                given = view, cluster, model, own, pins
                formulations.append(formulate(*given, None, part, parted, choice_set, offered))
            return _Joint(views, formulations, [member.frequency for member in members], sharing)

        operators, kinds = sum(len(view.operators) for view in views), sum(view.kinds for view in views)
        solver = options.solve_options(limits)
        tables = [rule_table(view, cluster.mesh, rules) for view in views]
        for few in (ChoiceSet.FEW, ChoiceSet.FEW_PROVEN):
            try:
                joint, solution = plan_in_time(formulated, _solve, lambda _: solver, limits, operators, kinds, few=few)
            except InfeasibleError as error:
                raise for_the_least(error, budgets) from None
            of_graphs = enumerate(zip(joint.formulations, views, tables, strict=True))
            if all(one.is_proven(view, joint.picks(g, solution.choices), table) for g, (one, view, table) in of_graphs):
                break
        stages = []
        for g, (view, formulation, tensors) in enumerate(zip(views, joint.formulations, named, strict=True)):
            costs = StageCosts(view, cluster.mesh, model, formulation.fused)
            stage, _ = write_stage(costs, cluster, formulation, joint.picks(g, solution.choices))
            stages.append(label_stage(view, stage, tensors))
    specs = _specs_of(stages)
    seconds = math.fsum(member.frequency * stage.seconds for member, stage in zip(members, stages, strict=True))
    plans = tuple(Plan((stage,)) for stage in stages)
    bound = seconds * (1 - solution.gap)
    return SearchResult(plans, seconds, solution.gap, bound, limits.time_reached, param_specs=specs)


def _check_given(members: Sequence[FamilyMember], request: SearchRequest) -> None:
    """Raise ConfigError without members, or for what is each member's own, or is not offered for several graphs."""
    if request.allow is not None:
        raise ConfigError("A search for several graphs takes pins for each of them: leave allow out.")
    for key in ("names", "pins", "input_specs", "output_specs"):
        if getattr(request.options, key) is not None:
            raise ConfigError(f"search_family takes {key} for each graph, as an argument; the options have some.")
    if not members:
        raise ConfigError("search_family needs at least one graph.")


def _view_of(member: FamilyMember, options: SearchOptions, mesh: DeviceMesh) -> GraphView:
    """Make the view of a member's graph to plan for. Raises as :func:`check_specs` for specs that do not fit it."""
    view = planning_view(member.graph, member.declared(options), mesh)
    check_specs(view, mesh, "input", view.inputs, member.input_specs)
    check_specs(view, mesh, "output", view.outputs, member.output_specs)
    return view


def _specs_of(stages: Sequence[StagePlan]) -> dict[str, TensorShardSpec]:
    """Map weights and states to their specs, by label, or by the number of the graph and the name."""
    specs: dict[str, TensorShardSpec] = {}
    for g, stage in enumerate(stages):
        for tensor in (*stage.weights, *stage.states):
            specs.setdefault(tensor.label or f"{g}:{tensor.name}", tensor.spec)
    return specs


class _Joint:
    """The problems of all graphs as one: a shared weight or state is a single entity with readers in several graphs.

    Attributes
    ----------
    problem: the joint problem; costs are weighted.
    entities: for each graph, the joint entity of each of its entities.
    kept: for each graph, the choice of a weight's or state's entity for each choice of its joint entity.
    shared: the joint entities of weights and states that several graphs have.
    """

    def __init__(
        self,
        views: Sequence[GraphView],
        formulations: Sequence[Formulation],
        frequencies: Sequence[float],
        groups: Mapping[tuple[int, int], tuple[tuple[int, int], ...]],
    ):
        self.views, self.formulations, self.frequencies = views, formulations, frequencies
        cost: list[list[float]] = []
        collectives: list[list[int]] = []
        self.entities: list[list[int]] = []
        self.kept: list[dict[int, list[int]]] = [{} for _ in views]
        # The graphs run one after the other, and so do their program points.
        points = [formulation.devices[0].activations.points for formulation in formulations]
        self.start = [0, *accumulate(points)]
        common = {group: self._common_specs(group) for group in dict.fromkeys(groups.values())}
        first: dict[tuple[tuple[int, int], ...], int] = {}
        for g, formulation in enumerate(formulations):
            entities = []
            for entity, costs in enumerate(formulation.problem.cost):
                held = _held_number(formulation, entity)
                group = None if held is None else groups.get((g, held))
                kept = range(len(costs))
                if group is not None:
                    assert held is not None
                    specs = _held_specs(formulation)[held]
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
            self.entities.append(entities)
        self.shared = [first[group] for group in first if len(group) > 1]
        self.tensors = [0]  # the numbers of the first tensors of the graphs
        for formulation in formulations:
            self.tensors.append(self.tensors[-1] + 1 + max((edge.tensor for edge in formulation.edges), default=0))
        edges = [edge for g in range(len(formulations)) for edge in self._edges_of(g)]
        devices = [self._memory_of(number) for number in range(len(formulations[0].devices))]
        self.problem = on_devices(cost, edges, collectives, devices)

    def _edges_of(self, g: int) -> Iterator[Edge]:
        """Yield the edges of a graph in the joint problem, with weighted costs."""
        frequency, entities, kept = self.frequencies[g], self.entities[g], self.kept[g]
        weighted: dict[int, tuple[tuple[float, ...], ...]] = {}
        for edge in self.formulations[g].edges:
            if id(edge.convert) not in weighted:
                weighted[id(edge.convert)] = tuple(
                    tuple(frequency * seconds for seconds in line) for line in edge.convert
                )
            produced = edge.produced
            if edge.producer in kept:
                produced = tuple(produced[k] for k in kept[edge.producer])
            consumed = edge.consumed
            if edge.consumer in kept:
                consumed = tuple(consumed[k] for k in kept[edge.consumer])
            producer, consumer = entities[edge.producer], entities[edge.consumer]
            span = edge.begin + self.start[g], edge.end + self.start[g]
            ends = self.tensors[g] + edge.tensor, producer, consumer, produced, consumed, weighted[id(edge.convert)]
            yield Edge(*ends, *span, edge.collectives)

    def _memory_of(self, number: int) -> DeviceMemory:
        """Join the memory that the graphs take on one of the limiting devices, which are the same for all."""
        memory: list[list[int]] = []
        intervals: list[LiveInterval] = []
        converted: dict[int, ConvertedTensor] = {}
        for g, formulation in enumerate(self.formulations):
            device, span = formulation.devices[number], (self.start[g], self.start[g + 1] - 1)
            for entity, (joint, every) in enumerate(zip(self.entities[g], device.memory, strict=True)):
                if joint < len(memory):
                    continue  # of a graph before
                nbytes = [every[k] for k in self.kept[g].get(entity, range(len(every)))]
                if entity >= formulation.weights.stop and _held_number(formulation, entity) is None:
                    # An input or output: while its graph runs.
                    intervals.append(LiveInterval(joint, *span, tuple(nbytes)))
                    nbytes = [0] * len(nbytes)
                memory.append(nbytes)
        for g, formulation in enumerate(self.formulations):
            activations, start = formulation.devices[number].activations, self.start[g]
            for interval in activations.intervals:
                entity = self.entities[g][interval.entity]
                intervals.append(LiveInterval(entity, interval.begin + start, interval.end + start, interval.nbytes))
            converted.update((self.tensors[g] + tensor, held) for tensor, held in activations.tensors.items())
        budget = self.formulations[0].devices[number].budget
        return DeviceMemory(budget, memory, Activations(self.start[-1], tuple(intervals), converted))

    def _common_specs(self, group: tuple[tuple[int, int], ...]) -> list[TensorShardSpec]:
        """List the specs that a shared weight or state may have in all graphs. Raises ConfigError."""
        (g, w), *others = group
        name = _held_names(self.views[g])[w]
        tensor_type = self._tensor_type(g, name)
        specs = _held_specs(self.formulations[g])[w]
        for h, v in others:
            other = _held_names(self.views[h])[v]
            other_type = self._tensor_type(h, other)
            if other_type != tensor_type:
                raise ConfigError(
                    f"Weights and states of one name are shared, but {name} of graph {g} is {tensor_type} and {other} "
                    f"of graph {h} is {other_type}."
                )
            left = [spec for spec in specs if spec in _held_specs(self.formulations[h])[v]]
            if not left:
                one, two = (
                    "; ".join(map(str, self.formulations[a].pins.tensors.get(_held_names(self.views[a])[b], [])))
                    for a, b in ((g, w), (h, v))
                )
                raise ConfigError(
                    f"The pins {one} of graph {g} and {two} of graph {h} contradict each other: they share it."
                )
            specs = left
        return specs

    def _tensor_type(self, g: int, name: str) -> str:
        return f"{self.views[g].tensors[name].dtype.name}{list(self.views[g].shape(name))}"

    def picks(self, g: int, choices: Sequence[int]) -> list[int]:
        """Translate the choices of joint entities to choices of the entities of graph g."""
        return [
            self.kept[g][entity][choices[e]] if entity in self.kept[g] else choices[e]
            for entity, e in enumerate(self.entities[g])
        ]

    def layout_of(self, g: int, picks: Sequence[int]) -> dict[int, int] | None:
        """Map joint weights and states to their choices in a plan of graph g; None if other graphs do not allow it."""
        fixed = {}
        for entity, kept in self.kept[g].items():
            if picks[entity] not in kept:
                return None
            fixed[self.entities[g][entity]] = kept.index(picks[entity])
        return fixed


def narrowed(problem: Problem, fixed: Mapping[int, int]) -> Problem:
    """Fix the choices of some entities; those entities have one choice left."""
    every = [[fixed[e]] if e in fixed else list(range(len(costs))) for e, costs in enumerate(problem.cost)]
    return restricted(problem, every)


def _held_names(view: GraphView) -> list[str]:
    """List what a graph may share with others: weights, then states."""
    return [*view.weights, *view.states]


def _held_specs(formulation: Formulation) -> list[list[TensorShardSpec]]:
    """List the specs of weights, then states, one per choice."""
    return [*formulation.weight_specs, *formulation.states]


def _held_number(formulation: Formulation, entity: int) -> int | None:
    """Return the number of an entity among weights and states; None for another entity."""
    if entity in formulation.weights:
        return entity - formulation.weights.start
    states = formulation.state_entities
    return len(formulation.weights) + entity - states.start if entity in states else None


def held_keys(
    view: GraphView, names: Mapping[str, hidet.Tensor], same: Mapping[hidet.Tensor, hidet.Tensor]
) -> dict[str, Hashable]:
    """Make a key of each weight, then each state, of a view, by its name there; equal keys are the same in all graphs.

    It is the user's name in ``names`` or, for one without a name, the tensor, or the one that it is the ``same`` as.
    """
    labels, tensors, states = tensor_labels(view, names), view.tensors, set(view.states)
    return {
        name: (name in states, labels.get(name, same.get(tensors[name], tensors[name]))) for name in _held_names(view)
    }


def shared_weights(keys: Sequence[Mapping[str, Hashable]]) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
    """Map each weight or state (graph and number) to its group: those of an equal key; see :func:`held_keys`.

    The states of a graph are numbered behind its weights.
    """
    result: dict[Hashable, list[tuple[int, int]]] = {}
    for g, of_graph in enumerate(keys):
        for w, key in enumerate(of_graph.values()):
            result.setdefault(key, []).append((g, w))
    return {weight: tuple(group) for group in result.values() for weight in group}


def _pin_in_all(
    views: Sequence[GraphView],
    pinned: Sequence[Pins],
    sharing: Mapping[tuple[int, int], tuple[tuple[int, int], ...]],
) -> None:
    """Give each weight and state the pins that it has in any graph.

    In simple problems, what has no pins has few specs. They need not be among those of a pin in another graph.
    """
    for group in dict.fromkeys(sharing.values()):
        places = [(pinned[g].tensors, _held_names(views[g])[w]) for g, w in group]
        pins = list(dict.fromkeys(pin for tensors, name in places for pin in tensors.get(name, [])))
        if pins:
            for tensors, name in places:
                tensors[name] = pins


def _solve(joint: _Joint, options: SolveOptions) -> Solution:
    """Solve the joint problem.

    First each graph is solved by itself. That gives a bound, and layouts of weights and states that are candidates for
    all graphs. Where they are one layout, it is often within the gap of the bound. Otherwise the joint problem is
    solved, and candidates are solved after it where it is not solved to the gap.
    """
    finer = replace(options, solver_gap=options.solver_gap / 4)
    alone = [optimize(formulation.problem, finer) for formulation in joint.formulations]
    bound = sum(
        frequency * each.seconds * (1 - each.gap) for frequency, each in zip(joint.frequencies, alone, strict=True)
    )
    layouts = [joint.layout_of(g, each.choices) for g, each in enumerate(alone)]
    is_one = _is_one_layout(layouts)
    plans = _plans_of_layouts(joint, layouts[:1], finer) if is_one else []
    failure: SolverError | None = None
    if not _has_gap(plans, bound, options.solver_gap):
        # Candidates that follow need time, too, after a joint problem that takes all it has.
        fraction = 1.0 if is_one else tuning.JOINT_FRACTION
        try:
            together = optimize(joint.problem, replace(options, limits=options.limits.part(fraction)))
        except SolverError as error:
            failure = error
        else:
            plans.append((together.seconds, together.choices))
            bound = max(bound, together.seconds * (1 - together.gap))
    if not is_one and not _has_gap(plans, bound, options.solver_gap):
        plans += _plans_of_layouts(joint, layouts, finer)
    if not plans:
        assert failure is not None
        raise failure
    seconds, choices = min(plans)
    return Solution(choices, seconds, max(0.0, 1 - bound / seconds) if seconds else 0.0)


def _has_gap(plans: Sequence[tuple[float, tuple[int, ...]]], bound: float, gap: float) -> bool:
    """Tell whether the best of the plans, with their seconds, is within a relative gap of the bound."""
    return bool(plans) and min(plans)[0] - bound <= gap * min(plans)[0]


def _is_one_layout(layouts: Sequence[Mapping[int, int] | None]) -> bool:
    """Tell whether no two layouts have unlike choices of an entity."""
    known: dict[int, int] = {}
    return all(
        layout is not None and all(known.setdefault(entity, choice) == choice for entity, choice in layout.items())
        for layout in layouts
    )


def _plans_of_layouts(
    joint: _Joint, layouts: Sequence[Mapping[int, int] | None], options: SolveOptions
) -> list[tuple[float, tuple[int, ...]]]:
    """Find plans of the joint problem in which weights and states have these layouts, and their seconds."""
    plans = []
    for fixed in layouts:
        if fixed is None:
            continue
        try:
            result = optimize(narrowed(joint.problem, fixed), options)
        except (InfeasibleError, SolverError):  # with the other graphs' weights, over the budget
            continue
        plans.append((result.seconds, tuple(fixed.get(e, k) for e, k in enumerate(result.choices))))
    return plans
