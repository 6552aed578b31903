"""The calls that make plans, programs and artifacts from the user's graph.

Each call normalizes the graph once (:mod:`hidet_dist.normalize`). The packages below take only normal graphs.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import hidet
from hidet.graph import FlowGraph, Tensor

from hidet_dist.compile import Backend, CompiledProgram, compile_program
from hidet_dist.config import DistributedConfig, OptimizationConfig
from hidet_dist.cost.model import CostModel
from hidet_dist.errors import ConfigError, InfeasibleError, MemoryBudgetWarning, OverBudgetError, PlanError
from hidet_dist.export.write import check_destination, replacing, write_artifacts, write_weights
from hidet_dist.frugal import copies_in_one_thread, older_objects_kept
from hidet_dist.machine import Cluster
from hidet_dist.normalize import NormalGraph, normalize
from hidet_dist.normalize.precision import in_precision
from hidet_dist.overlap.planned import resident_bytes
from hidet_dist.partitioning import Program, partition_graph, stage_graphs
from hidet_dist.partitioning.proof import prove, prove_specs
from hidet_dist.pipeline import (
    PipelineOptions,
    plan_given,
    search_pipeline,
    search_pipeline_family,
    stage_cluster,
)
from hidet_dist.pipeline.given import with_seconds
from hidet_dist.progress import Progress
from hidet_dist.report.collect import collect
from hidet_dist.report.data import Report
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search import SearchOptions, search, search_shares
from hidet_dist.search.family import Family, FamilyMember, Specs
from hidet_dist.search.family import search_family as search_normal_family
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.search.limits import Clock
from hidet_dist.search.pairwise import encode, save_problem
from hidet_dist.search.planner import formulate_problem, memory_budget
from hidet_dist.search.problem import Problem
from hidet_dist.search.recost import check_budget, recost_stage
from hidet_dist.search.refine import cluster_of
from hidet_dist.spec import Plan, StagePlan
from hidet_dist.spec.interface import Interface, interface_of, names_of_io
from hidet_dist.spec.pipeline import is_buffered
from hidet_dist.spec.symbols import SymbolPlan
from hidet_dist.targets import targets_with
from hidet_dist.view import GraphView
from hidet_dist.weights import Layout, SafetensorsFiles, UnevenLayout, check_weights

_TOLERATED = 0.01  # share of the memory budget by which a program may exceed it
_MOST_TRIES = 3  # plans that are built before that of least memory


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
    request = _Request.of("auto_parallel", graph, distributed_config, optimization_config)
    request.target.check_compiler()
    if plan is not None:
        request.check_given(plan)
    destination = check_destination(out_dir, request.optimization.recompile)
    with older_objects_kept(), copies_in_one_thread(), Progress() as progress:
        build = request.prepared()
        files = build.weight_files()
        check_weights(build.view().tensors.values(), files)
        begin = time.perf_counter()
        if plan is None:
            plan, built, planned = build.build_within_budget(destination, files, progress)
        else:
            plan, planned = build.given_plan(plan), time.perf_counter()
            built = build.build(plan, destination, files, progress)
    done = time.perf_counter()
    return AutoParallelResult(
        plan,
        Path(out_dir),
        [line for program, _ in built for line in program.communications()],
        [stage.weight_bytes_of(rank) for stage in plan.stages for rank in range(stage.mesh.size)],
        [compiled.held_bytes for _, compiled in built],
        sum(weight.nbytes for stage in plan.stages for weight in stage.weights),
        plan.makespan_seconds,
        planned - begin,
        done - planned,
    )


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
    build = _Request.of("make_plan", graph, distributed_config, optimization_config).prepared()
    files = build.weight_files()
    if files is not None:
        check_weights(build.view().tensors.values(), files)
    with Progress() as progress:
        return build.plan(progress)


def export_problem(
    graph: FlowGraph,
    distributed_config: Mapping[str, Any],
    optimization_config: Mapping[str, Any] | None,
    path: str | Path,
) -> float:
    """Write the problem that :func:`make_plan` solves for the given mesh, in the format of google/iopddl.

    Its costs are integers. Returns the seconds of one unit of them, which the problem's name in the file says too.

    Raises
    ------
    ConfigError
        For unknown keys and unfit values, and for pipelines, which are planned as many problems.
    ProblemError
        When a cost is not finite.
    """
    build = _Request.of("export_problem", graph, distributed_config, optimization_config).prepared()
    with Progress() as progress, progress.task("Exporting"):
        encoded = encode(build.problem())
        save_problem(encoded.problem, path, f"costs in {encoded.unit_seconds:.0e} s")
    return encoded.unit_seconds


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
    return describe_stages(plan, graph, distributed_config, optimization_config, title)[stage]


def describe_stages(
    plan: Plan,
    graph: FlowGraph,
    distributed_config: Mapping[str, Any],
    optimization_config: Mapping[str, Any] | None = None,
    title: str = "",
) -> list[Report]:
    """Collect the data of the reports on all stages of a plan; parameters and errors are those of :func:`describe`."""
    build = _Request.of("describe", graph, distributed_config, optimization_config).prepared()
    return build.reports(plan, title)


class Replanner:
    """A graph that is prepared once, and planned again for every choice of pins.

    The parameters are those of :func:`make_plan`, and the ``title`` of its reports.

    Raises
    ------
    ConfigError
        For unknown keys and unfit values.
    """

    def __init__(
        self,
        graph: FlowGraph,
        distributed_config: Mapping[str, Any],
        optimization_config: Mapping[str, Any] | None = None,
        title: str = "",
    ):
        self._given = dict(optimization_config or {})
        prepared = _Request.of("Replanner", graph, distributed_config, self._given).prepared()
        # The rules do not depend on pins. They are derived for the first plan.
        rules = None if prepared.symbols else RuleTable(prepared.cluster.mesh)
        self._prepared = replace(prepared, rules=rules)
        self._title = title

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the graph, as in plans and reports of one stage."""
        return self._prepared.view().fingerprint()

    def report(self, pins: Mapping[str, str], clock: Clock = time.perf_counter) -> Report:
        """Search the plan with these pins and those of the configuration; return its report.

        The time limit is counted by ``clock``, in seconds. Once it returns infinity, the search ends.

        Raises
        ------
        ConfigError, InfeasibleError, SolverError
            As :func:`make_plan`.
        """
        pinned = {**self._given, "pins": {**(self._given.get("pins") or {}), **pins}}
        build = replace(self._prepared, optimization=OptimizationConfig.parse(pinned))
        with Progress() as progress:
            return build.reports(build.plan(progress, clock), self._title)[0]


