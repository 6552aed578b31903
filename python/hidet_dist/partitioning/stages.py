"""The cut of a graph into the graphs of a plan's stages, and the tensors that cross between stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hidet.graph import Tensor

from hidet_dist.errors import ConfigError, PlanError, SpecError
from hidet_dist.normalize import NormalGraph
from hidet_dist.partitioning.micro_batches import MicroBatchGraph, batch_symbol, micro_batch
from hidet_dist.rewriting import Subgraph, subgraph
from hidet_dist.rules.rule import RuleTable
from hidet_dist.spec import Plan
from hidet_dist.spec.extents import extents_of, symbols_in
from hidet_dist.spec.formula import check_formula
from hidet_dist.spec.pipeline import ALL, Boundary, Pipeline, PipelineInput, PipelineOutput, PipelineStage, Port
from hidet_dist.view import GraphView, graph_symbols
from hidet_dist.weights.named import is_weight
from hidet_dist.weights.states import state_mark_of, updated_state


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
    batch: MicroBatchGraph

    def pipeline(
        self, operators: Sequence[Sequence[int]], ranks: Sequence[Sequence[int]], results: str = ALL
    ) -> Pipeline:
        """Make the pipeline of stages with these operators on these ranks."""
        stages = (PipelineStage(tuple(numbers), tuple(group)) for numbers, group in zip(operators, ranks, strict=True))
        return Pipeline(
            tuple(stages), self.boundaries, self.graph_inputs, self.graph_outputs, self.batch.count, results
        )


def cut_graph(batch: MicroBatchGraph, operators: Sequence[Sequence[int]]) -> Cut:
    """Cut the graph of one micro-batch into stages.

    Parameters
    ----------
    batch: MicroBatchGraph
        The graph; see :func:`hidet_dist.partitioning.micro_batches.micro_batch`.
    operators: sequence of sequences of int
        The operators of each stage, ascending. A stage may read tensors of earlier stages only.

    Raises
    ------
    ConfigError
        When an operator is not in exactly one stage, a stage reads a tensor of a later one, an output of the graph is
        an input or a weight, several stages read a state, or a stage cannot know the size of a symbolic dim at the time
        of a call.
    """
    graph = batch.graph
    graph.update_nodes()
    view = GraphView(graph, batch.symbols)
    _check_operators(operators, len(graph.nodes))
    _check_outputs(view)
    _check_states(view, operators)
    parts = [subgraph(graph, of_stage) for of_stage in operators]
    read = [[x for x in part.inputs if not is_weight(x)] for part in parts]
    new_values = {view.tensors[name] for name in view.new_values.values()}
    made = [[y for y in part.outputs if y not in new_values] for part in parts]
    computed = {y: Port(stage, place) for stage, tensors in enumerate(made) for place, y in enumerate(tensors)}
    readers = _readers(read, computed, view.names)
    boundaries = _boundaries(view, computed, readers)
    inputs = [view.tensors[name] for name in view.inputs]
    outputs = [view.tensors[name] for name in view.outputs]
    symbols = graph_symbols(graph)
    if symbols:
        _check_sizes(view, parts, inputs, readers, [*view.outputs, *(one.tensor for one in boundaries)])
    return Cut(
        tuple(NormalGraph.of(part.graph, symbols) for part in parts),
        tuple(tuple(_names(view.names, tensors)) for tensors in read),
        tuple(tuple(_names(view.names, tensors)) for tensors in made),
        tuple(boundaries),
        tuple(PipelineInput(tuple(readers.get(x, ())), dim) for x, dim in zip(inputs, batch.input_dims, strict=True)),
        tuple(PipelineOutput(computed[y], dim) for y, dim in zip(outputs, batch.output_dims, strict=True)),
        batch,
    )


def _check_outputs(view: GraphView) -> None:
    for place, name in enumerate(view.outputs):
        if not name.startswith("t"):
            raise ConfigError(f"Output {place} of the graph is {name}, which no operator computes; leave it out.")


def _boundaries(
    view: GraphView, computed: Mapping[Tensor, Port], readers: Mapping[Tensor, Sequence[Port]]
) -> list[Boundary]:
    """List the tensors that stages compute and others read, in the order of their sources."""
    return [
        Boundary(view.names[y], source, tuple(readers[y]), view.nbytes(view.names[y]))
        for y, source in sorted(computed.items(), key=lambda item: (item[1].stage, item[1].number))
        if y in readers
    ]


def _readers(
    read: Sequence[Sequence[Tensor]], computed: Mapping[Tensor, Port], names: Mapping[Tensor, str]
) -> dict[Tensor, list[Port]]:
    """List the stages' inputs for each tensor that stages read. Raises ConfigError for one of a later stage."""
    readers: dict[Tensor, list[Port]] = {}
    for stage, tensors in enumerate(read):
        for place, x in enumerate(tensors):
            readers.setdefault(x, []).append(Port(stage, place))
            if x in computed and computed[x].stage >= stage:
                raise ConfigError(
                    f"Stage {stage} reads {names[x]}, which stage {computed[x].stage} computes; stages may read "
                    "what earlier ones compute only."
                )
    return readers


