"""The cut of a graph into the graphs of a plan's stages, and the tensors that cross between stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hidet.graph import Tensor

from hidet_dist.errors import ConfigError, PlanError
from hidet_dist.normalize import NormalGraph
from hidet_dist.partitioning.micro_batches import MicroBatch, micro_batch
from hidet_dist.rewriting import subgraph
from hidet_dist.spec import Plan
from hidet_dist.spec.pipeline import ALL, Boundary, Pipeline, PipelineInput, PipelineOutput, PipelineStage, Port
from hidet_dist.view import GraphView, graph_symbols
from hidet_dist.weights.named import is_weight


@dataclass(frozen=True)
class Cut:
    """A graph cut into stages.

    Attributes
    ----------
    graphs: the graph of each stage, for one micro-batch.
    inputs, outputs: for each stage, the names of its inputs and outputs in the graph of one micro-batch.
    boundaries: the tensors that cross between stages.
    graph_inputs, graph_outputs: the inputs and outputs of the whole graph.
    batch: the graph that was cut.
    """

    graphs: tuple[NormalGraph, ...]
    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    boundaries: tuple[Boundary, ...]
    graph_inputs: tuple[PipelineInput, ...]
    graph_outputs: tuple[PipelineOutput, ...]
    batch: MicroBatch

    def pipeline(
        self, operators: Sequence[Sequence[int]], ranks: Sequence[Sequence[int]], results: str = ALL
    ) -> Pipeline:
        """Make the pipeline of stages with these operators on these ranks."""
        stages = (PipelineStage(tuple(numbers), tuple(group)) for numbers, group in zip(operators, ranks, strict=True))
        return Pipeline(
            tuple(stages), self.boundaries, self.graph_inputs, self.graph_outputs, self.batch.count, results
        )


def cut_graph(batch: MicroBatch, operators: Sequence[Sequence[int]]) -> Cut:
    """Cut the graph of one micro-batch into stages.

    Parameters
    ----------
    batch: MicroBatch
        The graph; see :func:`hidet_dist.partitioning.micro_batches.micro_batch`.
    operators: sequence of sequences of int
        The operators of each stage, ascending. A stage may read tensors of earlier stages only.

    Raises
    ------
    ConfigError
        When an operator is not in exactly one stage, a stage reads a tensor of a later one, the graph has symbolic
        dims, or an output of the graph is an input or a weight.
    """
    graph = batch.graph
    graph.update_nodes()
    view = GraphView(graph)
    if graph_symbols(graph):
        raise ConfigError("A graph with symbolic dims cannot be cut into stages; trace it for one size.")
    numbers = [number for of_stage in operators for number in of_stage]
    if sorted(numbers) != list(range(len(graph.nodes))):
        raise ConfigError(f"The stages must have each of the operators 0 to {len(graph.nodes) - 1} once.")
    for place, name in enumerate(view.outputs):
        if not name.startswith("t"):
            raise ConfigError(f"Output {place} of the graph is {name}, which no operator computes; leave it out.")
    parts = [subgraph(graph, of_stage) for of_stage in operators]
    read = [[x for x in part.inputs if not is_weight(x)] for part in parts]
    computed = {y: Port(stage, place) for stage, part in enumerate(parts) for place, y in enumerate(part.outputs)}
    readers: dict[Tensor, list[Port]] = {}
    for stage, tensors in enumerate(read):
        for place, x in enumerate(tensors):
            readers.setdefault(x, []).append(Port(stage, place))
            if x in computed and computed[x].stage >= stage:
                raise ConfigError(
                    f"Stage {stage} reads {view.names[x]}, which stage {computed[x].stage} computes; stages may read "
                    "what earlier ones compute only."
                )
    boundaries = [
        Boundary(view.names[y], source, tuple(readers[y]), view.nbytes(view.names[y]))
        for y, source in sorted(computed.items(), key=lambda item: (item[1].stage, item[1].number))
        if y in readers
    ]
    inputs = [view.tensors[name] for name in view.inputs]
    outputs = [view.tensors[name] for name in view.outputs]
    return Cut(
        tuple(NormalGraph.of(part.graph) for part in parts),
        tuple(tuple(_names(view.names, tensors)) for tensors in read),
        tuple(tuple(_names(view.names, part.outputs)) for part in parts),
        tuple(boundaries),
        tuple(PipelineInput(tuple(readers.get(x, ())), dim) for x, dim in zip(inputs, batch.input_dims, strict=True)),
        tuple(PipelineOutput(computed[y], dim) for y, dim in zip(outputs, batch.output_dims, strict=True)),
        batch,
    )


def _names(names: Mapping[Tensor, str], tensors: Sequence[Tensor]) -> list[str]:
    return [names[x] for x in tensors]


def stage_graphs(plan: Plan, graph: NormalGraph) -> list[NormalGraph]:
    """Cut a graph into the graphs of a plan's stages.

    The stages of a pipeline have the operators that the pipeline says, on one micro-batch. Without a pipeline, stages
    have consecutive operators, in order. The only stage of a plan has the whole graph.

    Raises
    ------
    PlanError
        When the plan has no stage, its stages and the graph have different numbers of operators, or its pipeline
        differs from that of the graph.
    """
    if plan.pipeline is not None:
        return list(_cut_as_planned(plan, plan.pipeline, graph).graphs)
    if len(plan.stages) == 1:
        return [graph]
    graph.update_nodes()
    counts = [len(stage.operators) for stage in plan.stages]
    if sum(counts) != len(graph.nodes) or not all(counts):
        raise PlanError(
            f"The plan has {len(counts)} stages of {', '.join(map(str, counts)) or 'no'} operators; the graph has "
            f"{len(graph.nodes)} operators. Plan it anew."
        )
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    ranges = (range(end - count, end) for end, count in zip(ends, counts, strict=True))
    return [NormalGraph.of(subgraph(graph, operators).graph) for operators in ranges]


def _cut_as_planned(plan: Plan, pipeline: Pipeline, graph: NormalGraph) -> Cut:
    """Cut a graph as a plan's pipeline says, and compare the result with it. Raises PlanError when they differ."""
    plan.check_pipeline()
    operators = [stage.operators for stage in pipeline.stages]
    try:
        dims = [x.batch_dim for x in pipeline.inputs] if pipeline.micro_batches > 1 else None
        cut = cut_graph(micro_batch(graph, pipeline.micro_batches, dims), operators)
    except ConfigError as error:
        raise PlanError(f"The plan's pipeline does not fit the graph: {error}") from error
    for what, planned, actual in (
        ("inputs", pipeline.inputs, cut.graph_inputs),
        ("outputs", pipeline.outputs, cut.graph_outputs),
    ):
        if planned != actual:
            raise PlanError(f"The {what} of the plan's pipeline are not those of the graph. Plan it anew.")
    planned_ends = [(one.tensor, one.source, one.readers, one.nbytes) for one in pipeline.boundaries]
    actual_ends = [(one.tensor, one.source, one.readers, one.nbytes) for one in cut.boundaries]
    for expected, actual_end in zip(planned_ends, actual_ends, strict=False):
        if expected != actual_end:
            raise PlanError(
                f"The plan's boundary {expected[0]} is not {actual_end[0]}, which crosses there. Plan it anew."
            )
    if len(planned_ends) != len(actual_ends):
        raise PlanError(f"The plan has {len(planned_ends)} boundaries; the graph has {len(actual_ends)}. Plan it anew.")
    return cut