@dataclass(frozen=True)
class _Request:
    """The user's graph and configuration, checked."""

    graph: FlowGraph
    distributed: DistributedConfig
    optimization: OptimizationConfig
    target: Backend

    @classmethod
    def of(
        cls,
        call: str,
        graph: FlowGraph,
        distributed_config: Mapping[str, Any],
        optimization_config: Mapping[str, Any] | None,
    ) -> _Request:
        """Check the arguments of the public call ``call``. Raises ConfigError."""
        optimization = OptimizationConfig.parse({} if optimization_config is None else optimization_config)
        distributed = DistributedConfig.parse(distributed_config, optimization.default_machine)
        target = optimization.target_on(distributed.cluster.device)
        given = optimization.given_stages or ()
        if given and distributed.mesh.is_uneven():
            raise ConfigError(
                "The stages are given whole, each with a mesh of its own: give 'shares' in each of "
                "optimization_config['stages'] instead of distributed_config['shares']."
            )
        uneven = any(stage.mesh.is_uneven() or stage.searches_shares for stage in given)
        if uneven or distributed.mesh.is_uneven() or distributed.searches_shares:
            _check_shares(target, optimization)
        if not isinstance(graph, FlowGraph):
            raise ConfigError(f"{call} takes a hidet FlowGraph; got a {type(graph).__name__}.")
        return cls(graph, distributed, optimization, target)

    @property
    def symbols(self) -> tuple[SymbolPlan, ...]:
        """The declared symbolic dims."""
        return tuple(size.of(name) for name, size in self.optimization.symbols.items())

    def check_given(self, plan: Any) -> None:
        """Refuse a given plan that contradicts the configuration. Raises ConfigError or PlanError."""
        if not isinstance(plan, Plan):
            raise PlanError(f"auto_parallel takes a Plan (see Plan.load) as plan; got a {type(plan).__name__}.")
        steering = ("pins", "input_specs", "output_specs", "stages", "objective")
        for key, default in (*((key, None) for key in steering), ("mode", "search")):
            if getattr(self.optimization, key) != default:
                raise ConfigError(
                    f"optimization_config[{key!r}] is for the search, which a given plan replaces: leave one of the "
                    "two out."
                )
        if plan.pipeline is not None and not self.target.record.symbolic_pipelines and plan.stages[0].symbols:
            raise ConfigError(
                "Pipelines of graphs with symbolic dims are so far for the target "
                f"{targets_with('symbolic_pipelines')!r}, not for {self.target.record.name!r}: "
                "give a plan of one stage, or of the graph traced for one size."
            )
        for stage in plan.stages:
            if stage.mesh.is_uneven():
                _check_shares(self.target, self.optimization)
        declared = {symbol.name: symbol for symbol in self.symbols}
        count = 1 if plan.pipeline is None else plan.pipeline.micro_batches
        for symbol in (symbol for stage in plan.stages for symbol in stage.symbols):
            whole = declared.setdefault(symbol.name, symbol)
            if symbol not in (whole, whole.cut(count)):  # a pipeline's symbols are those of one micro-batch
                raise PlanError(
                    f"The plan is for the symbolic dim {symbol.name} of size {symbol.size}, a multiple of "
                    f"{symbol.multiple_of}; optimization_config['symbols'] declares another."
                )

    def prepared(self) -> _Build:
        """Convert the graph to the requested precision, normalize it, and rewrite it for the target."""
        traced, names = self.graph, {**names_of_io(self.graph), **self.optimization.names}
        if self.optimization.precision is not None:
            half = in_precision(traced, self.optimization.precision)
            traced, names = half.graph, {name: half.weights.get(x, x) for name, x in names.items()}
        graph, replaced = self.target.prepare(normalize(traced), self.distributed.mesh.size)
        names = {name: replaced.get(x, x) for name, x in names.items()}
        interface = interface_of(self.graph)
        return _Build(graph, names, self.distributed, self.optimization, self.target, self.symbols, interface)


