"""The public calls: short walks along the values of :mod:`hidet_dist.phases`, from a traced graph to artifacts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hidet
from hidet.graph import FlowGraph

from hidet_dist.cost.model import CostModel
from hidet_dist.errors import ConfigError, PlanError
from hidet_dist.export.write import check_destination, replacing
from hidet_dist.frugal import copies_in_one_thread, older_objects_kept
from hidet_dist.machine import Cluster
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import Program
from hidet_dist.partitioning.program import partition_proven
from hidet_dist.phases import Compiled, Planned, Prepared, Traced
from hidet_dist.phases.budget import build_within_budget
from hidet_dist.phases.family import CompiledFamily, PlannedFamily, TracedFamily
from hidet_dist.phases.staged import StagedGraph
from hidet_dist.pipeline import PipelineOptions
from hidet_dist.pipeline.planning import Planning, find_plans
from hidet_dist.progress import Progress
from hidet_dist.report.data import Report
from hidet_dist.search import FamilyMember, SearchOptions, SearchResult
from hidet_dist.search.request import Specs
from hidet_dist.spec import Plan
from hidet_dist.weights import SafetensorsFiles


@dataclass(frozen=True)
class AutoParallelResult:
    """The plan that ``auto_parallel`` built, and its figures.

    Attributes
    ----------
    plan: the plan; ``plan.table()`` shows it, ``plan.explain()`` explains the choice.
    out_dir: the artifact folder.
    communications: one line for each communication operator of the programs, in execution order.
    weight_bytes_per_rank: bytes of weights that each rank holds.
    held_bytes_per_stage: bytes that a device of each stage holds as built: weights, inputs, outputs, constants, and the
        workspace of activations; at most 1 % more than the memory budget.
    total_weight_bytes: bytes of the whole weights of all stages.
    predicted_seconds: predicted time of one run.
    plan_seconds, compile_seconds: time spent planning, and partitioning, compiling and writing.
    """

    plan: Plan
    out_dir: Path
    communications: list[str]
    weight_bytes_per_rank: list[int]
    held_bytes_per_stage: list[int]
    total_weight_bytes: int
    predicted_seconds: float
    plan_seconds: float
    compile_seconds: float


def auto_parallel(
    graph: FlowGraph,
    distributed_config: Mapping[str, Any],
    optimization_config: Mapping[str, Any] | None,
    out_dir: str | Path,
    plan: Plan | None = None,
) -> AutoParallelResult:
    """Plan, partition and compile a graph for a device mesh, and write artifacts for ``load_partition``.

    Parameters
    ----------
    graph: FlowGraph
        The graph as traced (not yet optimized), on the CPU; its weights are constants, or ``hidet.distributed.weight``,
        whose data is read when the artifacts are written. Its symbolic dims are declared in
        ``optimization_config["symbols"]``.
    distributed_config: mapping
        See :class:`hidet_dist.config.DistributedConfig` for the keys; ``{"mesh_shape": [2]}`` is enough.
    optimization_config: mapping, optional
        See :class:`hidet_dist.config.OptimizationConfig`.
    out_dir: str or Path
        The artifact folder. It is replaced atomically at the end of the build; after a failure it is unchanged.
    plan: Plan, optional
        The plan to build, such as an edited plan of :func:`make_plan`; by default one is searched. Its specs are
        proven by the rules that the search uses. Its conversions and predicted costs are derived anew for the machine.

    Raises
    ------
    ConfigError
        For unknown keys and unfit values, before work starts.
    ArtifactError
        When ``out_dir`` has content other than artifacts.
    WeightsError
        When a weight that the graph knows by name has no data, another shape or another dtype; before planning.
    PlanError
        When ``plan`` is of another graph, mesh or declaration of symbolic dims, or a spec of it is not proven.
    InfeasibleError
        When no plan fits the memory budget, or ``plan`` does not, as predicted or as built; it states a sufficient
        budget. Where the program of a searched plan takes more than predicted, and does not fit, other plans are tried.
    SolverError, PartitionError, CompileError
        When a stage fails.

    Warns
    -----
    MemoryBudgetWarning
        When a program takes more than the memory budget, by 1 % at most.
    """
    return build_traced(Traced.of(graph, distributed_config, optimization_config), out_dir, plan)


def build_traced(
    traced: Traced, out_dir: str | Path, plan: Plan | None = None, changed: Callable[[Prepared], Prepared] | None = None
) -> AutoParallelResult:
    """Do what :func:`auto_parallel` does with a graph whose configurations were checked. Raises as it does.

    ``changed`` may change the graph in normal form before it is planned, such as cut it into stages.
    """
    traced.target.check_compiler()
    if plan is not None:
        traced.check_plan(plan)
    destination = check_destination(out_dir, traced.optimization.recompile)
    planned_at = time.perf_counter()
    with older_objects_kept(), copies_in_one_thread(), Progress() as progress:
        prepared = traced.prepare()
        if changed is not None:
            prepared = changed(prepared)
        prepared.check_weights()
        begin = time.perf_counter()

        def build(planned: Planned) -> Compiled:
            nonlocal planned_at
            planned_at = time.perf_counter()
            with replacing(destination) as folder:
                compiled = planned.partition().compile(folder, progress)
                compiled.write(folder, progress)
            return compiled

        compiled = build_within_budget(prepared, build, progress) if plan is None else build(prepared.take(plan))
    done = time.perf_counter()
    plan, programs = compiled.plan, compiled.partitioned.programs
    return AutoParallelResult(
        plan,
        Path(out_dir),
        [line for program in programs for line in program.communications()],
        [stage.weight_bytes_of(rank) for stage in plan.stages for rank in range(stage.mesh.size)],
        [one.held_bytes for one in compiled.stages],
        sum(weight.nbytes for stage in plan.stages for weight in stage.weights),
        plan.makespan_seconds,
        planned_at - begin,
        done - planned_at,
    )


@dataclass(frozen=True)
class FamilyResult:
    """The plans that ``build_family`` built, and their figures.

    Attributes
    ----------
    plans: the plan of each program, by its name.
    out_dir: the artifact folder.
    weight_bytes_per_rank: bytes of weights that each rank holds, for all programs.
    held_bytes_per_stage: bytes that a device of each stage holds as built: the weights of all programs, and the most of
        inputs, outputs, constants and activations that one of them takes; at most 1 % more than the memory budget.
    predicted_seconds: the weighted sum of the predicted times of one run of each program.
    gap: the relative gap between the search's sum and its lower bound.
    plan_seconds, compile_seconds: time spent planning, and partitioning, compiling and writing.
    """

    plans: dict[str, Plan]
    out_dir: Path
    weight_bytes_per_rank: list[int]
    held_bytes_per_stage: list[int]
    predicted_seconds: float
    gap: float
    plan_seconds: float
    compile_seconds: float


def build_family(
    graphs: Mapping[str, FlowGraph],
    distributed_config: Mapping[str, Any],
    optimization_config: Mapping[str, Any] | None,
    out_dir: str | Path,
    programs: Mapping[str, Mapping[str, Any]] | None = None,
) -> FamilyResult:
    """Plan and compile several graphs that share weights, and write one folder with a program for each of them.

    Each weight is stored once, in one spec, and a process that loads the folder has it once, for all programs. Weights
    are shared where graphs have the same tensor, tensors of the same name, or constants of equal elements.

    Parameters
    ----------
    graphs: mapping of str to FlowGraph
        The graphs as traced, by the names of their programs, such as ``prefill`` and ``decode``.
    distributed_config, optimization_config: mapping
        As for :func:`auto_parallel`. They hold for all programs: ``mem_budget`` is for all of them together, and
        ``symbols`` declares the symbolic dims of any of them.
    out_dir: str or Path
        The artifact folder. It is replaced atomically at the end of the build; after a failure it is unchanged.
    programs: mapping, optional
        For a program, by its name, any of ``pins``, ``input_specs``, ``output_specs``, ``names`` (as in
        ``optimization_config``), ``symbols``, which declares sizes that it alone has, and ``frequency``: the factor of
        its time in the sum that is minimized, 1 by default. A pin of a shared weight holds for all programs.

    Raises
    ------
    ConfigError
        For unknown keys and unfit values, and where weights of one name differ in shape or dtype.
    ArtifactError
        When ``out_dir`` has content other than artifacts.
    WeightsError
        When a weight that a graph knows by name has no data, another shape or another dtype; before planning.
    InfeasibleError
        When no plans fit the memory budget together, as predicted or as built.
    SolverError, PartitionError, CompileError
        When a stage fails.

    Warns
    -----
    MemoryBudgetWarning
        When a program takes more than the memory budget, by 1 % at most.
    """
    traced = TracedFamily.of(graphs, distributed_config, optimization_config, programs)
    first = next(iter(traced.members.values()))
    first.target.check_compiler()
    destination = check_destination(out_dir, first.optimization.recompile)
    planned_at = time.perf_counter()
    with older_objects_kept(), copies_in_one_thread(), Progress() as progress:
        prepared = traced.prepare()
        prepared.check_weights()
        begin = time.perf_counter()

        def build(planned: PlannedFamily) -> CompiledFamily:
            nonlocal planned_at
            planned_at = time.perf_counter()
            compiled = planned.partition().compile(progress)
            with replacing(destination) as folder:
                compiled.write(folder)
            return compiled

        compiled = build_within_budget(prepared, build, progress)
    done, planned = time.perf_counter(), compiled.partitioned.planned
    return FamilyResult(
        {name: one.plan for name, one in planned.members.items()},
        Path(out_dir),
        compiled.weight_bytes_per_rank(),
        compiled.held_bytes_per_stage(),
        planned.predicted_seconds,
        planned.found.gap,
        planned_at - begin,
        done - planned_at,
    )


@older_objects_kept()
def make_plan(
    graph: FlowGraph,
    distributed_config: Mapping[str, Any],
    optimization_config: Mapping[str, Any] | None = None,
) -> Plan:
    """Plan a graph as :func:`auto_parallel` does with the same arguments, and build nothing.

    Weights by name need no data; if ``optimization_config["weights"]`` names their files, the files are checked to have
    them. No compiler is needed.

    Raises
    ------
    ConfigError
        For unknown keys and unfit values, before work starts.
    WeightsError
        When the named files lack a weight, or have it in another shape or dtype.
    InfeasibleError
        When no plan fits the memory budget; it states the least sufficient budget.
    SolverError
        When the solver fails, or has no plan within the time limit.
    """
    prepared = Traced.of(graph, distributed_config, optimization_config).prepare()
    prepared.check_weights(required=False)
    return prepared.plan().plan


def describe(
    plan: Plan,
    graph: FlowGraph,
    distributed_config: Mapping[str, Any],
    optimization_config: Mapping[str, Any] | None = None,
    title: str = "",
    stage: int = 0,
) -> Report:
    """Collect the data of a report on a plan, to save (``describe(...).save("plan.report.json")``) or render.

    Parameters
    ----------
    plan: Plan
        The plan, made by :func:`make_plan` with the same graph and configurations.
    title: str
        The title of the page.
    stage: int
        The number of the stage.

    Raises
    ------
    ConfigError
        For unknown keys and unfit values.
    PlanError
        When the plan is of another graph or mesh, or has no such stage.
    """
    if not isinstance(plan, Plan) or not 0 <= stage < len(plan.stages):
        raise PlanError(
            f"describe takes a Plan and the number of one of its stages; got {type(plan).__name__}, {stage}."
        )
    prepared = Traced.of(graph, distributed_config, optimization_config).prepare()
    return Planned(prepared, plan).reports(title)[stage]


def partition(
    graph: FlowGraph, plan: Plan, weights: str | Path | Sequence[str | Path] | None = None, stage: int = 0
) -> Program:
    """Turn a graph into the SPMD program that one stage of a plan describes, without compiling it.

    ``weights`` are the safetensors files, the index or the folder with the graph's weights by name; without them the
    program has no data. ``stage`` is the number of the stage.

    Raises
    ------
    PlanError
        When ``plan`` is not a Plan, has no such stage, was made for another graph, or is not proven to compute it.
    PartitionError
        When an operator cannot run on the shards that the plan gives it.
    WeightsError
        When ``weights`` lack one of the graph's, or have it in another shape or dtype.
    """
    staged = StagedGraph.of(graph, plan)
    files = None if weights is None else SafetensorsFiles.open(weights)
    return partition_proven(staged.prove(stage), files)


def validate_plan(plan: Plan, graph: FlowGraph) -> None:
    """Check that a plan computes a graph: every spec is proven, and no conversion is missing.

    Raises
    ------
    PlanError
        Naming the operator or the tensor, and what is wrong with it.
    """
    StagedGraph.of(graph, plan).prove_all()


def recost(
    plan: Plan, graph: FlowGraph, cluster: Cluster | Sequence[Cluster], cost_model: CostModel | None = None
) -> Plan:
    """Derive the conversions that a plan's specs need, and predict all costs again.

    Parameters
    ----------
    cluster: Cluster or sequence of Cluster
        The machine, with the mesh of every stage, or the machine of each stage.
    cost_model: CostModel, optional
        The costs of the parts of a plan; by default predicted for the machine.

    Raises
    ------
    PlanError
        When the plan is of another graph or mesh, or a spec is not one that its operator or tensor can have.
    ConfigError
        When there is not one machine for each stage.
    """
    staged = StagedGraph.of(graph, plan)
    clusters = [cluster] * len(plan.stages) if isinstance(cluster, Cluster) else list(cluster)
    if len(clusters) != len(plan.stages):
        raise ConfigError(f"The plan has {len(plan.stages)} stages; recost was given {len(clusters)} machines.")
    return replace(plan, stages=tuple(proven.stage for proven in staged.recost(clusters, cost_model)))


def search_family(
    graphs: Sequence[FlowGraph],
    cluster: Cluster,
    frequencies: Sequence[float] | None = None,
    options: SearchOptions | None = None,
    *,
    names: Sequence[Any] | Any = None,
    pins: Sequence[Mapping[str, Any] | None] | None = None,
    input_specs: Sequence[Specs] | None = None,
    output_specs: Sequence[Specs] | None = None,
    cost_model: CostModel | None = None,
    pipeline: PipelineOptions | None = None,
    **changes: Any,
) -> SearchResult:
    """Find the layout of shared weights, and a plan for each graph, of least weighted sum of predicted times.

    Weights are shared where graphs have the same tensor, or tensors of the same name in ``names``. They are held once.

    Parameters
    ----------
    graphs: sequence of FlowGraph
        The graphs as traced.
    cluster: Cluster
        The machine, with the mesh to plan for.
    frequencies: sequence of float, optional
        The factor of each graph's time in the sum, above 0; 1 each when not given.
    options: SearchOptions, optional
        As for :func:`hidet_dist.search.search`; ``mem_budget`` is for the weights of all graphs together. Names, pins
        and specs are given for each graph instead.
    names: Module, mapping of names to tensors, or a sequence of these, one per graph; optional
        The user's names of tensors; a single one is for all graphs, as when they are traced from one module.
    pins, input_specs, output_specs: sequences, optional
        As for :func:`hidet_dist.search.search`, one per graph. A pin of a shared weight holds for all graphs.
    cost_model: CostModel, optional
        The cost of the parts of a plan; predicted for the cluster when not given.
    pipeline: PipelineOptions, optional
        The options of a search for pipelines. The pipelines have one cut: the operators that read a shared weight are
        in the same stage of each, on the same ranks. The objective's values are summed. Costs are the predicted ones.
    changes:
        Fields of the options, by name, that differ from ``options``.

    Raises
    ------
    ConfigError
        When the arguments do not fit the graphs, or weights of one name differ in shape or dtype.
    InfeasibleError
        When no plans fit the budget.
    SolverError
        When the solver fails, or has no plans within the time limit.

    Warns
    -----
    SearchLimitWarning
        When the time limit was reached, and the plans are the best ones until then.
    """
    options = SearchOptions.of(options, changes)
    count = len(graphs)
    each = [1.0] * count if frequencies is None else list(map(float, frequencies))
    if len(each) != count or not all(factor > 0 and math.isfinite(factor) for factor in each):
        raise ConfigError(
            f"frequencies must have a number above 0 for each of the {count} graphs; got {frequencies!r}."
        )
    one_for_all = names is None or isinstance(names, Mapping | hidet.nn.Module)
    names_of_graphs = [names] * count if one_for_all else _one_per_graph("names", names, count)
    # The same graph twice is normalized once, so that its weights are shared.
    normal = {id(graph): normalize(graph) for graph in graphs}
    members = [
        FamilyMember(normal[id(graph)], factor, *given)
        for graph, factor, *given in zip(
            graphs,
            each,
            names_of_graphs,
            _one_per_graph("pins", pins, count),
            _one_per_graph("input_specs", input_specs, count),
            _one_per_graph("output_specs", output_specs, count),
            strict=True,
        )
    ]
    return find_plans(members, Planning(cluster, options, pipeline), cost_model)


def _one_per_graph(what: str, values: Any, count: int) -> list[Any]:
    """Check that there is a value for each graph; None stands for none at all. Raises ConfigError."""
    if values is None:
        return [None] * count
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != count:
        raise ConfigError(f"{what} must be a list with an entry for each of the {count} graphs; got {values!r}.")
    return list(values)
