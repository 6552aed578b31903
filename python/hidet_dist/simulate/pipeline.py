"""The simulator of pipelines: it runs all stages, one after the other, with the transfers between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from hidet.ffi import runtime_api

from hidet_dist.partitioning import Program
from hidet_dist.simulate.simulator import assemble, checked_inputs, simulate_shards, split
from hidet_dist.spec.formula import evaluate_formula
from hidet_dist.spec.pipeline import Pipeline, PipelineInput, Port
from hidet_dist.spec.symbols import LocalSymbol, known_sizes, local_sizes, micro_sizes
from hidet_dist.transfer import MeshLayout, plan_transfer, transferred


def simulate_pipeline(pipeline: Pipeline, programs: Sequence[Program], inputs: Sequence[Any]) -> list[np.ndarray]:
    """Run a pipeline on the CPU for all ranks of all stages, and assemble its whole outputs.

    One micro-batch goes through all stages, then the next. A tensor that crosses between stages is transferred in the
    messages that the ranks would send.

    Parameters
    ----------
    pipeline: Pipeline
        The pipeline.
    programs: sequence of Program
        The program of each stage.
    inputs: sequence of arrays
        The whole inputs of the graph, of all micro-batches, as for :func:`hidet_dist.simulate.simulate`.

    Returns
    -------
    The whole outputs of the graph, of all micro-batches.

    Raises
    ------
    InputError
        When the inputs do not fit the pipeline, or a symbolic dim may not have its size.
    PartitionError
        When two ranks hold the same piece of an output with different values.
    """
    count = pipeline.micro_batches
    expected = [list(_expected(entry, programs, count)) for entry in pipeline.inputs]
    arrays = checked_inputs("pipeline", inputs, expected)
    sizes, batch = _sizes(pipeline, programs, arrays)
    symbols = {symbol.name: symbol for symbol in programs[0].symbols}
    if batch is None:
        of_micro = [sizes] * count
        extents = None
    else:
        extents = micro_sizes(sizes[batch], symbols[batch].multiple_of, count)
        of_micro = [{**sizes, batch: extent} for extent in extents]
    parts = [
        [x] * len(of_micro)
        if entry.batch_dim is None
        else np.split(x, count if extents is None else np.cumsum(extents)[:-1], entry.batch_dim)
        for x, entry in zip(arrays, pipeline.inputs, strict=True)
    ]
    results = [
        _micro_batch(pipeline, programs, [entry[number] for entry in parts], own) for number, own in enumerate(of_micro)
    ]
    return [
        results[0][number] if y.batch_dim is None else np.concatenate([entry[number] for entry in results], y.batch_dim)
        for number, y in enumerate(pipeline.outputs)
    ]


def _expected(entry: PipelineInput, programs: Sequence[Program], count: int) -> Iterator[tuple[str, list[int | str]]]:
    """Yield the dtype and whole shape, of all micro-batches, that each stage requires of an input."""
    for reader in entry.readers:
        plan = programs[reader.stage].inputs[reader.number]
        shape: list[int | str] = list(plan.written or plan.shape)
        if entry.batch_dim is not None:
            extent = shape[entry.batch_dim]
            shape[entry.batch_dim] = extent * count if isinstance(extent, int) else extent
        yield plan.dtype, shape


def _sizes(
    pipeline: Pipeline, programs: Sequence[Program], inputs: Sequence[np.ndarray]
) -> tuple[dict[str, int], str | None]:
    """Return the sizes of symbolic dims, and the one that micro-batches split, if any. Raises InputError."""
    batch = None
    written = []
    for entry in pipeline.inputs:
        plans = [programs[reader.stage].inputs[reader.number] for reader in entry.readers]
        shape = (plans[0].written or plans[0].shape) if plans else ()
        extent = shape[entry.batch_dim] if plans and entry.batch_dim is not None else None
        batch = extent if isinstance(extent, str) else batch
        written.append(shape)
    symbols = programs[0].symbols
    whole = [LocalSymbol(symbol.name, symbol.name, 1) for symbol in symbols]
    shapes = [(shape, x.shape[: len(shape)]) for shape, x in zip(written, inputs, strict=True)]
    return known_sizes(symbols, whole, shapes), batch


def _micro_batch(
    pipeline: Pipeline, programs: Sequence[Program], inputs: Sequence[np.ndarray], sizes: Mapping[str, int]
) -> list[np.ndarray]:
    source_of = {reader: one.source for one in pipeline.boundaries for reader in one.readers}
    input_of = {reader: x for x, entry in zip(inputs, pipeline.inputs, strict=True) for reader in entry.readers}
    computed: dict[Port, list[np.ndarray]] = {}
    for stage, program in enumerate(programs):
        mesh, shards = program.mesh, []
        for name, size in local_sizes(program.local_symbols, sizes).items():
            runtime_api.set_symbol_value(name, size)
        for number, plan in enumerate(program.inputs):
            port = Port(stage, number)
            if port in input_of:
                shards.append(split(plan, mesh, input_of[port]))
            else:
                source = source_of[port]
                sender = programs[source.stage]
                sent = MeshLayout(sender.mesh, sender.outputs[source.number].spec)
                shape = tuple(
                    n if isinstance(n, int) else evaluate_formula(n, sizes) for n in plan.written or plan.shape
                )
                transfer = plan_transfer(shape, sent, MeshLayout(mesh, plan.spec))
                moved = transferred(transfer, [np.atleast_1d(shard) for shard in computed[source]])
                shards.append([shard if shape else shard.reshape(()) for shard in moved])
        for number, entry in enumerate(simulate_shards(program, shards)):
            computed[Port(stage, number)] = entry
    return [
        assemble(programs[y.source.stage].outputs[y.source.number], programs[y.source.stage].mesh, computed[y.source])
        for y in pipeline.outputs
    ]