def _check_shares(target: Backend, optimization: OptimizationConfig) -> None:
    """Refuse shares of mesh axes where they are not offered. Raises ConfigError."""
    if not target.record.shares:
        raise ConfigError(
            f"Shares of mesh axes are not supported on the target {target.record.name!r}: leave 'shares' out of "
            "distributed_config and of its stages."
        )
    if optimization.symbols:
        raise ConfigError(
            "Shares of mesh axes are for graphs of fixed sizes: leave out 'shares', or trace the graph for one size "
            f"instead of the symbolic dims {', '.join(optimization.symbols)}."
        )


@dataclass(frozen=True)
class _Build:
    """A normal graph, the user's names of its tensors, and the machine and target to plan and build it for."""

    graph: NormalGraph
    names: Mapping[str, Tensor]
    distributed: DistributedConfig
    optimization: OptimizationConfig
    target: Backend
    symbols: tuple[SymbolPlan, ...]
    interface: Interface | None
    rules: RuleTable | None = None  # shared by the searches of a graph without symbolic dims

    @property
    def cluster(self) -> Cluster:
        """The machine."""
        return self.distributed.cluster

    def view(self) -> GraphView:
        """View the graph as numbered operators and named tensors."""
        return GraphView(self.graph, self.symbols, self.distributed.mesh)

    def weight_files(self) -> SafetensorsFiles | None:
        """Open the files of the weights' data; None if none are configured."""
        paths = self.optimization.weights
        return None if paths is None else SafetensorsFiles.open(paths)

    def plan(self, progress: Progress, clock: Clock = time.perf_counter) -> Plan:
        """Search the plan of least predicted time; ``clock`` counts the seconds of the time limit."""
        with progress.task("Planning") as planning:

            def show(seconds: float, bound: float) -> None:
                planning.say(f"Planning: best {seconds * 1e3:.3f} ms, lower bound {bound * 1e3:.3f} ms")

            options = replace(self.optimization.search_options(), clock=clock)
            given = self.optimization.given_stages
            if given is not None:
                if self.distributed.searches_shares:
                    given = tuple(replace(one, searches_shares=not one.mesh.is_uneven()) for one in given)
                return plan_given(
                    self.graph,
                    self.cluster,
                    given,
                    replace(options, names=self.names, on_incumbent=show),
                    micro_batches=self.optimization.micro_batches or 1,
                    results=self.optimization.outputs,
                )
            pipeline = self.optimization.pipeline_options()
            if pipeline is not None:
                pipeline = replace(pipeline, shares=self.distributed.searches_shares)
                result = search_pipeline(self.graph, self.cluster, options, pipeline, names=self.names)
                return result.plan(self.cluster, pipeline)
            if self.distributed.searches_shares:
                shared = replace(options, names=self.names, on_incumbent=show)
                return search_shares(self.graph, self.cluster, shared)
            return search(self.graph, self.cluster, options, rules=self.rules, names=self.names, on_incumbent=show)

    def problem(self) -> Problem:
        """Formulate the problem that the search solves. Raises ConfigError for a pipeline."""
        optimization = self.optimization
        if optimization.given_stages is not None or optimization.pipeline_options() is not None:
            raise ConfigError("A pipeline is planned as many problems; export a plan without stages.")
        return formulate_problem(self.graph, self.cluster, optimization.search_options(), names=self.names)

    def reports(self, plan: Plan, title: str = "") -> list[Report]:
        """Collect the data of a report on each stage, without measured times."""
        reports = []
        for stage, graph in self.stages(plan):
            known = None if stage.report is None else stage.report.without_times()
            cluster = self.cluster_of(stage, graph, plan)
            reports.append(collect(replace(stage, report=known), graph, cluster, title, self.optimization.mem_budget))
        return reports

    def given_plan(self, plan: Plan) -> Plan:
        """Prove a plan from the user, and derive its conversions and costs for the machine.

        Raises
        ------
        PlanError
            When it is not proven.
        InfeasibleError
            When it does not fit the memory budget.
        """
        stages = []
        for stage, graph in self.stages(plan):
            cluster = self.cluster_of(stage, graph, plan)
            stages.append(recost_stage(stage, graph, cluster))
            check_budget(stages[-1], graph, cluster, self.optimization.mem_budget)
        given = None if plan.pipeline is None else replace(plan.pipeline, search=None)
        return Plan(tuple(stages), None if given is None else with_seconds(given, stages, self.cluster))

    def cluster_of(self, stage: StagePlan, graph: NormalGraph, plan: Plan) -> Cluster:
        """Return the machine, or the part of it, that a stage of a plan is for."""
        if plan.pipeline is not None:
            ranks = plan.pipeline.stages[plan.stages.index(stage)].ranks
            return stage_cluster(self.cluster, stage.mesh, ranks)
        return cluster_of(stage, graph, self.cluster)

    def stages(self, plan: Plan) -> list[tuple[StagePlan, NormalGraph]]:
        """Pair each stage of a plan with its graph. Raises PlanError."""
        return list(zip(plan.stages, stage_graphs(plan, self.graph), strict=True))

    def build_within_budget(
        self, destination: Path, files: SafetensorsFiles | None, progress: Progress
    ) -> tuple[Plan, list[tuple[Program, CompiledProgram]], float]:
        """Search plans and build them until a program fits the memory budget; return it, and when its plan was made.

        What the program of a plan holds beside what was predicted is left free by the next plan, and the last one is
        the plan of least memory. Its program decides where no plan is predicted to fit, too: programs differ from
        predictions by the alignment of buffers and by what kernels are fused.

        Raises
        ------
        InfeasibleError
            When no plan fits, or no program.
        """
        budget = allowed = tried = memory_budget(self.cluster, self.optimization.mem_budget)
        over: OverBudgetError | None = None
        for number in itertools.count(1):
            unfit: InfeasibleError | None = None
            try:
                plan = self._plan_within(allowed, progress) if over else self.plan(progress)
            except InfeasibleError as error:
                if over is not None and error.least_budget >= tried:
                    raise over from error
                unfit, allowed = error, error.least_budget
                plan = self._plan_within(allowed, progress)
            tried, planned = allowed, time.perf_counter()
            try:
                return plan, self.build(plan, destination, files, progress), planned
            except OverBudgetError as error:
                if unfit is not None:  # this was the plan of least memory
                    raise unfit if error.least_budget <= unfit.least_budget else error from None
                over = error
                allowed = max(1, budget - error.excess_bytes) if number < _MOST_TRIES else 1
        raise AssertionError("there is always a next number")

    def _plan_within(self, nbytes: int, progress: Progress) -> Plan:
        """Search a plan that is predicted to hold at most ``nbytes``; its report has the memory budget nevertheless."""
        plan = replace(self, optimization=replace(self.optimization, mem_budget=nbytes)).plan(progress)
        budget = memory_budget(self.cluster, self.optimization.mem_budget)
        stages = [
            stage
            if stage.report is None
            else replace(stage, report=replace(stage.report, mem_budget=stage.report.mem_budget + budget - nbytes))
            for stage in plan.stages
        ]
        return replace(plan, stages=tuple(stages))

    def build(
        self, plan: Plan, destination: Path, files: SafetensorsFiles | None, progress: Progress
    ) -> list[tuple[Program, CompiledProgram]]:
        """Build the programs of a plan, and write the artifacts.

        Raises
        ------
        OverBudgetError
            When a program holds more than the memory budget; the folder is then unchanged.
        """
        # The interface is the whole model's; stages that are served each by itself have none.
        interface = self.interface if len(plan.stages) == 1 or plan.pipeline is not None else None
        with replacing(destination) as folder:
            built = [
                self.build_stage(
                    plan, number, graph, files, interface, progress, partial(write_weights, folder, number)
                )
                for number, (_, graph) in enumerate(self.stages(plan))
            ]
            with progress.task("Writing"):
                write_artifacts(folder, plan, built, self.target, self.reports(plan), weights_written=True)
        return built

    def build_stage(
        self,
        plan: Plan,
        number: int,
        graph: NormalGraph,
        files: SafetensorsFiles | None,
        interface: Interface | None,
        progress: Progress,
        write: Callable[[Program, Mapping[str, Layout | UnevenLayout]], None],
    ) -> tuple[Program, CompiledProgram]:
        """Partition and compile the graph of a stage; ``write`` writes its weights while compilers run."""
        stage = plan.stages[number]
        program = replace(partition_graph(graph, stage, files, self.target), interface=interface)
        overlap = stage.overlap if self.target.record.overlaps else None
        with progress.task("Compiling") as task:
            compiled = compile_program(
                program,
                self.target,
                task.total,
                task.advance,
                None if overlap is None else cluster_of(stage, graph, self.cluster),
                None if overlap is None else max(0, overlap.held_bytes - resident_bytes(stage)),
                partial(write, program),
                partial(self._check_held, plan, number, graph),
            )
        return program, compiled

    def _check_held(self, plan: Plan, number: int, graph: NormalGraph, nbytes: int) -> None:
        """Compare the bytes that the program of a stage holds with the memory budget.

        Raises
        ------
        OverBudgetError
            When they are more, by more than ``_TOLERATED``.
        """
        stage = plan.stages[number]
        cluster = self.cluster_of(stage, graph, plan)
        budget = memory_budget(cluster, self.optimization.mem_budget)
        if plan.pipeline is not None:
            found = plan.pipeline.search
            if is_buffered("latency" if found is None else found.objective, plan.pipeline.micro_batches):
                nbytes += sum(tensor.local_nbytes(stage.mesh) for tensor in stage.inputs)  # of the next micro-batch
        if nbytes <= budget:
            return
        predicted = max(live_bytes(prove_specs(stage, graph).view, stage, cluster.device.places_shards))
        said = f"The program holds {nbytes} bytes a device, where {predicted} were predicted; mem_budget is {budget}."
        if nbytes > budget * (1 + _TOLERATED):
            raise OverBudgetError(f"{said} Give at least {nbytes} bytes, or more devices.", nbytes, nbytes - predicted)
        warnings.warn(said, MemoryBudgetWarning, stacklevel=2)


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
    if not isinstance(plan, Plan):
        raise PlanError(f"partition takes a Plan (see Plan.load); got a {type(plan).__name__}.")
    if not 0 <= stage < len(plan.stages):
        raise PlanError(f"The plan has the stages 0 to {len(plan.stages) - 1}; there is no stage {stage}.")
    files = None if weights is None else SafetensorsFiles.open(weights)
    return partition_graph(stage_graphs(plan, normalize(graph))[stage], plan.stages[stage], files)


