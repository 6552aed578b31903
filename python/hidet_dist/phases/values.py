"""The values on the way from a traced graph to artifacts: Traced, Prepared, Planned, Partitioned and Compiled.

::

    traced = Traced.of(graph, distributed_config, optimization_config)
    compiled = traced.prepare().plan().partition().compile()
    compiled.save("artifacts")

Each value has the one that it was made from, and prints as the text of what it has. Work whose result several phases
need is done once and kept: the graph is normalized by :meth:`Traced.prepare`, an operator's sharding rule is derived at
its first use and shared by all plans of a :class:`Prepared`, and a plan is proven by :attr:`Planned.proven`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from hidet.graph import FlowGraph, Tensor

from hidet_dist.artifacts import Manifest
from hidet_dist.artifacts.manifest import MAIN
from hidet_dist.compile import Backend, CompiledProgram, compile_program
from hidet_dist.compile.build import HeldOn
from hidet_dist.config import DistributedConfig, OptimizationConfig
from hidet_dist.errors import ConfigError, MemoryBudgetWarning, OverBudgetError
from hidet_dist.export.write import BuiltProgram, check_destination, replacing, write_artifacts, write_weights
from hidet_dist.machine import Cluster
from hidet_dist.machine.groups import with_memory_of_each
from hidet_dist.normalize import NormalGraph, normalize
from hidet_dist.normalize.expert_layers import join_expert_layers
from hidet_dist.normalize.precision import in_precision
from hidet_dist.normalize.storage import with_storages
from hidet_dist.options.planning import JOINED
from hidet_dist.overlap.planned import resident_bytes
from hidet_dist.partitioning import Program
from hidet_dist.partitioning.program import partition_proven
from hidet_dist.partitioning.proof import ProvenStage, check_conversions
from hidet_dist.partitioning.text import graph_lines
from hidet_dist.phases.checks import check_configurations, check_plan
from hidet_dist.phases.dump import Dump, choices_text, rules_text
from hidet_dist.phases.staged import StagedGraph
from hidet_dist.pipeline import stage_cluster
from hidet_dist.pipeline.given import with_seconds
from hidet_dist.pipeline.planning import Planning, find_plans, problem_of
from hidet_dist.progress import Progress, ProgressBar
from hidet_dist.report.collect import collect
from hidet_dist.report.data import Report
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search.formulation.devices import limiting_devices_of, memory_budget, with_budget
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.search.formulation.pins import parse_pins
from hidet_dist.search.limits import Clock
from hidet_dist.search.options import SearchOptions
from hidet_dist.search.pairwise import encode, save_problem
from hidet_dist.search.recost import check_budget
from hidet_dist.search.refine import cluster_of
from hidet_dist.spec import Plan, StagePlan
from hidet_dist.spec.interface import interface_of, names_of_io
from hidet_dist.spec.storage import WeightStorage
from hidet_dist.spec.symbols import SymbolPlan, within_limits
from hidet_dist.symbolic.planning import planning_view, rule_table
from hidet_dist.view import GraphView
from hidet_dist.weights import SafetensorsFiles, StoredLayout, check_weights
from hidet_dist.weights.named import is_weight
from hidet_dist.weights.panels import STORED, StoredPrecision
from hidet_dist.weights.stored_groups import stored_precision_of

_TOLERATED = 0.01  # fraction of the memory budget by which a program may exceed it
_MICROSECONDS = 1e6  # per second


@dataclass(frozen=True, repr=False)
class Traced:
    """A graph as traced, and the configurations to plan and build it for, which are checked.

    Attributes
    ----------
    graph: the graph, not yet optimized.
    distributed: the mesh and the machine.
    optimization: what is wanted of the plan and the program.
    target: the target that programs are compiled for.
    dump: writes the values that are made of the graph, if the environment asks for it.
    """

    graph: FlowGraph
    distributed: DistributedConfig
    optimization: OptimizationConfig
    target: Backend
    dump: Dump = field(default_factory=Dump, compare=False)

    @classmethod
    def of(
        cls,
        graph: FlowGraph,
        distributed_config: Mapping[str, Any],
        optimization_config: Mapping[str, Any] | None = None,
    ) -> Traced:
        """Check a graph and its two configurations, as :func:`hidet.distributed.auto_parallel` takes them.

        Raises
        ------
        ConfigError
            For unknown keys and unfit values.
        """
        optimization = OptimizationConfig.parse({} if optimization_config is None else optimization_config)
        distributed = DistributedConfig.parse(distributed_config, optimization.default_machine)
        if optimization.device_budgets is not None:
            cluster = with_memory_of_each(distributed.cluster, optimization.device_budgets)
            distributed = replace(distributed, cluster=cluster)
        target = optimization.target_on(distributed.cluster.device)
        check_configurations(distributed, optimization, target)
        if not isinstance(graph, FlowGraph):
            raise ConfigError(f"The graph to plan must be a hidet FlowGraph; got a {type(graph).__name__}.")
        optimization = replace(optimization, symbols=within_limits(graph, optimization.symbols))
        traced = cls(graph, distributed, optimization, target, Dump.begin())
        traced.dump("1-traced", traced.__str__)
        return traced

    @property
    def cluster(self) -> Cluster:
        """The machine."""
        return self.distributed.cluster

    @property
    def symbols(self) -> tuple[SymbolPlan, ...]:
        """The declared symbolic dims."""
        return tuple(size.of(name) for name, size in self.optimization.symbols.items())

    def search_options(self) -> SearchOptions:
        """The options of a search for what the target offers, without names."""
        return replace(self.optimization.search_options(), unequal_parts=self.target.record.unequal_parts)

    def check_plan(self, plan: Any) -> None:
        """Refuse a given plan that contradicts the configuration. Raises ConfigError or PlanError."""
        check_plan(plan, self.target, self.optimization, self.symbols)

    def prepare(self) -> Prepared:
        """Convert the graph to the requested precision, normalize it, rewrite it for the target, choose storages.

        Raises
        ------
        ConfigError
            When an operator has no form that the packages below take.
        """
        prepared = self.in_normal_form().with_storages()[0]
        self.dump("2-normal-form", prepared.__str__)
        return prepared

    def in_normal_form(self) -> Prepared:
        """Do what :meth:`prepare` does, but leave all weights in their own dtypes. Raises as it does."""
        traced, names = self.graph, {**names_of_io(self.graph), **self.optimization.names}
        if self.optimization.precision is not None:
            half = in_precision(traced, self.optimization.precision)
            traced, names = half.graph, {name: half.weights.get(x, x) for name, x in names.items()}
        normal = normalize(traced)
        if self.optimization.experts == JOINED:
            normal = join_expert_layers(normal)
        graph, replaced = self.target.prepare(normal, self.distributed.mesh.size)
        names = {name: replaced.get(x, x) for name, x in names.items()}
        return Prepared(self, graph, names, RuleTable(self.cluster.mesh))

    def __repr__(self) -> str:
        return f"Traced({_counts(self.graph)}; for {self.distributed.mesh} on {self.target.record.name})"

    def __str__(self) -> str:
        return _text(self.graph)


@dataclass(frozen=True, repr=False)
class Prepared:
    """A graph in normal form, with the user's names of its tensors.

    Attributes
    ----------
    traced: what it was made from.
    graph: the graph in normal form, which the packages below take.
    names: its tensors by the user's names.
    rules: the rules of its operators, and their proofs, which all of its plans share.
    """

    traced: Traced
    graph: NormalGraph
    names: Mapping[str, Tensor]
    rules: RuleTable

    def with_storages(
        self, excluded: Collection[Tensor] = (), tables: Collection[Tensor] | None = None
    ) -> tuple[Prepared, Mapping[Tensor, Tensor]]:
        """Give weights of products the configured storage, but for those that are ``excluded``.

        Those of ``tables``, by default the ones that lookups read, are held in their own dtype, too.

        Returns
        -------
        The graph with them, and the new tensor of each weight that has one.
        """
        traced, precision = self.traced, self.traced.optimization.weights.precision
        if precision is None:
            return self, {}

        def storage(x: Tensor, transposed: bool) -> WeightStorage | None:
            own: StoredPrecision | None = precision
            if precision.name == STORED:  # groups lie along the last dim
                own = stored_precision_of(x) if transposed else None
            return None if own is None else traced.target.storage(own, len(x.shape), transposed)

        stored = with_storages(self.graph, traced.target.record.quantized_dtypes, storage, excluded, tables)
        names = {name: x if x in stored.tables else stored.weights.get(x, x) for name, x in self.names.items()}
        return replace(self, graph=stored.graph, names=names), stored.weights

    @property
    def cluster(self) -> Cluster:
        """The machine."""
        return self.traced.cluster

    @property
    def mem_budget(self) -> int | None:
        """The configured memory budget of a device, in bytes; None for the device's memory."""
        return self.traced.optimization.mem_budget

    @cached_property
    def view(self) -> GraphView:
        """The graph as numbered operators and named tensors."""
        return GraphView(self.graph, self.traced.symbols, self.traced.distributed.mesh)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the graph, as in plans and reports of one stage."""
        return self.view.fingerprint()

    @cached_property
    def files(self) -> SafetensorsFiles | None:
        """The files of the weights' data; None if none are configured."""
        paths = self.traced.optimization.weights.files
        return None if paths is None else SafetensorsFiles.open(paths)

    def check_weights(self, required: bool = True) -> None:
        """Check that weights by name have data of their shapes and dtypes; without ``required``, only if files are set.

        Raises
        ------
        WeightsError
            When a weight has none, or has another shape or dtype.
        """
        if required or self.files is not None:
            check_weights(self.view.tensors.values(), self.files)

    def with_budget(self, nbytes: int) -> Prepared:
        """Return the same graph with another memory budget, in bytes, of the device that has the least.

        Those of all other devices change by as many bytes.
        """
        cluster, mem_budget = with_budget(self.cluster, self.mem_budget, nbytes)
        optimization = replace(self.traced.optimization, mem_budget=mem_budget)
        distributed = replace(self.traced.distributed, cluster=cluster)
        return replace(self, traced=replace(self.traced, optimization=optimization, distributed=distributed))

    def plan_within(self, nbytes: int, progress: Progress | None = None) -> Planned:
        """Search a plan that is predicted to hold at most ``nbytes``; its report has the memory budget nevertheless."""
        plan = self.with_budget(nbytes).plan(progress).plan
        budget = memory_budget(self.cluster, self.mem_budget)
        stages = [
            stage
            if stage.report is None
            else replace(stage, report=replace(stage.report, mem_budget=stage.report.mem_budget + budget - nbytes))
            for stage in plan.stages
        ]
        return Planned(self, replace(plan, stages=tuple(stages)))

    def with_pins(self, pins: Mapping[str, Any]) -> Prepared:
        """Return the same graph with pins besides those of the configuration.

        Raises
        ------
        ConfigError
            When a pin cannot be parsed, or the stages are given whole, each with pins of its own.
        """
        optimization = self.traced.optimization
        if optimization.given_stages is not None:
            raise ConfigError("The stages are given whole: pin the tensors of each stage in 'stages'.")
        parse_pins(pins, "pins")
        pinned = replace(optimization, pins={**(optimization.pins or {}), **pins})
        return replace(self, traced=replace(self.traced, optimization=pinned))

    def with_stages(self, stages: Sequence[Mapping[str, Any]]) -> Prepared:
        """Return the same graph, which is to be cut into stages that are given whole. Raises ConfigError."""
        traced = self.traced
        optimization = traced.optimization.with_stages(stages)
        check_configurations(traced.distributed, optimization, traced.target)
        return replace(self, traced=replace(traced, optimization=optimization))

    def plan(
        self, progress: Progress | None = None, clock: Clock = time.perf_counter, without: Collection[str] = ()
    ) -> Planned:
        """Search the plan of least predicted time; ``clock`` counts the seconds of the time limit.

        ``without`` names steps of the search that are left out: see :class:`hidet_dist.search.SearchOptions`.

        Raises
        ------
        InfeasibleError
            When no plan fits the memory budget; it states the least sufficient budget.
        SolverError
            When the solver fails, or has no plan within the time limit.
        """
        with _task(progress, "Planning") as task:

            def show(seconds: float, bound: float) -> None:
                task.say(f"Planning: best {seconds * 1e3:.3f} ms, lower bound {bound * 1e3:.3f} ms")

            planning = self._planning()
            options = replace(planning.options, clock=clock, on_incumbent=show, without=without)
            planning = replace(planning, options=options)
            self.write_rules()
            return self.with_plan(find_plans(self.graph, planning, rules=self.rules).plan)

    def write_rules(self) -> None:
        """Write the rules of the operators and their choices, if the environment asks for it."""
        self.traced.dump.once("3-rules", lambda: rules_text(self.view, self.rules))
        self.traced.dump.once("4-choices", self._choices)

    def _choices(self) -> str:
        mesh = self.traced.distributed.mesh
        view = planning_view(self.graph, self.traced.optimization.symbols, mesh)
        return choices_text(view, rule_table(view, mesh, self.rules))

    def with_plan(self, plan: Plan) -> Planned:
        """Return the graph with a plan that was searched, which is written if the environment asks for it."""
        planned = Planned(self, plan)
        self.traced.dump("5-plan", planned.__str__)
        return planned

    def export_problem(self, path: str | Path, progress: Progress | None = None) -> float:
        """Write the problem that the search solves for the given mesh, in the format of google/iopddl.

        Its costs are integers. Returns the seconds of one unit of them, which the problem's name in the file says too.

        Raises
        ------
        ConfigError
            For pipelines, which are planned as many problems.
        ProblemError
            When a cost is not finite.
        """
        with _task(progress, "Exporting"):
            encoded = encode(problem_of(self.graph, self._planning(), self.rules))
            save_problem(encoded.problem, path, f"costs in {encoded.unit_seconds:.0e} s")
        return encoded.unit_seconds

    def _planning(self) -> Planning:
        optimization, distributed = self.traced.optimization, self.traced.distributed
        given = optimization.given_stages
        if given is not None and distributed.searches_shares:
            given = tuple(replace(one, searches_shares=not one.mesh.is_uneven()) for one in given)
        return Planning(
            self.cluster,
            replace(self.traced.search_options(), names=self.names, searches_shares=distributed.searches_shares),
            optimization.pipeline_options() if given is None else given,
            optimization.micro_batches or 1,
            optimization.outputs,
        )

    def take(self, plan: Plan) -> Planned:
        """Take a plan from the user: derive its conversions and costs for the machine from specs that are proven.

        Raises
        ------
        ConfigError, PlanError
            When it contradicts the configuration, is of another graph or mesh, or is not proven.
        InfeasibleError
            When it does not fit the memory budget.
        """
        self.traced.check_plan(plan)
        given = Planned(self, plan)
        clusters = list(map(given.cluster_of, range(len(plan.stages))))
        proven = given.staged.recost(clusters)
        for derived, cluster in zip(proven, clusters, strict=True):
            check_budget(derived.view, derived.stage, cluster, self.mem_budget)
            check_conversions(derived)
        stages = tuple(one.stage for one in proven)
        pipeline = None if plan.pipeline is None else replace(plan.pipeline, search=None)
        whole = Plan(stages, None if pipeline is None else with_seconds(pipeline, stages, self.cluster))
        planned = Planned(self, whole, proven)
        self.traced.dump("5-plan", planned.__str__)
        return planned

    def __repr__(self) -> str:
        return f"Prepared({_counts(self.graph)}; from {self.traced!r})"

    def __str__(self) -> str:
        return _text(self.graph)


