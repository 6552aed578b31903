"""One cut, one division of the ranks and one layout of the weights for pipelines of several graphs that share weights.

Such graphs are prefill and decode, or a model at several sequence lengths. Their operators differ, so that a cut is
given by weights: the operators that read a shared weight are in the same stage of all pipelines.

The best pipeline of each graph alone gives a lower bound, and a candidate for the cut. With each candidate, the other
graphs are searched for their specs at the boundaries, and then the graphs' parts of each stage are planned together, as
a family of one stage (:func:`hidet_dist.search.search`). One stage on the whole machine is a candidate, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hidet_dist.errors import ConfigError, InfeasibleError, SolverError
from hidet_dist.machine import Cluster
from hidet_dist.machine.slices import MeshSlice
from hidet_dist.partitioning.micro_batches import MicroBatchGraph, refuse_states
from hidet_dist.pipeline.constraints import GraphOptions, StageConstraint
from hidet_dist.pipeline.options import PipelineOptions
from hidet_dist.pipeline.planner import search_pipeline
from hidet_dist.pipeline.stages import PipelineResult, PlannedStage, StagePart, pipeline_of
from hidet_dist.pipeline.tables import offered_to_stages
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search import FamilyMember, SearchOptions, SearchResult, search
from hidet_dist.search.family import held_keys, shared_weights
from hidet_dist.search.formulation.devices import memory_budget, with_budget
from hidet_dist.search.formulation.labels import parse_names
from hidet_dist.search.formulation.pins import parse_pins
from hidet_dist.search.limits import Limits, warn_of_limit
from hidet_dist.spec import TensorShardSpec
from hidet_dist.view import GraphView


def search_pipeline_family(
    members: Sequence[FamilyMember],
    cluster: Cluster,
    options: SearchOptions | None = None,
    pipeline: PipelineOptions | None = None,
    rules: RuleTable | None = None,
) -> SearchResult:
    """Find pipelines of several graphs with one cut and one layout of the weights that they share.

    The result's seconds are the weighted sum of the objective's values. Its bound is that of all pipelines, those with
    different cuts included.

    Parameters
    ----------
    members: the graphs, and their constraints; see :class:`hidet_dist.search.FamilyMember`.
    cluster: the machine.
    options: the options of a search, without names, pins and specs, which the members have. The memory budget is each
        device's, for the weights of all graphs together.
    pipeline: the objective, the micro-batches, the ranks of outputs, and the constraints on stages. The stages are
        given by their number, ranks and weights.
    rules: a table, for any mesh, with which rules and proofs are shared.

    Raises
    ------
    ConfigError
        When options or constraints do not fit a graph or the machine, or no cut fits all graphs.
    InfeasibleError
        When no pipelines fit the memory budget.
    SolverError
        When the time limit was reached before there were plans.

    Warns
    -----
    SearchLimitWarning
        When the time limit was reached, and the pipelines are the best ones until then.
    """
    options = SearchOptions() if options is None else options
    pipeline = PipelineOptions() if pipeline is None else pipeline
    _check(members, options, pipeline)
    search = _FamilySearch(members, cluster, options, pipeline, rules)
    family = search.run()
    warn_of_limit(search.limits, family.gap)
    return family


def _check(members: Sequence[FamilyMember], options: SearchOptions, pipeline: PipelineOptions) -> None:
    """Raise ConfigError for options and graphs that a family cannot have."""
    if not members:
        raise ConfigError("search_family needs at least one graph.")
    for member in members:
        refuse_states(member.graph, "stages that keep them are not searched: plan the family as one stage.")
    for key in ("names", "pins", "input_specs", "output_specs"):
        if getattr(options, key) is not None:
            raise ConfigError(f"search_family takes {key} for each graph, as an argument; the options have some.")
    if options.symbols or any(member.symbols for member in members):
        raise ConfigError(
            "Stages are not searched for graphs with symbolic dims yet: leave out pipeline, or plan for fixed sizes."
        )
    if pipeline.searches_shares:
        raise ConfigError(
            "Shares are not searched for a family, whose graphs have one division of the ranks: give the mesh of the "
            "machine shares, or leave 'shares' out."
        )
    for pin in (pin for member in members for pin in parse_pins(member.pins)):
        if any(pattern.parts for pattern in pin.patterns):
            raise ConfigError(
                f"The pin {pin} has parts of a mesh axis, which are not offered for stages of several graphs: leave "
                "the parts out, or plan the graphs as one stage."
            )
    for number, stage in enumerate(pipeline.stages if isinstance(pipeline.stages, tuple) else ()):
        if stage.operators is not None:
            raise ConfigError(
                f"stages[{number}]['operators'] = {list(stage.operators)} number the operators of one graph, and "
                "graphs of a family have different ones: give the stage's weights."
            )


@dataclass(frozen=True)
class _Candidate:
    """A cut: the slice of each stage, the shared weights in it, and the stages of the graphs that it comes from."""

    parts: tuple[MeshSlice, ...]
    weights: tuple[frozenset[int], ...]
    origin: Mapping[int, PipelineResult]


class _FamilySearch:
    """The search for a family's pipelines.

    Attributes
    ----------
    views: the view of each graph.
    groups: for each graph, the number of the group of each weight, by its name; the weights of a group are shared.
    """

    def __init__(
        self,
        members: Sequence[FamilyMember],
        cluster: Cluster,
        options: SearchOptions,
        pipeline: PipelineOptions,
        rules: RuleTable | None,
    ):
        self.members, self.cluster, self.options, self.pipeline = members, cluster, options, pipeline
        self.limits = options.limits()
        self.rules = RuleTable(cluster.mesh, rules)
        self.views = [GraphView(member.graph) for member in members]
        self.named = [parse_names(member.names) for member in members]
        sharing = shared_weights(
            [
                held_keys(view, names, member.same)
                for view, names, member in zip(self.views, self.named, members, strict=True)
            ]
        )
        number = {group: place for place, group in enumerate(dict.fromkeys(sharing.values()))}
        self.groups: list[dict[str, int]] = [{} for _ in members]
        for (g, w), group in sharing.items():
            self.groups[g][self.views[g].weights[w]] = number[group]
        self.everywhere = {place for group, place in number.items() if len({g for g, _ in group}) > 1}
        self.errors: list[ConfigError | InfeasibleError | SolverError] = []

    def run(self) -> SearchResult:
        """Find the best candidate."""
        count = len(self.members)  # what follows has as much time as one of the graphs
        alone = [self._search(g, self.pipeline, self.limits.part(1 / (count - g + 1))) for g in range(count)]
        bound = math.fsum(
            member.frequency * result.bound_seconds for member, result in zip(self.members, alone, strict=True)
        )
        best: SearchResult | None = None
        for candidate in self._candidates(alone):
            if best is not None and (self.limits.expired() or best.seconds * (1 - self.options.solver_gap) <= bound):
                break
            try:
                family = self._family(candidate, bound)
            except (ConfigError, InfeasibleError, SolverError) as error:
                self.errors.append(error)
                continue
            if best is None or family.seconds < best.seconds:
                best = family
        if best is None:
            raise self._error()
        return best

    def _error(self) -> Exception:
        """Choose the error to raise where no candidate can be planned."""
        for kind in (SolverError, InfeasibleError):
            of_kind = [error for error in self.errors if isinstance(error, kind)]
            if of_kind:
                return min(of_kind, key=lambda error: getattr(error, "least_budget", 0))
        return self.errors[0] if self.errors else ConfigError("No cut into stages fits all graphs of the family.")

    def _search(self, g: int, pipeline: PipelineOptions, limits: Limits) -> PipelineResult:
        """Search the best pipeline of one graph."""
        member = self.members[g]
        options = replace(
            self.options,
            names=member.names,
            pins=member.pins,
            input_specs=member.input_specs,
            output_specs=member.output_specs,
        )
        return search_pipeline(member.graph, self.cluster, options, pipeline, rules=self.rules, limits=limits)

    def _candidates(self, alone: Sequence[PipelineResult]) -> Iterator[_Candidate]:
        """List distinct cuts: those of each graph's best pipeline, and one stage, if it may be."""
        known: dict[tuple[tuple[MeshSlice, ...], tuple[frozenset[int], ...]], dict[int, PipelineResult]] = {}
        for g, result in enumerate(alone):
            parts = tuple(stage.part for stage in result.stages)
            weights = tuple(self._weights_of(g, stage.operators) for stage in result.stages)
            known.setdefault((parts, weights), {})[g] = result
        for (parts, weights), origin in known.items():
            yield _Candidate(parts, weights, origin)
        if self.pipeline.stages is None and all(len(result.stages) > 1 for result in alone):
            whole = MeshSlice(0, self.cluster.mesh.size)
            yield _Candidate((whole,), (frozenset(self.everywhere),), {})

    def _weights_of(self, g: int, operators: Sequence[int]) -> frozenset[int]:
        """Return the shared weights that some operators of a graph read."""
        inside = set(operators)
        return frozenset(
            self.groups[g][name]
            for name, use in self.views[g].uses()
            if use.operator in inside and self.groups[g].get(name) in self.everywhere
        )

    def _readers(self, g: int, weights: frozenset[int]) -> tuple[int, ...]:
        """Return the operators of a graph that read any of some weights."""
        return tuple(
            sorted(
                {
                    use.operator
                    for name, use in self.views[g].uses()
                    if use.operator is not None and self.groups[g].get(name) in weights
                }
            )
        )

    def _constrained(self, g: int, candidate: _Candidate) -> PipelineResult:
        """Search the pipeline of one graph with the cut and the slices of a candidate."""
        if g in candidate.origin:
            return candidate.origin[g]
        if len(candidate.parts) == 1:
            return self._search(g, replace(self.pipeline, stages=1), self.limits)
        several = {group for group in self.everywhere if sum(group in of_stage for of_stage in candidate.weights) > 1}
        stages = tuple(
            StageConstraint((part.start, part.stop), including=self._readers(g, weights - several))
            for part, weights in zip(candidate.parts, candidate.weights, strict=True)
        )
        return self._search(g, replace(self.pipeline, stages=stages), self.limits)

    def _family(self, candidate: _Candidate, bound: float) -> SearchResult:
        """Plan all graphs with one cut."""
        results = [self._constrained(g, candidate) for g in range(len(self.members))]
        planned: list[list[PlannedStage]] = [[] for _ in results]
        specs: dict[str, TensorShardSpec] = {}
        for number in range(len(candidate.parts)):
            stages = [result.stages[number] for result in results]
            family = self._stage([result.micro for result in results], stages)
            for label, spec in family.param_specs.items():
                specs.setdefault(label, spec)
            for g, (stage, plan) in enumerate(zip(stages, family.plans, strict=True)):
                planned[g].append(replace(stage, plan=plan.stages[0]))
        made = [
            pipeline_of(result.micro, self.cluster, self.pipeline, stages)
            for result, stages in zip(results, planned, strict=True)
        ]
        made = [
            replace(one, bound_seconds=min(one.value, result.bound_seconds))
            for one, result in zip(made, results, strict=True)
        ]
        seconds = math.fsum(member.frequency * one.value for member, one in zip(self.members, made, strict=True))
        gap = max(0.0, 1 - bound / seconds) if seconds else 0.0
        plans = tuple(one.plan(self.cluster, self.pipeline) for one in made)
        least = min(bound, seconds)
        return SearchResult(plans, seconds, gap, least, self.limits.time_reached, param_specs=specs)

    def _stage(self, micros: Sequence[MicroBatchGraph], stages: Sequence[PlannedStage]) -> SearchResult:
        """Plan the graphs' parts of one stage together, with what enters in the specs of each graph's plan."""
        cluster = stages[0].cluster
        members = []
        budget = memory_budget(cluster, self.options.mem_budget)
        left = budget
        for g, (micro, stage) in enumerate(zip(micros, stages, strict=True)):
            view = GraphView(micro.graph)
            part = StagePart.of(view, stage.operators, cluster.mesh)
            given = GraphOptions(
                parse_pins(self.members[g].pins),
                self.named[g],
                self.members[g].input_specs,
                self.members[g].output_specs,
            )
            of_part = given.of_part(view, part.names, part.view, stage.operators, cluster.mesh)
            arriving = [tensor.spec for tensor in stage.plan.inputs]
            wanted = replace(
                self.options,
                pins={pin.name: pin.pattern for pin in of_part.parsed},
                input_specs=arriving,
                output_specs=of_part.output_specs,
            )
            buffered = cluster.mesh.size < self.cluster.mesh.size and self.pipeline.value.is_buffered(micro.count)
            own = part.options(cluster, wanted, buffered)
            left -= budget - memory_budget(cluster, own.mem_budget)
            members.append(
                FamilyMember(
                    part.graph,
                    self.members[g].frequency,
                    self.named[g],
                    own.pins,
                    own.input_specs,
                    own.output_specs,
                    self.members[g].same,
                )
            )
        if left <= 0:
            raise InfeasibleError(
                f"The buffers of the graphs' micro-batches take {budget - left} bytes, and mem_budget is {budget}.",
                2 * (budget - left),
            )
        within, given_budget = with_budget(cluster, self.options.mem_budget, left)
        options = replace(self.options, mem_budget=given_budget)
        views = [GraphView(micro.graph) for micro in micros]
        offered = offered_to_stages(views, cluster.mesh, options.unequal_parts, self.rules)
        return search(members, within, options, rules=self.rules, limits=self.limits, offered=offered)
