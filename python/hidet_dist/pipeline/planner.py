"""The search for a pipeline: cuts, slices of the mesh, specs and micro-batches together.

The candidates are one stage on the whole machine, stages one after the other (:mod:`hidet_dist.pipeline.chain_search`)
and independent branches side by side (:mod:`hidet_dist.pipeline.branches`), for each number of micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hidet_dist.compat.quick import quick_hidet
from hidet_dist.errors import ConfigError, HidetDistError, InfeasibleError, SolverError
from hidet_dist.machine import Cluster
from hidet_dist.machine.slices import MeshSlice
from hidet_dist.normalize import NormalGraph
from hidet_dist.partitioning.micro_batches import MicroBatchGraph, batch_dims, micro_batch, recut, refuse_states
from hidet_dist.pipeline.branches import BranchSearch, may_branch
from hidet_dist.pipeline.chain_search import ChainSearch
from hidet_dist.pipeline.options import PipelineOptions
from hidet_dist.pipeline.stage_search import StageSearch
from hidet_dist.pipeline.stages import PipelineResult, PlannedStage
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search import SearchOptions, search
from hidet_dist.search.limits import Limits, warn_of_limit
from hidet_dist.spec.symbols import SymbolPlan
from hidet_dist.view import graph_symbols

ONE_STAGE_FRACTION = 0.4  # of the time left that planning the whole graph may take before several stages are tried


@quick_hidet()
def search_pipeline(
    graph: NormalGraph,
    cluster: Cluster,
    options: SearchOptions | None = None,
    pipeline: PipelineOptions | None = None,
    *,
    rules: RuleTable | None = None,
    limits: Limits | None = None,
    **changes: Any,
) -> PipelineResult:
    """Find the best pipeline by the objective; one stage on the whole machine is among the candidates.

    Parameters
    ----------
    graph: the graph in normal form.
    cluster: the machine.
    options: the options of a search; the memory budget is each device's.
    pipeline: the objective, the micro-batches, the ranks of outputs, and the constraints on stages.
    rules: a table, for any mesh, with which rules and proofs are shared.
    limits: what is left to a search of which this one is a part, instead of the limits of the options. There is no
        warning then.
    changes: fields of ``options``, by name.

    Raises
    ------
    ConfigError
        When options or constraints do not fit the graph or the machine, or contradict each other.
    InfeasibleError
        When no pipeline fits the memory budget.
    SolverError
        When the time limit was reached before there was a plan.

    Warns
    -----
    SearchLimitWarning
        When the time limit was reached, and the pipeline is the best one until then.
    """
    options = SearchOptions.of(options, changes)
    pipeline = PipelineOptions() if pipeline is None else pipeline
    _check(options, pipeline, cluster)
    refuse_states(graph, "stages that keep them are not searched: give their operators as 'stages', or plan one stage.")
    warns, limits = limits is None, options.limits() if limits is None else limits.part(1.0)
    candidates = _Candidates(cluster, options, pipeline, limits, RuleTable(cluster.mesh, rules))
    candidates.search(graph)
    best = candidates.proven_best()
    if warns:
        warn_of_limit(limits, best.gap)
    return best


class _Candidates:
    """The candidates of a search, for each number of micro-batches: the best one, and what is known of the others.

    Attributes
    ----------
    best: the best pipeline so far; None before there is one.
    bound: a lower bound of the value of all candidates so far; infinite if there are none.
    """

    def __init__(
        self, cluster: Cluster, options: SearchOptions, pipeline: PipelineOptions, limits: Limits, rules: RuleTable
    ):
        self._cluster, self._options, self._pipeline, self._limits = cluster, options, pipeline, limits
        self._rules = rules
        self._several = pipeline.stages != 1 and cluster.mesh.size > 1
        self.best: PipelineResult | None = None
        self.bound = math.inf
        self._errors: list[InfeasibleError | SolverError] = []
        self._enough: list[int] = []  # memory budgets that suffice for pipelines that do not fit the given one
        self._chains: ChainSearch | None = None  # the last one
        self._least_batch = 0.0  # a lower bound of the value of pipelines, for more micro-batches than one

    def search(self, graph: NormalGraph) -> None:
        """Search for each number of micro-batches, until further ones can be no better, or the time is over."""
        symbols = tuple(size.of(name) for name, size in self._options.symbols.items())
        proven: MicroBatchGraph | None = None  # a symbolic batch, cut
        for count in _counts(graph, self._pipeline, symbols):
            if self.best is not None and self._least_batch >= self.best.value * (1 - self._options.solver_gap):
                self.bound = min(self.bound, self._least_batch)
                break
            if self.best is not None and self._limits.expired():
                self.bound = 0.0
                break
            try:
                if proven is None:
                    micro = micro_batch(graph, count, None, symbols, self._rules)
                else:
                    micro = recut(proven, count, symbols)
            except ConfigError:
                if self._pipeline.micro_batches is not None or count == 1:
                    raise
                if symbols:
                    break  # an operator mixes the batch, in any number of parts
                continue  # an operator mixes the batch
            if symbols and count > 1:
                proven = micro
            if self._pipeline.stages in (None, 1) and (count == 1 or self._pipeline.micro_batches is not None):
                self._try_one_stage(micro)
            if self._several:
                self._try_stages(micro)

    def _try_one_stage(self, micro: MicroBatchGraph) -> None:
        try:
            found = _one_stage(
                micro, self._cluster, self._options, self._pipeline, self._limits, self._several, self._rules
            )
        except InfeasibleError as error:
            self._errors.append(error)
            self._enough.append(error.least_budget)
        except SolverError as error:
            self.bound = 0.0  # one stage has no proven bound
            self._errors.append(error)
        else:
            self._take(found)
            self.bound = min(self.bound, found.bound_seconds)

    def _try_stages(self, micro: MicroBatchGraph) -> None:
        """Search for stages one behind the other, and, where none are given, for branches side by side."""
        searches: list[type[StageSearch]] = [ChainSearch]
        if self._pipeline.stages is None:
            searches.append(BranchSearch)
        for kind in searches:
            stages = kind(micro, self._cluster, self._options, self._pipeline, self._limits, self._rules)
            pipelined = stages.search(math.inf if self.best is None else self.best.value)
            if isinstance(stages, ChainSearch):
                self._chains = stages
                if micro.count == 1 and _is_subadditive(stages, self._cluster):
                    self._least_batch = stages.least_period
                if stages.sufficient_bytes is not None:
                    self._enough.append(stages.sufficient_bytes)
            self.bound = min(self.bound, stages.bound)
            self._errors += stages.errors
            if pipelined is not None:
                self._take(pipelined)

    def _take(self, found: PipelineResult) -> None:
        if self.best is None or found.value < self.best.value:
            self.best = found

    def proven_best(self) -> PipelineResult:
        """Return the best pipeline with the bound of all; raises the error that tells most where there is none."""
        if self.best is not None:
            bound, late = min(self.bound, self.best.value), self._limits.time_reached
            return replace(self.best, bound_seconds=bound, time_limit_reached=late)
        unsolved = [error for error in self._errors if isinstance(error, SolverError)]
        if unsolved:  # what it might have found is not known to be over the budget
            raise unsolved[0]
        if self._errors and not self._several:
            raise self._errors[0]
        assert self._chains is not None  # without several stages there is a plan or an error
        raise _unfit(self._enough, self._chains)


def _unfit(enough: Sequence[int], chains: ChainSearch) -> HidetDistError:
    """Make the error where no pipeline fits the memory, with the least budget that is known to suffice.

    ``enough`` are such budgets. Without them, chains of stages are searched as if memory were unlimited.
    """
    budget = chains.options.mem_budget
    given = "the memory of the devices" if budget is None else f"mem_budget = {budget} bytes"
    if not enough:
        unlimited = chains.without_budget()
        found = unlimited.search(math.inf)
        if found is None and chains.limits.expired():
            return SolverError(f"No pipeline that fits {given} was found within the time limit.")
        if found is None:
            return ConfigError("The graph has no pipeline of the stages that are given.")
        enough = [unlimited.held_bytes(found)]
    least = min(enough)
    return InfeasibleError(
        f"No pipeline that fits {given} was found: {least} bytes a device suffice, and fewer may. Give at least "
        f"{least} bytes, or more devices.",
        least,
    )


def _is_subadditive(stages: ChainSearch, cluster: Cluster) -> bool:
    """Tell whether a stage's period for the whole batch is at most the sum of those for its parts.

    The costs of messages and of operators by the roofline are: an overhead, plus the greatest of terms that are
    proportional to the batch or constant. So are those of measured kernels, unless a part of the activations fits a
    cache that the whole does not fit. With branches, there are pipelines that are no chains of stages.
    """
    view = stages.view
    if stages.pipeline.stages is None and may_branch(view):
        return False
    devices = (cluster.device, *(group.device for group in cluster.groups))
    caches = [device.cache_bytes for device in devices if device.kernels]
    weights = set(view.weights)
    # What a kernel moves at most: its outputs count twice, for lookups and copies read as much as they write.
    moved = (
        sum(view.nbytes(name) for name in (view.names[x] for x in op.inputs) if name not in weights)
        + 2 * sum(view.nbytes(view.names[y]) for y in op.outputs)
        for op in view.operators
    )
    copied = (2 * view.nbytes(name) for name in view.tensors if name not in weights)
    return not caches or max((*moved, *copied)) <= min(caches)


def _check(options: SearchOptions, pipeline: PipelineOptions, cluster: Cluster) -> None:
    """Raise ConfigError for options with which several stages cannot be searched."""
    if pipeline.stages == 1 or cluster.mesh.size == 1:
        return
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


def _counts(graph: NormalGraph, pipeline: PipelineOptions, symbols: Sequence[SymbolPlan]) -> list[int]:
    """List the numbers of micro-batches to try."""
    if pipeline.micro_batches is not None:
        return [pipeline.micro_batches]
    if not pipeline.value.fills or pipeline.stages == 1:
        return [1]
    sizes = [x.shape[dim] for x, dim in zip(graph.inputs or [], batch_dims(graph), strict=False) if dim is not None]
    if graph_symbols(graph):
        units = {symbol.name: symbol.size // symbol.multiple_of for symbol in symbols}
        batch = units.get(str(sizes[0]), 1) if sizes else 1  # a batch of fixed size is not cut
    else:
        batch = math.gcd(*(int(size) for size in sizes)) if sizes else 1
    return [count for count in range(1, batch + 1) if batch % count == 0]


def _one_stage(
    micro: MicroBatchGraph,
    cluster: Cluster,
    options: SearchOptions,
    pipeline: PipelineOptions,
    limits: Limits,
    several: bool,
    rules: RuleTable,
) -> PipelineResult:
    """Plan the whole graph for the whole machine; with ``several``, some of the time is left to several stages."""
    part = limits.part(ONE_STAGE_FRACTION) if several else limits
    changed = replace(options, symbols=micro.declared, searches_shares=pipeline.searches_shares)
    result = search(micro.graph, cluster, changed, rules=rules, limits=part)
    stage = result.plan.stages[0]
    whole = MeshSlice(0, cluster.mesh.size)
    return PipelineResult(
        micro,
        (PlannedStage(range(len(stage.operators)), whole, cluster, stage),),
        (),
        0.0,
        pipeline.value.seconds(stage.seconds, stage.seconds, micro.count),
        pipeline.value.seconds(result.bound_seconds, result.bound_seconds, micro.count),
    )