@dataclass(frozen=True, repr=False)
class Planned:
    """A plan of a graph.

    Attributes
    ----------
    prepared: what it was made from.
    plan: the plan.
    """

    prepared: Prepared
    plan: Plan
    _proven: tuple[ProvenStage, ...] | None = field(default=None, compare=False)

    @cached_property
    def staged(self) -> StagedGraph:
        """The graph with the plan alone."""
        return StagedGraph(self.prepared.graph, self.plan, self.prepared.rules)

    @property
    def graphs(self) -> tuple[NormalGraph, ...]:
        """The graph of each stage. Raises PlanError when the plan is of another graph."""
        return self.staged.graphs

    @cached_property
    def proven(self) -> tuple[ProvenStage, ...]:
        """The stages, each proven to compute its graph. Raises PlanError when one is not."""
        return self.staged.prove_all() if self._proven is None else self._proven

    def cluster_of(self, number: int) -> Cluster:
        """Return the machine, or the part of it, that a stage is for."""
        stage, pipeline = self.plan.stages[number], self.plan.pipeline
        if pipeline is not None:
            return stage_cluster(self.prepared.cluster, stage.mesh, pipeline.stages[number].ranks)
        return cluster_of(stage, self.graphs[number], self.prepared.cluster, self.prepared.rules)

    def reports(self, title: str = "") -> list[Report]:
        """Collect the data of a report on each stage, without measured times.

        Raises
        ------
        PlanError
            When the plan is of another graph or mesh.
        """
        reports = []
        for number, (stage, graph) in enumerate(zip(self.plan.stages, self.graphs, strict=True)):
            known = None if stage.report is None else stage.report.without_times()
            described = replace(stage, report=known)
            reports.append(collect(described, graph, self.cluster_of(number), title, self.prepared.mem_budget))
        return reports

    def partition(self) -> Partitioned:
        """Make the program of each stage: rebuild operators on shards, cut weights, and add communication.

        Raises
        ------
        PlanError
            When the plan is not proven to compute the graph.
        PartitionError
            When an operator cannot be rebuilt on shards.
        WeightsError
            When the configured files lack a weight, or have it in another shape or dtype.
        """
        traced = self.prepared.traced
        interface = interface_of(traced.graph)
        programs = (partition_proven(stage, self.prepared.files, traced.target) for stage in self.proven)
        partitioned = Partitioned(self, tuple(replace(program, interface=interface) for program in programs))
        traced.dump("6-program", partitioned.__str__)
        return partitioned

    def __repr__(self) -> str:
        meshes = ", ".join(str(stage.mesh) for stage in self.plan.stages)
        seconds = self.plan.makespan_seconds * _MICROSECONDS
        return f"Planned(stages on {meshes}, {seconds:.1f} µs; from {self.prepared!r})"

    def __str__(self) -> str:
        return "\n".join(line for stage in self.plan.stages for line in _stage_lines(stage))


