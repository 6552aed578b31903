"""The base of searches for several stages, which keeps the best pipeline and a lower bound of all others."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import replace

from hidet_dist.errors import InfeasibleError, SolverError
from hidet_dist.machine import Cluster, Device
from hidet_dist.machine.slices import MeshSlice, devices_along, slices_at, sub_cluster
from hidet_dist.partitioning.micro_batches import MicroBatchGraph
from hidet_dist.pipeline.options import PipelineOptions
from hidet_dist.pipeline.stages import (
    PipelineResult,
    PlannedStage,
    StageMessage,
    StagePart,
    delivered_seconds,
    objective_seconds,
    pipeline_of,
)
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search import FamilyMember, SearchOptions
from hidet_dist.search.limits import Limits, OutOfTimeError
from hidet_dist.search.result import SearchResult
from hidet_dist.search.shares import proposed_shares
from hidet_dist.symbolic.planning import planning_view


class StageSearch(ABC):
    """A search for several stages, for one number of micro-batches.

    Attributes
    ----------
    slices: the slices of the mesh that begin at each rank, with those that have proposed shares.
    best: the best pipeline so far; None before there is one.
    bound: a lower bound of the value of all pipelines of the search; infinite if there are none.
    errors: the errors of stages that cannot be planned.
    """

    def __init__(
        self,
        micro: MicroBatchGraph,
        cluster: Cluster,
        options: SearchOptions,
        pipeline: PipelineOptions,
        limits: Limits,
        rules: RuleTable,
    ):
        self.micro, self.cluster, self.pipeline, self.limits = micro, cluster, pipeline, limits
        self.options = replace(options, symbols=micro.declared)
        self.rules = rules
        self.view = planning_view(micro.graph, micro.declared, cluster.mesh)
        self.slices = self._slices()
        self.best: PipelineResult | None = None
        self.bound = 0.0
        self.errors: list[InfeasibleError | SolverError] = []
        self._planned: dict[Hashable, SearchResult | InfeasibleError] = {}
        self._prepare()

    def _slices(self) -> dict[int, list[MeshSlice]]:
        """List the slices that begin at each rank; with shares to search, also those of proposed shares."""
        mesh = self.cluster.mesh
        slices = {rank: slices_at(mesh, rank) for rank in range(mesh.size)}
        if not self.pipeline.searches_shares:
            return slices
        known: dict[tuple[Device, ...], list[tuple[int, ...]]] = {}
        member = FamilyMember(self.micro.graph, symbols=self.micro.declared)
        for rank, parts in slices.items():
            for part in list(parts):
                devices = tuple(devices_along(self.cluster, sub_cluster(self.cluster, part).mesh, part.start))
                if devices not in known:
                    known[devices] = proposed_shares([member], devices)
                slices[rank] += [replace(part, shares=shares) for shares in known[devices]]
        return slices

    @abstractmethod
    def _prepare(self) -> None:
        """Set up the state of the particular search. Raises ConfigError for contradictory constraints."""

    def search(self, best_value: float) -> PipelineResult | None:
        """Find the best pipeline; None if none is better than ``best_value`` by more than the gap.

        If the time limit is reached, or a stage's solver fails, this is the best pipeline so far.
        """
        try:
            self._search(best_value)
        except OutOfTimeError:
            pass
        except SolverError as error:
            self.errors.append(error)
        return self.best

    @abstractmethod
    def _search(self, best_value: float) -> None:
        """Find the best pipeline. ``best`` and ``bound`` are valid whenever an error is raised."""

    def _least(self, best_value: float) -> float:
        """Return the value that a pipeline must be better than: less than the best one's by the gap."""
        best = math.inf if self.best is None else self.best.value
        return min(best_value, best) * (1 - self.options.solver_gap)

    def _keep(self, pipeline: PipelineResult) -> None:
        """Keep a pipeline if it is the best one."""
        if self.best is None or pipeline.value < self.best.value:
            self.best = pipeline

    def _plan_once(
        self, key: Hashable, part: StagePart, cluster: Cluster, options: SearchOptions, rules: RuleTable
    ) -> SearchResult | InfeasibleError:
        """Plan a stage, or return the plan of the stage of the same key; return the error if nothing fits.

        Raises
        ------
        SolverError
            When the time limit was reached before there was a plan.
        """
        if key not in self._planned:
            buffered = self.pipeline.value.is_buffered(self.micro.count)
            try:
                self._planned[key] = part.plan(cluster, options, self.limits, rules, buffered)
            except InfeasibleError as error:
                self._planned[key] = error
                self.errors.append(error)
        return self._planned[key]

    def _delivered(self, last: MeshSlice) -> float:
        """Predict the seconds to send the outputs from the last stage to the ranks of the others."""
        return delivered_seconds(self.view, self.cluster, self.pipeline, last)

    def _value(self, seconds: Sequence[float], messages: Sequence[StageMessage], last: MeshSlice) -> float:
        """Compute the objective's value of stages of such seconds, the last of which is on the slice ``last``."""
        return objective_seconds(self.pipeline.value, self.micro.count, seconds, messages, self._delivered(last))

    def _result(self, stages: Sequence[PlannedStage], bound: float) -> PipelineResult:
        """Make the pipeline of planned stages; ``bound`` is a lower bound of its value with any plans of its stages."""
        return pipeline_of(self.micro, self.cluster, self.pipeline, stages, bound)
