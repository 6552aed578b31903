"""Micro-batches: a graph for a part of its batch, proven to compute that part of the whole graph's outputs.

The batch is dim 0 of the first input, and of each other input that has the same extent there. Splitting it over n
micro-batches in time is what splitting it over n devices is in space: a choice of the operator's rule that splits the
batch, reduces nothing and needs nothing converted (:mod:`hidet_dist.rules`). Where every operator has such a choice,
the operators rebuilt on shards are the graph of a micro-batch. An operator without one (batch statistics, a reduction
over the batch) mixes the batch, and the graph is whole in that dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import hidet
from hidet.graph import FlowGraph, Tensor

from hidet_dist.errors import ConfigError
from hidet_dist.normalize import NormalGraph
from hidet_dist.rules.local import rebuild
from hidet_dist.rules.rule import RuleTable
from hidet_dist.spec import DeviceMesh, TensorShardSpec
from hidet_dist.view import GraphView


@dataclass(frozen=True)
class MicroBatch:
    """The graph of a micro-batch.

    Attributes
    ----------
    graph: the graph, which shares the whole graph's weights.
    count: micro-batches in the batch.
    input_dims, output_dims: for each input and output the dim that is split, None where every micro-batch has it whole.
    """

    graph: NormalGraph
    count: int
    input_dims: tuple[int | None, ...]
    output_dims: tuple[int | None, ...]


def batch_extent(view: GraphView) -> int:
    """The batch: the extent of dim 0 of the first input; 1 where there is none."""
    shape = view.shape(view.inputs[0]) if view.inputs else ()
    return shape[0] if shape else 1


def batch_divisors(view: GraphView) -> list[int]:
    """List the counts of micro-batches that divide the batch, smallest first."""
    batch = batch_extent(view)
    return [count for count in range(1, batch + 1) if batch % count == 0]


def micro_batch(graph: NormalGraph, count: int) -> MicroBatch:
    """Make the graph of one of ``count`` micro-batches.

    Raises
    ------
    ConfigError
        When the batch is not divisible by ``count``, or an operator mixes the batch, which it names.
    """
    view = GraphView(graph)
    batch = batch_extent(view)
    if batch % count:
        raise ConfigError(
            f"The batch of {batch} (dim 0 of input 0) is not divisible into {count} micro-batches; its divisors are "
            f"{', '.join(map(str, batch_divisors(view)))}."
        )
    dims: dict[str, int | None] = {}
    for name in view.inputs:
        shape = view.shape(name)
        dims[name] = 0 if shape and shape[0] == batch else None
    if count == 1:
        return MicroBatch(graph, 1, tuple(None for _ in view.inputs), tuple(None for _ in view.outputs))
    mesh = DeviceMesh((count,))
    table = RuleTable(mesh)
    made: dict[str, Tensor] = {}
    entering = []
    for x in graph.inputs or []:
        name = view.names[x]
        if dims.get(name) is not None:
            made[name] = hidet.symbol([batch // count, *view.shape(name)[1:]], x.dtype, x.device)
        entering.append(made.get(name, x))
    for number, op in enumerate(view.operators):
        names = [view.names[x] for x in op.inputs]
        ins = tuple(_split(len(view.shape(name)), dims.get(name)) for name in names)
        found = next(
            (choice.spec for choice in table(op)[1] if choice.spec.in_specs == ins and not any(choice.spec.reduce_fns)),
            None,
        )
        outs = [] if found is None else [_dim(spec) for spec in found.out_specs]
        if found is None or (any(dims.get(name) is not None for name in names) and None in outs):
            raise ConfigError(
                f"The batch cannot be divided into {count} micro-batches: operator {number}, {op.name}, mixes it. Its "
                f"rule is {table.rule(op).notation()}, and its inputs are split as {', '.join(map(str, ins))}."
            )
        shapes = [
            spec.local_shape(view.shape(view.names[y]), mesh)
            for y, spec in zip(op.outputs, found.out_specs, strict=True)
        ]
        inputs = [made.get(name, x) for name, x in zip(names, op.inputs, strict=True)]
        outputs = (
            op.outputs if all(a is b for a, b in zip(inputs, op.inputs, strict=True)) else rebuild(op, inputs, shapes)
        )
        for y, local, dim in zip(op.outputs, outputs, outs, strict=True):
            made[view.names[y]], dims[view.names[y]] = local, dim
    result = FlowGraph([made.get(name, view.tensors[name]) for name in view.outputs], entering)
    result.update_nodes()
    return MicroBatch(
        NormalGraph.of(result),
        count,
        tuple(dims[name] for name in view.inputs),
        tuple(dims.get(name) for name in view.outputs),
    )


def _split(ndim: int, dim: int | None) -> TensorShardSpec:
    whole = TensorShardSpec.replicated(ndim)
    return whole if dim is None else whole.with_dim(dim, (0,))


def _dim(spec: TensorShardSpec) -> int | None:
    return next((dim for dim, axes in enumerate(spec.mesh_axes_per_dim) if axes), None)