@dataclass(frozen=True, repr=False)
class Partitioned:
    """The program of each stage of a plan.

    Attributes
    ----------
    planned: what it was made from.
    programs: the program of each stage, the same for all of its ranks.
    """

    planned: Planned
    programs: tuple[Program, ...]

    def compile(
        self,
        folder: Path | None = None,
        progress: Progress | None = None,
        beside: Sequence[Sequence[int]] = (),
        in_rows: Sequence[Collection[str]] = (),
    ) -> Compiled:
        """Compile the programs, all of whose memory is compared with the memory budget first.

        Parameters
        ----------
        folder: Path, optional
            An empty folder, to which the weights of the ranks are written while compilers run.
        progress: Progress, optional
            The bars among which progress is shown.
        beside: sequence of sequences of int
            For each stage, the bytes that each of its ranks holds besides: weights of other programs. None by default.
        in_rows: sequence of collections of str
            For each stage, the weights that lie row by row, as other programs read them. None by default.

        Raises
        ------
        CompileError
            When there is no compiler for the target, or a kernel does not compile.
        OverBudgetError
            When a program holds more than the memory budget.
        ArtifactError
            When the disk lacks space for the weights.

        Warns
        -----
        MemoryBudgetWarning
            When a program takes more than the memory budget, by 1 % at most.
        """
        target, dump = self.planned.prepared.traced.target, self.planned.prepared.traced.dump
        target.check_compiler()
        compiled: list[CompiledProgram] = []
        for number, program in enumerate(self.programs):
            stage = self.planned.plan.stages[number]
            overlap = stage.overlap if target.record.overlaps else None
            write = {} if folder is None else {"meanwhile": partial(self._write_weights, folder, number)}
            with _task(progress, "Compiling") as task:
                one = compile_program(
                    program,
                    target,
                    task.total,
                    task.advance,
                    None if overlap is None else self.planned.cluster_of(number),
                    None if overlap is None else max(0, overlap.held_bytes - resident_bytes(stage)),
                    fits=partial(self._check_held, number, beside),
                    fused=partial(self._write_fused, number),
                    in_rows=in_rows[number] if in_rows else (),
                    **write,
                )
            compiled.append(one)
        result = Compiled(self, tuple(compiled), folder)
        dump("8-launches", result.__str__)
        return result

    def _write_fused(self, number: int, graph: FlowGraph) -> None:
        names = self.programs[number].input_names()
        named = {x: names[x] for x in graph.inputs or []}
        self.planned.prepared.traced.dump("7-fused", lambda: "\n".join(graph_lines(graph, named)))

    def _write_weights(self, folder: Path, number: int, layouts: Mapping[str, StoredLayout]) -> None:
        meshes = [program.mesh for program in self.programs]
        write_weights(folder, number, [(self.programs[number], layouts)], meshes)

    def _check_held(self, number: int, beside: Sequence[Sequence[int]], own: HeldOn) -> None:
        """Compare the bytes that devices of a stage hold, for its program and ``beside``, with the memory budget.

        Raises
        ------
        OverBudgetError
            When they are more, by more than ``_TOLERATED``. It names a budget that is predicted to suffice for the
            stages behind this one, too: each is compiled after the one before it.
        """
        cluster, mem_budget = self.planned.cluster_of(number), self.planned.prepared.mem_budget
        devices = limiting_devices_of(self.planned.plan.stages[number], cluster, mem_budget)
        held = {device: own(device.coordinate) + self._besides(number, beside, device.coordinate) for device in devices}
        fullest = max(devices, key=lambda device: held[device] - device.nbytes)
        nbytes, budget = held[fullest], fullest.nbytes
        if nbytes <= budget:
            return
        predicted = self._predicted_bytes(number, beside, fullest.coordinate)
        said = f"The program holds {nbytes} bytes {fullest}, where {predicted} were predicted; mem_budget is {budget}."
        if nbytes > budget * (1 + _TOLERATED):
            others = [self._predicted_bytes(n, beside) for n in range(number + 1, len(self.programs))]
            enough = max([memory_budget(cluster, mem_budget) + nbytes - budget, *others])
            raise OverBudgetError(f"{said} Give at least {enough} bytes, or more devices.", enough, nbytes - predicted)
        warnings.warn(said, MemoryBudgetWarning, stacklevel=2)

    def _predicted_bytes(
        self, number: int, beside: Sequence[Sequence[int]], coordinate: Sequence[int] | None = None
    ) -> int:
        """Return the bytes that a device of a stage holds for its plan, as predicted, and for others."""
        view, device = self.planned.proven[number].view, self.planned.cluster_of(number).device
        held = max(live_bytes(view, self.planned.plan.stages[number], device.places_shards, coordinate))
        return held + self._besides(number, beside, coordinate)

    def _besides(self, number: int, beside: Sequence[Sequence[int]], coordinate: Sequence[int] | None) -> int:
        """Return the bytes that a device holds besides a stage's program: ``beside``, and inputs for the next call.

        Those of the next micro-batch are received ahead of time.
        """
        plan, nbytes = self.planned.plan, 0
        stage = plan.stages[number]
        if beside:
            nbytes += max(beside[number]) if coordinate is None else beside[number][stage.mesh.rank(coordinate)]
        if plan.pipeline is not None and plan.pipeline.is_buffered:
            nbytes += sum(tensor.local_nbytes(stage.mesh, coordinate) for tensor in stage.inputs)
        return nbytes

    def __repr__(self) -> str:
        operators = ", ".join(str(len(program.graph.nodes)) for program in self.programs)
        return f"Partitioned(operators: {operators}; from {self.planned!r})"

    def __str__(self) -> str:
        return "\n".join(program.text().rstrip("\n") for program in self.programs)


