"""The search for stages one after the other: cuts, slices of the mesh and specs together.

The bounds of all stages (:mod:`hidet_dist.pipeline.tables`) and a dynamic program over them
(:mod:`hidet_dist.pipeline.chain`) give a pipeline and a lower bound of all pipelines. Its stages are then planned, each
as a separate graph under its memory budget (:func:`hidet_dist.search.search`), and the bounds of all equal stages
are raised to the proven bounds of these plans. This is repeated until the best planned pipeline is within the gap of
the bound.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hidet_dist.cost.model import PredictedCost
from hidet_dist.errors import ConfigError, InfeasibleError, SolverError
from hidet_dist.limits import MOST_BYTES
from hidet_dist.machine import Cluster
from hidet_dist.machine.slices import MeshSlice, link_between, sub_cluster
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
from hidet_dist.pipeline.constraints import (
    GraphOptions,
    StageConstraint,
    check_parts,
    check_runs,
    check_slices,
    cuts_at,
    operators_of_weights,
)
from hidet_dist.pipeline.messages import least_seconds, message_seconds
from hidet_dist.pipeline.stage_search import StageSearch
from hidet_dist.pipeline.stages import PipelineResult, PlannedStage, StagePart
from hidet_dist.pipeline.tables import StageBounds
from hidet_dist.pipeline.units import Crossings, find_units
from hidet_dist.search.formulation.labels import parse_names
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.search.formulation.pins import parse_pins
from hidet_dist.search.limits import Limits
from hidet_dist.search.options import SearchOptions
from hidet_dist.search.result import SearchResult
from hidet_dist.search.tuning import FORMULATION_FRACTION
from hidet_dist.spec import TensorShardSpec


class ChainSearch(StageSearch):
    """The search for stages one after the other.

    Attributes
    ----------
    least_period: for the objectives other than ``latency``, a lower bound of the longest period of a stage, by the
        costs of operators and messages alone; infinite if there are no pipelines. It is 0 until it is known.
    sufficient_bytes: the least memory budget of those that are known to suffice for a pipeline whose stages did not fit
        the given one; None if none is known.
    """

    least_period = 0.0
    sufficient_bytes: int | None = None

    def _prepare(self) -> None:
        self.units = find_units(self.view)
        self.given = GraphOptions(
            parse_pins(self.options.pins),
            parse_names(self.options.names),
            self.options.input_specs,
            self.options.output_specs,
        )
        mesh = self.cluster.mesh
        self.allowed = self._allowed()
        used = [part for rank in range(mesh.size) for part in self.slices[rank] if self._usable(part)]
        self.starts = {rank: [part for part in used if part.start == rank] for rank in range(mesh.size)}
        self.clusters = {part: sub_cluster(self.cluster, part) for part in used}
        crossings = Crossings.of(self.view)
        begins = [unit.operators.start for unit in self.units[1:]]
        self.crossing = {name for begin in begins for name in crossings.at(begin)}
        self._send: dict[Hashable, Array] = {}

    def _usable(self, part: MeshSlice) -> bool:
        if self.allowed is None:
            return part.size < self.cluster.mesh.size
        return any(one.parts is None or part in one.parts for one in self.allowed)

    def _allowed(self) -> list[Allowed] | None:
        """Translate the user's constraints on stages to units and slices. Raises ConfigError if they cannot be met."""
        given = self.pipeline.stages
        if given is None:
            return None
        check_slices(given, self.cluster.mesh)
        begins = [*(unit.operators.start for unit in self.units), self.units[-1].operators.stop]
        if isinstance(given, int):
            check_runs(given, [None] * given, begins)
            return [Allowed(None, None)] * given
        parts = check_parts(given, self.cluster.mesh)
        operators = operators_of_weights(given, self.view, self.given.names or {})
        count = len(self.units)
        unit_of = [n for n, unit in enumerate(self.units) for _ in unit.operators]
        start_of = {place: n for n, place in enumerate(begins)}
        allowed = []
        for number, (stage, part) in enumerate(zip(given, parts, strict=True)):
            runs = np.triu(np.ones((count, count + 1), dtype=bool), 1)
            if stage.operators is not None:
                _check_run(number, stage, begins, operators[number])
                begin, end = (start_of[place] for place in stage.operators)
                only = np.zeros_like(runs)
                only[begin, end] = True
                runs &= only
            _keep_runs(runs, number, [{unit_of[operator] for operator in needed} for needed in operators])
            if not runs.any():
                what = f"stages[{number}]['operators'] = {list(stage.operators)}" if stage.operators else ""
                names = f"stages[{number}]['weights'] = {list(stage.weights)}" if stage.weights else ""
                raise ConfigError(
                    f"{' and '.join(filter(None, (what, names))) or f'stages[{number}]'} contradict what is given of "
                    "the other stages: no run of operators is left that has these weights and none of theirs. Stages "
                    "are in the order of execution."
                )
            same = None if part is None else frozenset(p for p in self.slices[part.start] if p.stop == part.stop)
            allowed.append(Allowed(same, runs))
        check_runs(given, [one.runs for one in allowed], begins)
        return allowed

    def search(self, best_value: float) -> PipelineResult | None:
        """Find the best pipeline as :meth:`StageSearch.search` does.

        Where several stages are asked for and the time limit left none, it is one of stages of about equal work.
        """
        found = super().search(best_value)
        if found is None and self.allowed is not None and self.limits.time_reached and math.isinf(best_value):
            self._keep_simple()
        return self.best

    def _search(self, best_value: float) -> None:
        if len(self.units) < 2:
            self.bound = math.inf
            return
        floor = self._floor()
        if floor >= self._least(best_value):
            self.bound = floor
            self.least_period = floor / self.micro.count
            return
        # Where one stage is no answer, time must be left for a pipeline without bounds.
        bounds = self._bounds(self.limits if self.allowed is None else self.limits.part(FORMULATION_FRACTION))
        for one in bounds.values():
            one.limits = self.limits
        if self.pipeline.value.fills:
            quickest = least_slowest(self._problem(bounds))
            self.least_period = math.inf if quickest is None else quickest.slowest
        while True:
            solved = self._solve(self._problem(bounds))
            if solved is None:
                if self.best is None:
                    self.bound = math.inf
                return
            chain, value = solved
            self.bound = max(self.bound, value)
            if self.bound >= self._least(best_value):
                return
            pipeline, raised = self._plan_chain(chain, bounds)
            if pipeline is not None:
                self._keep(pipeline)
            if not raised or self.limits.expired():
                return

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
        return self.pipeline.value.seconds(period, period, self.micro.count)

    def _keep_simple(self) -> None:
        """Keep a pipeline of stages of about equal work, whose plans are the best ones in the time left."""
        chain = least_slowest(self._simple_problem())
        if chain is None:
            return
        buffered = self.pipeline.value.is_buffered(self.micro.count)
        stages = []
        for stage in chain.stages:
            cluster = self.clusters[stage.part]
            part, options = self._part(stage, cluster, None)
            try:
                plan = part.plan(cluster, options, self.limits, self.rules, buffered).plan.stages[0]
            except (InfeasibleError, SolverError) as error:
                self.errors.append(error)
                return
            stages.append(PlannedStage(self._operators(stage), stage.part, cluster, plan))
        self._keep(self._result(stages, 0.0))

    def _simple_problem(self) -> ChainProblem:
        """Make a problem in which a stage takes its operators' time on one device, divided by its devices.

        Messages take no time, and arrive in one spec.
        """
        model = PredictedCost(self.cluster)
        sizes = {symbol.name: symbol.size for symbol in self.micro.symbols}
        seconds = [
            math.fsum(model.local(self.view.operators[number], sizes) for number in unit.operators)
            for unit in self.units
        ]
        until = np.concatenate([[0.0], np.cumsum(seconds)])
        runs = (until[None, :] - until[:-1, None])[:, :, None]
        runs[np.tril_indices(len(seconds), 0, len(seconds) + 1)] = np.inf
        sent = np.zeros((len(seconds), 1))
        sent[0] = np.inf
        return ChainProblem(
            self.cluster.mesh.size,
            self.starts,
            {part: runs / part.size for part in self.clusters},
            lambda part, other: sent,
            lambda part, streams: np.zeros_like(sent),
            self._delivered,
            self.allowed,
        )

    def _bounds(self, limits: Limits) -> dict[Cluster, StageBounds]:
        """Bound the stages on each kind of sub-mesh."""
        return {
            cluster: StageBounds(
                self.view,
                self.units,
                frozenset(self.crossing),
                cluster,
                self.given,
                self.options.mem_budget,
                self.options.unequal_parts,
                limits,
                self.rules,
            )
            for cluster in dict.fromkeys(self.clusters.values())
        }

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
        objective, waits = self.pipeline.value, self.pipeline.value.slowest(self.micro.count)
        if objective.through and waits:
            batched = least_batch(problem, waits + 1, self.options.solver_gap / 2)
            return None if batched is None else (batched.chain, batched.bound)
        chain = least_slowest(problem) if waits else least_sum(problem)
        return None if chain is None else (chain, objective.seconds(chain.total, chain.slowest, self.micro.count))

    def _plan_chain(self, chain: Chain, bounds: Mapping[Cluster, StageBounds]) -> tuple[PipelineResult | None, bool]:
        """Plan the stages of a chain. Returns the pipeline, if all can be planned, and whether any bound was raised."""
        raised = False
        stages: list[PlannedStage] = []
        unfit: list[InfeasibleError] = []
        for stage in chain.stages:
            cluster = self.clusters[stage.part]
            stage_bounds = bounds[cluster]
            key = self._key(stage, cluster, stage_bounds)
            known = key in self._planned
            result = self._plan(key, stage, cluster, stage_bounds)
            if not known:
                raised = True
                proven = math.inf if isinstance(result, InfeasibleError) else result.bound_seconds
                stage_bounds.raise_to(list(self._equal_runs(stage)), stage.arrival, proven)
                if isinstance(result, SearchResult) and result.second_per_byte:
                    stage_bounds.price(result.second_per_byte)
            if isinstance(result, InfeasibleError):
                unfit.append(result)
            else:
                stages.append(PlannedStage(self._operators(stage), stage.part, cluster, result.plan.stages[0]))
        if unfit:
            enough = max(error.least_budget for error in unfit)
            self.sufficient_bytes = min(enough, self.sufficient_bytes or enough)
        return (self._result(stages, 0.0) if len(stages) == len(chain.stages) else None), raised

    def without_budget(self) -> ChainSearch:
        """Make the same search as if memory were unlimited."""
        options = replace(self.options, mem_budget=MOST_BYTES // 2)
        return ChainSearch(self.micro, self.cluster, options, self.pipeline, self.limits, self.rules)

    def held_bytes(self, pipeline: PipelineResult) -> int:
        """Compute the peak bytes of a device of a pipeline of this search, with the buffers of micro-batches."""
        held, buffered = [], self.pipeline.value.is_buffered(self.micro.count)
        for one in pipeline.stages:
            part = StagePart.of(self.view, one.operators, one.cluster.mesh)
            specs = [tensor.spec for tensor in one.plan.inputs]
            buffers = part.buffer_bytes(one.cluster.mesh, specs) if buffered else 0
            held.append(max(live_bytes(part.view, one.plan, one.cluster.device.places_shards)) + buffers)
        return max(held)

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

    def _plan(
        self, key: Hashable, stage: ChainStage, cluster: Cluster, bounds: StageBounds
    ) -> SearchResult | InfeasibleError:
        """Plan a stage as a separate graph; return the error if nothing fits its memory budget."""
        arrivals = bounds.arrivals[stage.begin]
        part, options = self._part(stage, cluster, arrivals[stage.arrival] if arrivals else None)
        return self._plan_once(key, part, cluster, options, bounds.rules)

    def _part(
        self, stage: ChainStage, cluster: Cluster, arrival: TensorShardSpec | None
    ) -> tuple[StagePart, SearchOptions]:
        """Cut a stage out of the graph, with the options of its search; its data arrives in a spec, or replicated."""
        part = StagePart.of(self.view, self._operators(stage), cluster.mesh)
        given = self.given.of_part(self.view, part.names, part.view, self._operators(stage), cluster.mesh)
        entering = part.names.get(self.units[stage.begin].entering)
        specs = list(given.input_specs or [None] * len(part.view.inputs))
        for n, name in enumerate(part.view.inputs):
            if name == entering:
                specs[n] = arrival
        options = replace(
            self.options,
            pins={pin.name: pin.pattern for pin in given.parsed},
            input_specs=specs,
            output_specs=given.output_specs,
        )
        return part, options

    def _operators(self, stage: ChainStage) -> range:
        return range(self.units[stage.begin].operators.start, self.units[stage.end - 1].operators.stop)


def _check_run(number: int, stage: StageConstraint, begins: Sequence[int], needed: Mapping[int, str]) -> None:
    """Raise ConfigError unless the operators that are given of a stage can be cut out, and include those ``needed``.

    ``begins`` are the operators before which the graph can be cut, and its end; ``needed`` maps operators to the
    stage's weights that they read.
    """
    assert stage.operators is not None
    given = f"stages[{number}]['operators'] = {list(stage.operators)}"
    for place in stage.operators:
        if place > begins[-1]:
            raise ConfigError(f"{given}: the graph has the operators 0 to {begins[-1] - 1}.")
        if place not in begins:
            raise ConfigError(f"{given}: the graph cannot be cut before operator {place}; it can be {cuts_at(begins)}.")
    for operator, weight in needed.items():
        if weight and not stage.operators[0] <= operator < stage.operators[1]:
            raise ConfigError(
                f"stages[{number}]['weights'] = {list(stage.weights)} contradicts its 'operators' = "
                f"{list(stage.operators)}: operator {operator}, which is not among them, reads {weight!r}."
            )


def _keep_runs(runs: npt.NDArray[np.bool_], number: int, units: Sequence[Collection[int]]) -> None:
    """Keep the runs [first unit, end] of a stage that have its units and none of another stage, in order."""
    for other, needed in enumerate(units):
        for unit in needed:
            if other == number:
                inside = np.zeros_like(runs)
                inside[: unit + 1, unit + 1 :] = True
                runs &= inside
            elif other < number:
                runs[: unit + 1] = False
            else:
                runs[:, unit + 1 :] = False
