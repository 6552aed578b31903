"""The parts of a graph that the stages of a plan compute."""

from __future__ import annotations

from hidet_dist.errors import PlanError
from hidet_dist.normalize import NormalGraph
from hidet_dist.rewriting import subgraph
from hidet_dist.spec import Plan


def stage_graphs(plan: Plan, graph: NormalGraph) -> list[NormalGraph]:
    """Cut a graph into the graphs of a plan's stages: consecutive operators, beginning with the first stage.

    A single stage computes the whole graph.

    Raises
    ------
    PlanError
        When the plan has no stage, or the number of operators in its stages is not that of the graph.
    """
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