@dataclass(frozen=True, repr=False)
class Compiled:
    """The programs of a plan as libraries.

    Attributes
    ----------
    partitioned: what it was made from.
    stages: the compiled program of each stage.
    weights_in: the folder to which the weights are written already; None if they are not.
    """

    partitioned: Partitioned
    stages: tuple[CompiledProgram, ...]
    weights_in: Path | None = None

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.partitioned.planned.plan

    def write(self, folder: Path, progress: Progress | None = None) -> Manifest:
        """Write the artifacts to a folder that is empty but for weights that :meth:`Partitioned.compile` wrote.

        Raises
        ------
        ArtifactError
            When the disk lacks space for the weights.
        """
        target = self.partitioned.planned.prepared.traced.target
        with _task(progress, "Writing"):
            return write_artifacts(folder, {MAIN: self.built()}, target, self.weights_in == folder)

    def built(self) -> BuiltProgram:
        """Return what is written of it: the plan, the programs of its stages, and the reports."""
        stages = list(zip(self.partitioned.programs, self.stages, strict=True))
        return BuiltProgram(self.plan, stages, self.partitioned.planned.reports())

    def save(self, out_dir: str | Path) -> Manifest:
        """Write the artifacts to ``out_dir``, which is replaced atomically; after a failure it is unchanged.

        Raises
        ------
        ArtifactError
            When ``out_dir`` has content other than artifacts, or cannot be written.
        """
        recompile = self.partitioned.planned.prepared.traced.optimization.recompile
        with replacing(check_destination(out_dir, recompile)) as folder:
            return self.write(folder)

    def __repr__(self) -> str:
        kernels = ", ".join(str(len(one.kernels)) for one in self.stages)
        return f"Compiled(kernels: {kernels}; from {self.partitioned!r})"

    def __str__(self) -> str:
        lines = []
        for one in self.stages:
            lines.append(f"kernels: {len(one.kernels)}, bytes a device: {one.held_bytes}")
            lines += [f"{launch.kernel}: {launch.communication or launch.output}" for launch in one.stage.launches]
        return "\n".join(lines)