def validate_plan(plan: Plan, graph: FlowGraph) -> None:
    """Check that a plan computes a graph: every spec is proven, and no conversion is missing.

    Raises
    ------
    PlanError
        Naming the operator or the tensor, and what is wrong with it.
    """
    for stage, stage_graph in zip(plan.stages, stage_graphs(plan, normalize(graph)), strict=True):
        prove(stage, stage_graph)


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
    clusters = [cluster] * len(plan.stages) if isinstance(cluster, Cluster) else list(cluster)
    if len(clusters) != len(plan.stages):
        raise ConfigError(f"The plan has {len(plan.stages)} stages; recost was given {len(clusters)} machines.")
    graphs = stage_graphs(plan, normalize(graph))
    stages = tuple(
        recost_stage(stage, stage_graph, machine, cost_model)
        for stage, stage_graph, machine in zip(plan.stages, graphs, clusters, strict=True)
    )
    return replace(plan, stages=stages)


def search_family(
    graphs: Sequence[FlowGraph],
    cluster: Cluster,
    weights: Sequence[float] | None = None,
    options: SearchOptions | None = None,
    *,
    names: Sequence[Any] | Any = None,
    pins: Sequence[Mapping[str, Any] | None] | None = None,
    input_specs: Sequence[Specs] | None = None,
    output_specs: Sequence[Specs] | None = None,
    cost_model: CostModel | None = None,
    pipeline: PipelineOptions | None = None,
    **changes: Any,
) -> Family:
    """Find the layout of shared weights, and a plan for each graph, of least weighted sum of predicted times.

    Weights are shared where graphs have the same tensor, or tensors of the same name in ``names``. They are held once.

    Parameters
    ----------
    graphs: sequence of FlowGraph
        The graphs as traced.
    cluster: Cluster
        The machine, with the mesh to plan for.
    weights: sequence of float, optional
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
    factors = [1.0] * count if weights is None else list(map(float, weights))
    if len(factors) != count or not all(factor > 0 and math.isfinite(factor) for factor in factors):
        raise ConfigError(f"weights must have a number above 0 for each of the {count} graphs; got {weights!r}.")
    one_for_all = names is None or isinstance(names, Mapping | hidet.nn.Module)
    names_of_graphs = [names] * count if one_for_all else _one_per_graph("names", names, count)
    # The same graph twice is normalized once, so that its weights are shared.
    normal = {id(graph): normalize(graph) for graph in graphs}
    members = [
        FamilyMember(normal[id(graph)], factor, *given)
        for graph, factor, *given in zip(
            graphs,
            factors,
            names_of_graphs,
            _one_per_graph("pins", pins, count),
            _one_per_graph("input_specs", input_specs, count),
            _one_per_graph("output_specs", output_specs, count),
            strict=True,
        )
    ]
    if pipeline is None:
        return search_normal_family(members, cluster, options, cost_model)
    if cost_model is not None:
        raise ConfigError("A search for pipelines has the predicted costs: leave out cost_model, or pipeline.")
    return search_pipeline_family(members, cluster, options, pipeline)


def _one_per_graph(what: str, values: Any, count: int) -> list[Any]:
    """Check that there is a value for each graph; None stands for none at all. Raises ConfigError."""
    if values is None:
        return [None] * count
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != count:
        raise ConfigError(f"{what} must be a list with an entry for each of the {count} graphs; got {values!r}.")
    return list(values)