def _check_operators(operators: Sequence[Sequence[int]], count: int) -> None:
    """Raise ConfigError, naming an operator at fault, unless each of ``count`` operators is in one stage."""
    stages_of: dict[int, list[int]] = {number: [] for number in range(count)}
    for stage, numbers in enumerate(operators):
        for number in numbers:
            if number not in stages_of:
                raise ConfigError(f"Stage {stage} has operator {number}; the graph has the operators 0 to {count - 1}.")
            stages_of[number].append(stage)
    for number, stages in stages_of.items():
        if len(stages) != 1:
            where = f"in the stages {', '.join(map(str, stages))}" if stages else "in no stage"
            raise ConfigError(
                f"The stages must have each of the operators 0 to {count - 1} once; operator {number} is {where}."
            )


def _check_states(view: GraphView, operators: Sequence[Sequence[int]]) -> None:
    """Raise ConfigError unless the operators that read a state, or what updates made of it, are in one stage."""
    stages_of: dict[str, dict[int, str]] = {}
    for stage, numbers in enumerate(operators):
        for number in numbers:
            op = view.operators[number]
            for x in op.inputs:
                old = updated_state(x)
                mark = state_mark_of(x if old is None else old)
                if mark is not None:
                    stages_of.setdefault(mark.name, {})[stage] = op.name
    for name, readers in stages_of.items():
        if len(readers) > 1:
            raise ConfigError(
                f"The state {name!r} is read by "
                + " and by ".join(f"{op} in stage {stage}" for stage, op in sorted(readers.items()))
                + ": a state belongs to one stage. Put the operators that read it, or its new value, into one."
            )


def _check_sizes(
    view: GraphView,
    parts: Sequence[Subgraph],
    inputs: Sequence[Tensor],
    readers: Mapping[Tensor, Sequence[Port]],
    sent: Sequence[str],
) -> None:
    """Check that a stage knows the sizes of symbolic dims, from inputs of the graph that it or a stage before it reads.

    ``sent`` are the tensors whose shapes receivers compute from these sizes. Raises ConfigError.
    """
    known: dict[str, int] = {}  # the first stage that reads an input with the symbolic dim
    for x in inputs:
        for name in symbols_in(extents_of(x)):
            for port in readers.get(x, ()):
                known[name] = min(port.stage, known.get(name, port.stage))
    for stage, part in enumerate(parts):
        tensors = [x for node in part.graph.nodes for x in (*node.inputs, *node.outputs)]
        for name in symbols_in([extent for x in tensors for extent in extents_of(x)]):
            if known.get(name, len(parts)) > stage:
                where = f"stage {known[name]} is the first to read one" if name in known else "no operator reads one"
                raise ConfigError(
                    f"Stage {stage} has tensors of the symbolic dim {name}, whose size is known from inputs of the "
                    f"graph, and {where}. Put the operators that read it into stage {stage}, or trace the graph for "
                    "one size."
                )
    for tensor in sent:
        for extent in view.written(tensor):
            try:
                check_formula(str(extent))
            except SpecError as error:
                raise ConfigError(f"{tensor} cannot cross between stages: {error}") from error


def _names(names: Mapping[Tensor, str], tensors: Sequence[Tensor]) -> list[str]:
    return [names[x] for x in tensors]


def stage_graphs(plan: Plan, graph: NormalGraph, rules: RuleTable | None = None) -> list[NormalGraph]:
    """Cut a graph into the graphs of a plan's stages.

    The stages of a pipeline have the operators that the pipeline says, on one micro-batch. The only stage of a plan
    without a pipeline has the whole graph. Rules and proofs are shared with the table ``rules``.

    Raises
    ------
    PlanError
        When the plan has no stage, or several without a pipeline, or its pipeline differs from that of the graph.
    """
    plan.check_pipeline()
    if plan.pipeline is not None:
        return list(_cut_as_planned(plan, plan.pipeline, graph, rules).graphs)
    return [graph]


def _cut_as_planned(plan: Plan, pipeline: Pipeline, graph: NormalGraph, rules: RuleTable | None) -> Cut:
    """Cut a graph as a plan's pipeline says, and compare the result with it. Raises PlanError when they differ."""
    operators = [stage.operators for stage in pipeline.stages]
    try:
        count, symbols = pipeline.micro_batches, plan.stages[0].symbols
        dims = [x.batch_dim for x in pipeline.inputs] if count > 1 else None
        if dims is not None and len(dims) == len([x for x in graph.inputs or [] if not is_weight(x)]):
            batch = batch_symbol(graph, dims)
            symbols = tuple(replace(one, size=one.size * count) if one.name == batch else one for one in symbols)
        cut = cut_graph(micro_batch(graph, count, dims, symbols, rules), operators)
    except ConfigError as error:
        raise PlanError(f"The plan's pipeline does not fit the graph: {error}") from error
    for what, planned, actual in (
        ("inputs", pipeline.inputs, cut.graph_inputs),
        ("outputs", tuple(replace(y, seconds=0.0) for y in pipeline.outputs), cut.graph_outputs),
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