@contextmanager
def _task(progress: Progress | None, what: str) -> Iterator[ProgressBar]:
    """Show ``what`` while the block runs, among the bars of ``progress`` or by itself."""
    if progress is not None:
        with progress.task(what) as task:
            yield task
    else:
        with Progress() as own, own.task(what) as task:
            yield task


def _inputs(graph: FlowGraph) -> list[Tensor]:
    return [x for x in graph.inputs or [] if not is_weight(x)]


def _counts(graph: FlowGraph) -> str:
    graph.update_nodes()
    return f"operators: {len(graph.nodes)}, inputs: {len(_inputs(graph))}, outputs: {len(graph.outputs)}"


def _text(graph: FlowGraph) -> str:
    """Write the operators of a graph, one a line; inputs are ``x0, x1, ...``, weights by name ``w0, w1, ...``."""
    graph.update_nodes()
    weights = [x for x in graph.inputs or [] if is_weight(x)]
    names = {x: f"x{number}" for number, x in enumerate(_inputs(graph))}
    return "\n".join(graph_lines(graph, {**names, **{x: f"w{number}" for number, x in enumerate(weights)}}))


def _stage_lines(stage: StagePlan) -> Iterator[str]:
    """Write a stage's specs: of inputs, weights and outputs, then of operators with their conversions."""
    yield f"plan on {stage.mesh}"
    for tensor in (*stage.inputs, *stage.weights, *stage.outputs):
        yield f"{tensor.name}: {tensor.spec}"
    for op in stage.operators:
        for conversion in op.conversions:
            yield f"{conversion.tensor}: {conversion.source} -> {conversion.target} by {', '.join(conversion.steps)}"
        yield f"{op.operator}: {op.spec}"
    for conversion in stage.output_conversions:
        yield f"{conversion.tensor}: {conversion.source} -> {conversion.target} by {', '.join(conversion.steps)}"
