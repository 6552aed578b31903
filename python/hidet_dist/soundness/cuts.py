"""The check of random pipelines: graphs cut into random stages, each with a random valid plan, run by the oracle.

Beyond the check of plans of one stage, this covers the cut, the graph of a micro-batch, and the messages between meshes
of different shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hidet_dist.errors import ConfigError
from hidet_dist.normalize import NormalGraph
from hidet_dist.partitioning import Program, partition_graph
from hidet_dist.partitioning.micro_batches import MicroBatchGraph, batch_dims, micro_batch
from hidet_dist.partitioning.stages import Cut, cut_graph
from hidet_dist.rules.rule import RuleTable
from hidet_dist.soundness.plans import Array, Rng, evaluate_shards, random_stage
from hidet_dist.spec import DeviceMesh, StagePlan
from hidet_dist.spec.pipeline import Port
from hidet_dist.transfer import MeshLayout, plan_transfer, transferred
from hidet_dist.view import GraphView

MESHES = (
    *map(DeviceMesh, ((1,), (2,), (3,), (4,), (2, 2), (2, 3))),
    DeviceMesh((2,), (), ((3, 1),)),
    DeviceMesh((3,), (), ((1, 2, 1),)),
    DeviceMesh((2, 2), (), ((1, 3), ())),
)
"""The meshes of stages, some of which split by shares."""

MOST_STAGES = 4


@dataclass(frozen=True)
class RandomPipeline:
    """A randomly cut graph: the operators of each stage, and a random plan of each."""

    cut: Cut
    operators: tuple[tuple[int, ...], ...]
    stages: tuple[StagePlan, ...]

    def __str__(self) -> str:
        stages = zip(self.operators, self.stages, strict=True)
        described = "; ".join(f"{list(numbers)} on {stage.mesh}" for numbers, stage in stages)
        return f"{self.cut.batch.count} micro-batches, stages {described}"


def random_stages(graph: NormalGraph, rng: Rng) -> tuple[tuple[int, ...], ...]:
    """Cut a graph into 1 to ``MOST_STAGES`` stages, whose operators need not be consecutive."""
    view = GraphView(graph)
    count, most = len(view.operators), int(rng.integers(1, MOST_STAGES + 1))
    number_of = {op: number for number, op in enumerate(view.operators)}
    spread = float(rng.choice([0.0, 0.3]))  # the greatest distance from a cut into consecutive operators, of the graph
    stage_of: list[int] = []
    for number, op in enumerate(view.operators):
        drawn = int(most * (number + rng.uniform(-spread, spread) * count) / count)
        least = max((stage_of[number_of[x.op]] for x in op.inputs if x.op in number_of), default=0)
        stage_of.append(max(least, min(max(drawn, 0), most - 1)))
    stages = [tuple(n for n, assigned in enumerate(stage_of) if assigned == stage) for stage in range(most)]
    return tuple(numbers for numbers in stages if numbers)


class Cuttable:
    """A graph to draw pipelines of, with what they share: the graphs of micro-batches, and the rules of each mesh."""

    def __init__(self, graph: NormalGraph):
        self.graph = graph
        self._batches: dict[int, MicroBatchGraph] = {}
        self._tables: dict[DeviceMesh, RuleTable] = {}

    def micro_batch(self, count: int) -> MicroBatchGraph:
        """Return the graph of one of ``count`` micro-batches; the whole graph if it mixes elements of the batch."""
        if count not in self._batches:
            try:
                self._batches[count] = micro_batch(self.graph, count)
            except ConfigError:
                self._batches[count] = micro_batch(self.graph, 1)
        return self._batches[count]

    def rules(self, mesh: DeviceMesh) -> RuleTable:
        """Return the rules of operators on a mesh. Those of all meshes share their proofs."""
        like = next(iter(self._tables.values()), None)
        return self._tables.setdefault(mesh, RuleTable(mesh, like))


def random_micro_batch(cuttable: Cuttable, rng: Rng) -> MicroBatchGraph:
    """Make the graph of a micro-batch, for a random number of micro-batches into which the batch can be split."""
    graph = cuttable.graph
    dims = batch_dims(graph)
    batch = int(graph.inputs[0].shape[0]) if dims and dims[0] is not None else 1
    counts = [count for count in range(1, batch + 1) if batch % count == 0]
    return cuttable.micro_batch(int(rng.choice(counts)))


def random_pipeline(cuttable: Cuttable, rng: Rng) -> RandomPipeline:
    """Draw micro-batches, a cut, and for each stage a mesh and a plan."""
    batch = random_micro_batch(cuttable, rng)
    operators = random_stages(batch.graph, rng)
    cut = cut_graph(batch, operators)
    stages = []
    for part in cut.graphs:
        mesh = MESHES[int(rng.integers(len(MESHES)))]
        stages.append(random_stage(GraphView(part), mesh, cuttable.rules(mesh), rng))
    return RandomPipeline(cut, operators, tuple(stages))


def check_pipeline(
    pipeline: RandomPipeline, inputs: Sequence[Array], whole: Sequence[Array], cuttable: Cuttable
) -> str:
    """Describe the first wrong output of a pipeline; empty if every rank has its shard of every output."""
    batch = pipeline.cut.batch
    programs = [
        partition_graph(graph, stage, rules=cuttable.rules(stage.mesh))
        for graph, stage in zip(pipeline.cut.graphs, pipeline.stages, strict=True)
    ]
    for number in range(batch.count):
        parts = [_part(x, dim, number, batch.count) for x, dim in zip(inputs, batch.input_dims, strict=True)]
        expected = [_part(y, dim, number, batch.count) for y, dim in zip(whole, batch.output_dims, strict=True)]
        difference = _check_micro_batch(pipeline, programs, parts, expected)
        if difference:
            return f"micro-batch {number}: {difference}"
    return ""


def _check_micro_batch(
    pipeline: RandomPipeline, programs: Sequence[Program], inputs: Sequence[Array], outputs: Sequence[Array]
) -> str:
    cut = pipeline.cut
    source_of = {reader: boundary.source for boundary in cut.boundaries for reader in boundary.readers}
    input_of = {reader: x for x, entry in zip(inputs, cut.graph_inputs, strict=True) for reader in entry.readers}
    computed: dict[Port, list[Array]] = {}
    for number, (program, stage) in enumerate(zip(programs, pipeline.stages, strict=True)):
        mesh, shards = stage.mesh, []
        for position, tensor in enumerate(stage.inputs):
            port, target = Port(number, position), MeshLayout(mesh, tensor.spec)
            if port in input_of:
                x = input_of[port]
                shards.append([x[target.box(x.shape, rank)] for rank in range(mesh.size)])
            else:
                source = source_of[port]
                sender = pipeline.stages[source.stage]
                sent = MeshLayout(sender.mesh, sender.outputs[source.number].spec)
                moved = transferred(
                    plan_transfer(tensor.shape, sent, target), [np.atleast_1d(shard) for shard in computed[source]]
                )
                shards.append([shard if tensor.shape else shard.reshape(()) for shard in moved])
        results = evaluate_shards(program, list(zip(*shards, strict=True)) or [()] * mesh.size)
        for position in range(len(stage.outputs)):
            computed[Port(number, position)] = [result[position] for result in results]
    for number, (whole, y) in enumerate(zip(outputs, cut.graph_outputs, strict=True)):
        stage = pipeline.stages[y.source.stage]
        layout = MeshLayout(stage.mesh, stage.outputs[y.source.number].spec)
        for rank, got in enumerate(computed[y.source]):
            expected = whole[layout.box(whole.shape, rank)]
            if got.shape != expected.shape:
                return f"output {number} of rank {rank} has the shape {got.shape}, not {expected.shape}"
            if not np.allclose(got, expected, rtol=1e-6, atol=1e-7):
                return f"output {number} of rank {rank} differs"
    return ""


def _part(x: Array, dim: int | None, number: int, count: int) -> Array:
    return x if dim is None else np.split(x, count, dim)[number]
