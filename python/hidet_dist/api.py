"""The calls that make artifacts: ``auto_parallel``, and ``partition`` for those who bring a plan."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hidet.graph import FlowGraph

from hidet_dist.compile import compile_program
from hidet_dist.config import DistributedConfig, OptimizationConfig
from hidet_dist.errors import ConfigError, PlanError
from hidet_dist.export.write import check_destination, replacing, write_artifacts
from hidet_dist.normalize.precision import in_precision
from hidet_dist.overlap.planned import resident_bytes
from hidet_dist.partition import Program, partition_graph
from hidet_dist.progress import Progress
from hidet_dist.search import search
from hidet_dist.search.refine import cluster_of
from hidet_dist.spec import Plan
from hidet_dist.view import GraphView
from hidet_dist.weights import SafetensorsFiles, check_weights


@dataclass(frozen=True)
class AutoParallelResult:
    """What ``auto_parallel`` did.

    Attributes
    ----------
    plan: the plan; ``plan.table()`` shows it, ``plan.explain()`` says why it is what it is.
    out_dir: where the artifacts are.
    communications: one line for each communication operator of the program, in execution order.
    weight_bytes_per_rank: bytes of weights that each rank holds.
    total_weight_bytes: bytes of the whole graph's weights.
    predicted_seconds: predicted time of one run.
    plan_seconds, compile_seconds: time spent planning, and partitioning, compiling and writing.
    """

    plan: Plan
    out_dir: Path
    communications: list[str]
    weight_bytes_per_rank: list[int]
    total_weight_bytes: int
    predicted_seconds: float
    plan_seconds: float
    compile_seconds: float


def auto_parallel(
    graph: FlowGraph,
    distributed_config: Mapping[str, Any],
    optimization_config: Mapping[str, Any] | None,
    out_dir: str | Path,
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
        Where the artifacts go. It is replaced whole when the build is done, or left as it was.

    Raises
    ------
    ConfigError
        For unknown keys and unfit values, before work starts.
    ArtifactError
        When ``out_dir`` holds something else.
    WeightsError
        When a weight that the graph knows by name has no data, another shape or another dtype; before planning.
    InfeasibleError
        When no plan fits the memory budget; it states the least that would do.
    SolverError, PartitionError, CompileError
        When a stage fails.
    """
    optimization = OptimizationConfig.parse(optimization_config or {})
    distributed = DistributedConfig.parse(distributed_config, optimization.default_machine)
    target = optimization.target_on(distributed.cluster.device)
    target.check_compiler()
    if not isinstance(graph, FlowGraph):
        raise ConfigError(f"auto_parallel takes a hidet FlowGraph; got a {type(graph).__name__}.")
    place = check_destination(out_dir, optimization.recompile)
    names = optimization.names
    if optimization.precision is not None:
        half = in_precision(graph, optimization.precision)
        graph, names = half.graph, {name: half.weights.get(x, x) for name, x in names.items()}
    graph, replaced = target.prepare(graph, distributed.mesh.size)
    names = {name: replaced.get(x, x) for name, x in names.items()}
    files = None if optimization.weights is None else SafetensorsFiles.open(optimization.weights)
    symbols = [size.of(name) for name, size in optimization.symbols.items()]
    check_weights(GraphView(graph, symbols, distributed.mesh).tensors.values(), files)
    with Progress() as progress:
        begin = time.perf_counter()
        with progress.task("Planning") as planning:

            def show(seconds: float, bound: float) -> None:
                planning.say(f"Planning: {seconds * 1e3:.3f} ms, none below {bound * 1e3:.3f} ms")

            plan = search(graph, distributed.cluster, optimization.search_options(), names=names, on_incumbent=show)
        planned = time.perf_counter()
        program = partition_graph(graph, plan, files, target.device)
        with progress.task("Compiling") as task:
            overlap = plan.stage.overlap if target.overlaps else None
            compiled = compile_program(
                program,
                target,
                task.total,
                task.advance,
                None if overlap is None else cluster_of(plan.stage, graph, distributed.cluster),
                None if overlap is None else max(0, overlap.held_bytes - resident_bytes(plan.stage)),
            )
        with progress.task("Writing"), replacing(place) as folder:
            write_artifacts(folder, plan, program, compiled, target)
    done = time.perf_counter()
    stage = plan.stage
    return AutoParallelResult(
        plan,
        Path(out_dir),
        program.communications(),
        [stage.weight_bytes_per_device] * stage.mesh.size,
        sum(weight.nbytes for weight in stage.weights),
        plan.makespan_seconds,
        planned - begin,
        done - planned,
    )


def partition(graph: FlowGraph, plan: Plan, weights: str | Path | Sequence[str | Path] | None = None) -> Program:
    """Turn a graph into the SPMD program that a plan describes, without compiling it.

    ``weights`` are the safetensors files, the index or the folder with the weights that the graph knows by name only;
    without them the program is made, but has no data.

    Raises
    ------
    PlanError
        When the plan is none, was made for another graph, or does not fit it.
    PartitionError
        When an operator cannot run on the shards that the plan gives it.
    WeightsError
        When ``weights`` lack one of the graph's, or have it in another shape or dtype.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"partition takes a Plan (see Plan.load); got a {type(plan).__name__}.")
    return partition_graph(graph, plan, None if weights is None else SafetensorsFiles.open(weights))
