"""The search for a pipeline: cuts, slices of the mesh, specs and micro-batches together.

The bounds of all stages (:mod:`hidet_dist.pipeline.tables`) and a dynamic program over them
(:mod:`hidet_dist.pipeline.chain`) give a pipeline and a lower bound of all pipelines. Its stages are then planned, each
as a separate graph under its memory budget (:func:`hidet_dist.search.find_plan`), and the bounds of all equal stages
are raised to the proven bounds of these plans. This is repeated until the best planned pipeline is within the gap of
the bound.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hidet_dist.errors import ConfigError, InfeasibleError, SolverError
from hidet_dist.machine import Cluster
from hidet_dist.machine.slices import MeshSlice, link_between, slices_at, sub_cluster
from hidet_dist.normalize import NormalGraph
from hidet_dist.partitioning.micro_batches import MicroBatch, batch_dims, micro_batch
from hidet_dist.pipeline.branches import BranchSearch
from hidet_dist.pipeline.chain import (
    Allowed,
    Array,
    Chain,
    ChainProblem,
    ChainStage,
    least_batch,
    least_slowest,
    least_sum,
)
from hidet_dist.pipeline.constraints import GraphOptions, check_parts, operators_of_weights
from hidet_dist.pipeline.messages import delivery_seconds, least_seconds, message_seconds
from hidet_dist.pipeline.options import PipelineOptions
from hidet_dist.pipeline.stages import (
    PipelineResult,
    PlannedStage,
    StagePart,
    messages_between,
    objective_seconds,
    periods,
)
from hidet_dist.pipeline.tables import StageBounds
from hidet_dist.pipeline.units import Crossings, find_units
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search import SearchOptions
from hidet_dist.search.labels import parse_names
from hidet_dist.search.limits import Limits, OutOfTimeError
from hidet_dist.search.pins import parse_pins
from hidet_dist.search.planner import SearchResult, search_result
from hidet_dist.view import GraphView

ONE_STAGE_SHARE = 0.4  # of the time left that planning the whole graph may take before several stages are tried


def search_pipeline(
    graph: NormalGraph,
    cluster: Cluster,
    options: SearchOptions | None = None,
    pipeline: PipelineOptions | None = None,
    **changes: Any,
) -> PipelineResult:
    """Find the best pipeline by the objective; one stage on the whole machine is among the candidates.

    Parameters
    ----------
    graph: the graph in normal form.
    cluster: the machine.
    options: the options of a search; the memory budget is each device's.
    pipeline: the objective, the micro-batches, the ranks of outputs, and the constraints on stages.
    changes: fields of ``options``, by name.

    Raises
    ------
    ConfigError
        When options or constraints do not fit the graph or the machine, or contradict each other.
    InfeasibleError
        When no pipeline fits the memory budget.
    SolverError
        When the time limit was reached before there was a plan.
    """
    options = SearchOptions.of(options, changes)
    pipeline = PipelineOptions() if pipeline is None else pipeline
    _check(options, pipeline, cluster)
    limits = options.limits()
    best: PipelineResult | None = None
    bound = math.inf
    errors: list[InfeasibleError | SolverError] = []
    rules = RuleTable(cluster.mesh)
    for count in _counts(graph, pipeline):
        if best is not None and limits.expired():
            bound = 0.0
            break
        try:
            micro = micro_batch(graph, count)
        except ConfigError:
            if pipeline.micro_batches is not None:
                raise
            continue  # an operator mixes the batch
        several = pipeline.stages != 1 and cluster.mesh.size > 1
        if pipeline.stages in (None, 1) and (count == 1 or pipeline.micro_batches is not None):
            try:
                best = _better(best, _one_stage(micro, cluster, options, pipeline, limits, several, rules))
                bound = min(bound, best.bound_seconds)
            except InfeasibleError as error:
                errors.append(error)
            except SolverError as error:
                bound = 0.0  # one stage has no proven bound
                errors.append(error)
        if several:
            joint = _Joint(micro, cluster, options, pipeline, limits, rules)
            pipelined = joint.search(math.inf if best is None else best.value)
            bound = min(bound, joint.bound)
            errors += joint.errors
            if pipelined is not None:
                best = _better(best, pipelined)
        if several and pipeline.stages is None:
            branches = BranchSearch(micro, cluster, options, pipeline, limits, rules)
            beside = branches.search(math.inf if best is None else best.value)
            bound = min(bound, branches.bound)
            errors += branches.errors
            if beside is not None:
                best = _better(best, beside)
    if best is None:
        unfit = [error for error in errors if isinstance(error, InfeasibleError)]
        if unfit:
            raise min(unfit, key=lambda error: error.least_budget)
        raise errors[0] if errors else ConfigError("The graph has no pipeline of the stages that are given.")
    return replace(best, bound_seconds=min(bound, best.value))


def _better(best: PipelineResult | None, other: PipelineResult) -> PipelineResult:
    return other if best is None or other.value < best.value else best


def _check(options: SearchOptions, pipeline: PipelineOptions, cluster: Cluster) -> None:
    """Raise ConfigError for options with which several stages cannot be searched."""
    if pipeline.stages == 1 or cluster.mesh.size == 1:
        return
    if options.symbols:
        raise ConfigError(
            "Stages are not searched for graphs with symbolic dims yet: give stages = 1, or plan for fixed sizes."
        )
    if options.mode != "search":
        raise ConfigError("Stages are searched: mode = 'propagate' needs stages = 1.")
    given = pipeline.stages
    meshes = isinstance(given, tuple) and all(stage.ranks is not None for stage in given)
    if not meshes:
        for key in ("pins", "input_specs", "output_specs"):
            if getattr(options, key):
                raise ConfigError(
                    f"{key} name mesh axes, and each stage has a mesh of its own: give the ranks of every stage "
                    "(stages = [{'ranks': [0, 4]}, ...]), or stages = 1."
                )


def _counts(graph: NormalGraph, pipeline: PipelineOptions) -> list[int]:
    """List the numbers of micro-batches to try."""
    if pipeline.micro_batches is not None:
        return [pipeline.micro_batches]
    if pipeline.objective == "latency" or pipeline.stages == 1:
        return [1]
    sizes = [x.shape[dim] for x, dim in zip(graph.inputs or [], batch_dims(graph), strict=False) if dim is not None]
    batch = math.gcd(*(int(size) for size in sizes)) if sizes else 1
    return [count for count in range(1, batch + 1) if batch % count == 0]


def _one_stage(
    micro: MicroBatch,
    cluster: Cluster,
    options: SearchOptions,
    pipeline: PipelineOptions,
    limits: Limits,
    several: bool,
    rules: RuleTable,
) -> PipelineResult:
    """Plan the whole graph for the whole machine; with ``several``, some of the time is left to several stages."""
    part = limits.part(ONE_STAGE_SHARE) if several else limits
    changed = replace(options, time_limit_seconds=part.seconds_left())
    result = search_result(micro.graph, cluster, changed, changed.limits(), None if options.symbols else rules)
    stage = result.plan.stages[0]
    times = micro.count if pipeline.objective != "latency" else 1
    view = GraphView(micro.graph)
    whole = MeshSlice(0, cluster.mesh.size)
    return PipelineResult(
        micro,
        (PlannedStage(range(len(view.operators)), whole, cluster, stage),),
        (),
        0.0,
        times * stage.seconds,
        times * result.bound_seconds,
    )


class _Joint:
    """The search for several stages, for one number of micro-batches.

    Attributes
    ----------
    bound: a lower bound of the value of all pipelines of several stages.
    errors: the errors of stages that cannot be planned.
    """

    def __init__(
        self,
        micro: MicroBatch,
        cluster: Cluster,
        options: SearchOptions,
        pipeline: PipelineOptions,
        limits: Limits,
        rules: RuleTable,
    ):
        self.micro, self.cluster, self.options, self.pipeline, self.limits = micro, cluster, options, pipeline, limits
        self.rules = rules
        self.view = GraphView(micro.graph)
        self.units = find_units(self.view)
        self.bound = 0.0
        self.errors: list[InfeasibleError | SolverError] = []
        self.given = GraphOptions(
            parse_pins(options.pins), parse_names(options.names), options.input_specs, options.output_specs
        )
        mesh = cluster.mesh
        self.starts = {rank: slices_at(mesh, rank) for rank in range(mesh.size)}
        self.allowed = self._allowed()
        used = [part for rank in range(mesh.size) for part in self.starts[rank] if self._usable(part)]
        self.starts = {rank: [part for part in used if part.start == rank] for rank in range(mesh.size)}
        self.clusters = {part: sub_cluster(cluster, part) for part in used}
        crossings = Crossings.of(self.view)
        begins = [unit.operators.start for unit in self.units[1:]]
        self.crossing = {name for begin in begins for name in crossings.at(begin)}
        self._planned: dict[Hashable, SearchResult | InfeasibleError] = {}
        self._send: dict[Hashable, Array] = {}
        self.results_nbytes = sum(self.view.nbytes(name) for name in dict.fromkeys(self.view.outputs))

    def _usable(self, part: MeshSlice) -> bool:
        if self.allowed is None:
            return part.size < self.cluster.mesh.size
        return any(one.parts is None or part in one.parts for one in self.allowed)

    def _allowed(self) -> list[Allowed] | None:
        """Translate the user's constraints on stages to units and slices. Raises ConfigError if they cannot be met."""
        given = self.pipeline.stages
        if given is None:
            return None
        if isinstance(given, int):
            return [Allowed(None, None)] * given
        parts = check_parts(given, self.cluster.mesh)
        operators = operators_of_weights(given, self.view, self.given.names or {})
        count = len(self.units)
        unit_of = [n for n, unit in enumerate(self.units) for _ in unit.operators]
        start_of = {unit.operators.start: n for n, unit in enumerate(self.units)} | {len(unit_of): count}
        allowed = []
        for number, (stage, part) in enumerate(zip(given, parts, strict=True)):
            runs = np.triu(np.ones((count, count + 1), dtype=bool), 1)
            if stage.operators is not None:
                for place in stage.operators:
                    if place not in start_of:
                        known = ", ".join(map(str, list(start_of)[:12]))
                        raise ConfigError(
                            f"stages[{number}]['operators'] = {list(stage.operators)}: the graph cannot be cut before "
                            f"operator {place}; it can be before the operators {known}, ..., where one tensor crosses."
                        )
                begin, end = (start_of[place] for place in stage.operators)
                only = np.zeros_like(runs)
                only[begin, end] = True
                runs &= only
            for other, needed in enumerate(operators):
                for operator in needed:
                    inside = np.zeros_like(runs)
                    unit = unit_of[operator]
                    inside[: unit + 1, unit + 1 :] = True
                    if other == number:
                        runs &= inside
                    elif other < number:
                        runs[: unit + 1] = False
                    else:
                        runs[:, unit + 1 :] = False
            if not runs.any():
                what = f"stages[{number}]['operators'] = {stage.operators}" if stage.operators else ""
                names = f"stages[{number}]['weights'] = {list(stage.weights)}" if stage.weights else ""
                raise ConfigError(
                    f"{' and '.join(filter(None, (what, names))) or f'stages[{number}]'} contradict what is given of "
                    "the other stages: no run of operators is left that has these weights and none of theirs. Stages "
                    "are in the order of execution."
                )
            allowed.append(Allowed(None if part is None else frozenset([part]), runs))
        return allowed

    def search(self, best_value: float) -> PipelineResult | None:
        """Find the best pipeline; None if none is better than ``best_value`` by more than the gap."""
        best: PipelineResult | None = None
        try:
            if len(self.units) < 2:
                self.bound = math.inf
                return None
            floor = self._floor()
            if floor >= best_value * (1 - self.options.gap):
                self.bound = floor
                return None
            bounds = self._bounds()
            while True:
                problem = self._problem(bounds)
                solved = self._solve(problem)
                if solved is None:
                    if best is None:
                        self.bound = math.inf
                    return best
                chain, value = solved
                self.bound = max(self.bound, value)
                if self.bound >= min(best_value, math.inf if best is None else best.value) * (1 - self.options.gap):
                    return best
                pipeline, raised = self._plan_chain(chain, bounds)
                if pipeline is not None:
                    best = _better(best, pipeline)
                if not raised or self.limits.expired():
                    return best
        except OutOfTimeError:
            return best

    def _floor(self) -> float:
        """Bound the value of pipelines of several stages by the least that is sent; 0 where one stage may be given."""
        given = self.pipeline.stages
        if given is not None and (given if isinstance(given, int) else len(given)) < 2:
            return 0.0
        pairs = [(part, other) for part in self.clusters for other in self.clusters if other.start == part.stop]
        nbytes = min(self.view.nbytes(unit.entering) for unit in self.units[1:])
        links = (link_between(self.cluster, part, other) for part, other in pairs)
        sent = min(
            (least_seconds(nbytes, a.size, b.size, link) for (a, b), link in zip(pairs, links, strict=True)),
            default=0.0,
        )
        lasts = [part for part in self.clusters if part.start and part.stop == self.cluster.mesh.size]
        # The last stage receives a message and delivers the outputs in each micro-batch.
        period = sent + min(map(self._delivered, lasts), default=0.0)
        return period if self.pipeline.objective == "latency" else self.micro.count * period

    def _bounds(self) -> dict[Cluster, StageBounds]:
        """Bound the stages on each kind of sub-mesh."""
        return {
            cluster: StageBounds(
                self.view,
                self.units,
                frozenset(self.crossing),
                cluster,
                self.given,
                self._budget(cluster),
                self.limits,
                self.rules,
            )
            for cluster in dict.fromkeys(self.clusters.values())
        }

    def _budget(self, cluster: Cluster) -> int:
        return cluster.device.memory_bytes if self.options.mem_budget is None else self.options.mem_budget

    def _problem(self, bounds: Mapping[Cluster, StageBounds]) -> ChainProblem:
        return ChainProblem(
            self.cluster.mesh.size,
            self.starts,
            {part: bounds[cluster].seconds for part, cluster in self.clusters.items()},
            lambda part, other: self._sent(bounds, part, other),
            lambda part, streams: self._received(bounds, part, streams),
            self._delivered,
            self.allowed,
        )

    def _received(self, bounds: Mapping[Cluster, StageBounds], part: MeshSlice, streams: int) -> Array:
        """Bound the seconds to receive the tensor that enters each unit, in a number of streams, by arriving spec."""
        before = [
            other for other in self.clusters if other.stop == part.start and min(other.size, part.size) == streams
        ]
        if not before:
            return np.zeros((len(self.units), bounds[self.clusters[part]].seconds.shape[2]))
        return self._sent(bounds, before[0], part)

    def _delivered(self, part: MeshSlice) -> float:
        return delivery_seconds(self.cluster, part, self.results_nbytes) if self.pipeline.outputs == "all" else 0.0

    def _sent(self, bounds: Mapping[Cluster, StageBounds], part: MeshSlice, other: MeshSlice) -> Array:
        """Bound the seconds to send the tensor that enters each unit to another slice, by arriving spec."""
        target, link = self.clusters[other], link_between(self.cluster, part, other)
        key = part.size, target, link
        if key not in self._send:
            arrivals = bounds[target].arrivals
            # Infinite for the first unit, which no tensor enters, and for specs that a unit does not have.
            send = np.full((len(self.units), bounds[target].seconds.shape[2]), np.inf)
            known: dict[Hashable, float] = {}
            for n, unit in enumerate(self.units):
                shape = self.view.shape(unit.entering) if unit.entering else ()
                for s, spec in enumerate(arrivals[n]):
                    if not spec.fits(shape, target.mesh):  # padding is not sent
                        continue
                    sent = shape, self.view.itemsize(unit.entering), spec
                    if sent not in known:
                        known[sent] = message_seconds(self.view, unit.entering, part.size, target, spec, link)
                    send[n, s] = known[sent]
            self._send[key] = send
        return self._send[key]

    def _solve(self, problem: ChainProblem) -> tuple[Chain, float] | None:
        """Find the best chain by the bounds, and a lower bound of the value of all chains."""
        if self.pipeline.objective == "batch":
            batched = least_batch(problem, self.micro.count, self.options.gap / 2)
            return None if batched is None else (batched.chain, batched.bound)
        if self.pipeline.objective == "throughput":
            chain = least_slowest(problem)
            return None if chain is None else (chain, self.micro.count * chain.slowest)
        chain = least_sum(problem)
        return None if chain is None else (chain, chain.total)

    def _plan_chain(self, chain: Chain, bounds: Mapping[Cluster, StageBounds]) -> tuple[PipelineResult | None, bool]:
        """Plan the stages of a chain. Returns the pipeline, if all can be planned, and whether any bound was raised."""
        raised, results = False, []
        for stage in chain.stages:
            cluster = self.clusters[stage.part]
            stage_bounds = bounds[cluster]
            key = self._key(stage, cluster, stage_bounds)
            if key not in self._planned:
                raised = True
                result = self._planned[key] = self._plan(stage, cluster, stage_bounds)
                proven = math.inf if isinstance(result, InfeasibleError) else result.bound_seconds
                stage_bounds.raise_to(list(self._equal_runs(stage)), stage.arrival, proven)
                if isinstance(result, InfeasibleError):
                    self.errors.append(result)
                elif result.second_per_byte:
                    stage_bounds.price(result.second_per_byte)
            results.append(self._planned[key])
        planned = [result for result in results if isinstance(result, SearchResult)]
        return (self._result(chain, planned) if len(planned) == len(results) else None), raised

    def _key(self, stage: ChainStage, cluster: Cluster, bounds: StageBounds) -> Hashable:
        """Make a key that is equal for stages with equal plans."""
        run = tuple(unit.key for unit in self.units[stage.begin : stage.end])
        arrival = bounds.arrivals[stage.begin][stage.arrival] if bounds.arrivals[stage.begin] else None
        return run, stage.begin == 0, cluster, arrival

    def _equal_runs(self, stage: ChainStage) -> Iterator[tuple[int, int]]:
        """Find the runs of units that are equal to a stage's."""
        keys = [unit.key for unit in self.units]
        length = stage.end - stage.begin
        run = keys[stage.begin : stage.end]
        for i in range(len(keys) - length + 1):
            if (i == 0) == (stage.begin == 0) and keys[i : i + length] == run:
                yield i, i + length

    def _plan(self, stage: ChainStage, cluster: Cluster, bounds: StageBounds) -> SearchResult | InfeasibleError:
        """Plan a stage as a separate graph; return the error if nothing fits its memory budget."""
        part = StagePart.of(self.view, self._operators(stage))
        given = self.given.of_part(self.view, part.names, part.view, self._operators(stage), cluster.mesh)
        entering = part.names.get(self.units[stage.begin].entering)
        specs = list(given.input_specs or [None] * len(part.view.inputs))
        for n, name in enumerate(part.view.inputs):
            if name == entering:
                specs[n] = bounds.arrivals[stage.begin][stage.arrival]
        options = replace(
            self.options,
            pins={pin.name: pin.pattern for pin in given.parsed},
            input_specs=specs,
            output_specs=given.output_specs,
        )
        buffered = self.pipeline.objective != "latency" or self.micro.count > 1
        try:
            return part.plan(cluster, options, self.limits, bounds.rules, buffered)
        except InfeasibleError as error:
            return error

    def _operators(self, stage: ChainStage) -> range:
        return range(self.units[stage.begin].operators.start, self.units[stage.end - 1].operators.stop)

    def _result(self, chain: Chain, results: Sequence[SearchResult]) -> PipelineResult:
        """Make the pipeline of a chain's planned stages."""
        stages = tuple(
            PlannedStage(self._operators(stage), stage.part, self.clusters[stage.part], result.plan.stages[0])
            for stage, result in zip(chain.stages, results, strict=True)
        )
        messages = tuple(messages_between(self.view, self.cluster, stages))
        delivery = self._delivered(stages[-1].part)
        seconds = [stage.plan.seconds for stage in stages]
        total = math.fsum([*seconds, *(message.seconds for message in messages), delivery])
        slowest = max(periods(seconds, messages, delivery))
        value = objective_seconds(self.pipeline.objective, self.micro.count, total, slowest)
        return PipelineResult(self.micro, stages, messages, delivery, value, 0.0)
