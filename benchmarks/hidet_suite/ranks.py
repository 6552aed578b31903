"""A graph computed by the ranks of a mesh: two processes that load its artifacts, or the simulator."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import torch
from hidet.graph import FlowGraph, Tensor
from hidet.ir.expr import SymbolVar

import hidet_dist
from hidet_dist.compat.cpu_build import precompile_headers
from hidet_dist.compile.cpu.build import cpu_target
from hidet_dist.errors import InfeasibleError
from hidet_dist.simulate import assemble, simulate, split
from hidet_dist.testing.rank_pool import RankPool

RANKS = 2
SHARE = 0.75  # of the weights that a device holds unasked: so that something is sharded
_CONFIG = {"mesh_shape": [RANKS]}
_NOT_NUMPYS = "bfloat16"  # inputs and outputs of ranks are arrays of NumPy, which has no such dtype


def computed(graph: FlowGraph, inputs: Sequence[torch.Tensor], pool: RankPool | None) -> list[torch.Tensor]:
    """The outputs of a graph, computed by two ranks as ``auto_parallel`` plans them under a tight memory budget.

    The ranks are processes of a pool that load artifacts; without one, those of the simulator.
    """
    graph = rebuilt(graph)
    symbols = sizes_of(graph, inputs)
    options = {"symbols": symbols} if symbols else {}
    plan = tight_plan(graph, options)
    arrays = [x.float().numpy() if x.dtype is torch.bfloat16 else x.numpy() for x in inputs]
    if pool is None:
        with cpu_target():  # kernels as the artifacts have them: hidet's own flags let nothing be infinite
            precompile_headers()
            return [torch.from_numpy(y) for y in simulate(hidet_dist.partition(graph, plan), arrays)]
    return [torch.from_numpy(y) for y in served(graph, plan, options, arrays, pool)]


def served(
    graph: FlowGraph, plan: hidet_dist.Plan, options: dict[str, Any], inputs: Sequence[np.ndarray], pool: RankPool
) -> list[np.ndarray]:
    """The whole outputs of a graph, from two processes that load its artifacts."""
    with tempfile.TemporaryDirectory() as name:
        artifacts = Path(name) / "artifacts"
        hidet_dist.auto_parallel(graph, _CONFIG, options, artifacts, plan=plan)
        (stage,) = plan.stages
        shards: list[list[np.ndarray]] = [[] for _ in range(RANKS)]
        for x, whole in zip(stage.inputs, inputs, strict=True):
            for own, shard in zip(shards, split(x, stage.mesh, whole), strict=True):
                own.append(shard)
        outputs = zip(*pool.run(artifacts, shards), strict=True)
        return list(map(assemble, stage.outputs, repeat(stage.mesh), outputs))


def tight_plan(graph: FlowGraph, options: dict[str, Any]) -> hidet_dist.Plan:
    """A plan that the memory budget forces to shard, where there is one."""
    free = hidet_dist.make_plan(graph, _CONFIG, options)
    share = max(1, int(free.stages[0].weight_bytes_per_device * SHARE))
    try:
        return hidet_dist.make_plan(graph, _CONFIG, {**options, "mem_budget": share})
    except InfeasibleError as error:
        try:
            return hidet_dist.make_plan(graph, _CONFIG, {**options, "mem_budget": error.least_budget})
        except InfeasibleError:
            return free


def sizes_of(graph: FlowGraph, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
    """The size of each symbolic dim in a call."""
    return {
        dim.name: int(size)
        for own, given in zip(graph.inputs or (), inputs, strict=True)
        for dim, size in zip(own.shape, given.shape, strict=True)
        if isinstance(dim, SymbolVar)
    }


def rebuilt(graph: FlowGraph) -> FlowGraph:
    """A graph with the same operators, whose inputs and outputs have dtypes that NumPy has."""
    made: dict[Tensor, Tensor] = {}
    inputs = []
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        for x in graph.inputs or ():
            held = "float32" if x.dtype.name == _NOT_NUMPYS else x.dtype.name
            own = hidet.symbol(x.shape, held, "cpu")
            inputs.append(own)
            made[x] = hidet.ops.cast(own, x.dtype.name) if held != x.dtype.name else own
        for op in FlowGraph(graph.outputs, graph.inputs).update_nodes().nodes:
            own_op = copy.copy(op)
            own_op.inputs = [made.get(x, x) for x in op.inputs]
            own_op.outputs = [
                Tensor(y.shape, y.dtype, "cpu", None, trace=(own_op, number)) for number, y in enumerate(op.outputs)
            ]
            made.update(zip(op.outputs, own_op.outputs, strict=True))
        outputs = [made.get(y, y) for y in graph.outputs]
        outputs = [hidet.ops.cast(y, "float32") if y.dtype.name == _NOT_NUMPYS else y for y in outputs]
    return FlowGraph(outputs, inputs).update_nodes()
