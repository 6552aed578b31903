"""The simulator of pipelines: it runs all stages, one after the other, with the transfers between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hidet_dist.partitioning import Program
from hidet_dist.simulate.simulator import assemble, check_inputs, simulate_shards, split
from hidet_dist.spec.pipeline import Pipeline, PipelineInput, Port
from hidet_dist.transfer import MeshLayout, plan_transfer, transferred


def simulate_pipeline(
    pipeline: Pipeline, programs: Sequence[Program], inputs: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Run a pipeline on the CPU for all ranks of all stages, and assemble its whole outputs.

    One micro-batch goes through all stages, then the next. A tensor that crosses between stages is transferred in the
    messages that the ranks would send.

    Parameters
    ----------
    pipeline: Pipeline
        The pipeline.
    programs: sequence of Program
        The program of each stage.
    inputs: sequence of np.ndarray
        The whole inputs of the graph, of all micro-batches.

    Returns
    -------
    The whole outputs of the graph, of all micro-batches.

    Raises
    ------
    InputError
        When the inputs do not fit the pipeline.
    PartitionError
        When two ranks hold the same piece of an output with different values.
    """
    count = pipeline.micro_batches
    check_inputs("pipeline", inputs, [list(_expected(entry, programs, count)) for entry in pipeline.inputs])
    parts = [
        [x] * count if entry.batch_dim is None else np.split(x, count, entry.batch_dim)
        for x, entry in zip(inputs, pipeline.inputs, strict=True)
    ]
    results = [_micro_batch(pipeline, programs, [entry[number] for entry in parts]) for number in range(count)]
    return [
        results[0][number] if y.batch_dim is None else np.concatenate([entry[number] for entry in results], y.batch_dim)
        for number, y in enumerate(pipeline.outputs)
    ]


def _expected(entry: PipelineInput, programs: Sequence[Program], count: int) -> Iterator[tuple[str, list[int]]]:
    """Yield the dtype and whole shape, of all micro-batches, that each stage requires of an input."""
    for reader in entry.readers:
        plan = programs[reader.stage].inputs[reader.number]
        shape = list(plan.shape)
        if entry.batch_dim is not None:
            shape[entry.batch_dim] *= count
        yield plan.dtype, shape


def _micro_batch(pipeline: Pipeline, programs: Sequence[Program], inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    source_of = {reader: one.source for one in pipeline.boundaries for reader in one.readers}
    input_of = {reader: x for x, entry in zip(inputs, pipeline.inputs, strict=True) for reader in entry.readers}
    computed: dict[Port, list[np.ndarray]] = {}
    for stage, program in enumerate(programs):
        mesh, shards = program.mesh, []
        for number, plan in enumerate(program.inputs):
            port = Port(stage, number)
            if port in input_of:
                shards.append(split(plan, mesh, input_of[port]))
            else:
                source = source_of[port]
                sender = programs[source.stage]
                sent = MeshLayout(sender.mesh, sender.outputs[source.number].spec)
                transfer = plan_transfer(plan.shape, sent, MeshLayout(mesh, plan.spec))
                local = plan.spec.local_shape(plan.shape, mesh)
                moved = transferred(transfer, [np.atleast_1d(shard) for shard in computed[source]])
                shards.append([shard.reshape(local) for shard in moved])
        for number, entry in enumerate(simulate_shards(program, shards)):
            computed[Port(stage, number)] = entry
    return [
        assemble(programs[y.source.stage].outputs[y.source.number], programs[y.source.stage].mesh, computed[y.source])
        for y in pipeline.outputs
    ]
