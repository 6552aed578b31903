"""A graph computed by the ranks of a mesh: two processes that load its artifacts, or the simulator."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
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
FRACTION = 0.75  # of the weights that a device holds unasked: so that something is sharded
_CONFIG = {"mesh_shape": [RANKS]}
_NOT_NUMPYS = "bfloat16"  # inputs and outputs of ranks are arrays of NumPy, which has no such dtype


class Ranks:
    """Two ranks that compute graphs: processes that load artifacts, or with ``simulated`` those of the simulator.

    Use it as a context manager. A graph that is computed again, with other inputs or other sizes of its symbolic dims,
    is not planned and built again.

    Parameters
    ----------
    seconds: float
        The time limit of one run by the processes, in seconds.
    simulated: bool
        Whether to compute in the simulator.
    """

    def __init__(self, seconds: float, simulated: bool = False):
        self._pool = None if simulated else RankPool(RANKS, seconds)
        self._folder = tempfile.TemporaryDirectory()
        self._last: Planned | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()
        self._folder.cleanup()

    def computed(self, graph: FlowGraph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of a graph, as ``auto_parallel`` plans it under a tight memory budget."""
        planned = self._last
        if planned is None or planned.graph is not graph:
            planned = self._last = Planned.of(graph, inputs)
            if self._pool is not None:
                self._last = None  # until it is built
                hidet_dist.auto_parallel(planned.rebuilt, _CONFIG, planned.options, self._artifacts, plan=planned.plan)
                self._last = planned
        arrays = [x.float().numpy() if x.dtype is torch.bfloat16 else x.numpy() for x in inputs]
        outputs = self._simulated(planned, arrays) if self._pool is None else self._served(planned, arrays, self._pool)
        return [torch.from_numpy(y) for y in outputs]

    @property
    def _artifacts(self) -> Path:
        return Path(self._folder.name) / "artifacts"

    @staticmethod
    def _simulated(planned: Planned, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        with cpu_target():  # kernels as the artifacts have them: hidet's own flags let nothing be infinite
            precompile_headers()
            return simulate(hidet_dist.partition(planned.rebuilt, planned.plan), inputs)

    def _served(self, planned: Planned, inputs: Sequence[np.ndarray], pool: RankPool) -> list[np.ndarray]:
        (stage,) = planned.plan.stages
        shards: list[list[np.ndarray]] = [[] for _ in range(RANKS)]
        for x, whole in zip(stage.inputs, inputs, strict=True):
            for own, shard in zip(shards, split(x, stage.mesh, whole), strict=True):
                own.append(shard)
        outputs = zip(*pool.run(self._artifacts, shards), strict=True)
        return list(map(assemble, stage.outputs, repeat(stage.mesh), outputs))


@dataclass(frozen=True)
class Planned:
    """A graph of hidet, the graph that is planned in its place, the options, and the plan."""

    graph: FlowGraph
    rebuilt: FlowGraph
    options: dict[str, Any]
    plan: hidet_dist.Plan

    @classmethod
    def of(cls, graph: FlowGraph, inputs: Sequence[torch.Tensor]) -> Planned:
        """Plan a graph; the sizes of the inputs are the ones that its symbolic dims are expected to have."""
        own = rebuilt(graph)
        symbols = sizes_of(own, inputs)
        options = {"symbols": symbols} if symbols else {}
        return cls(graph, own, options, tight_plan(own, options))


def tight_plan(graph: FlowGraph, options: dict[str, Any]) -> hidet_dist.Plan:
    """A plan that the memory budget forces to shard, where there is one."""
    free = hidet_dist.make_plan(graph, _CONFIG, options)
    budget = max(1, int(free.stages[0].weight_bytes_per_device * FRACTION))
    try:
        return hidet_dist.make_plan(graph, _CONFIG, {**options, "mem_budget": budget})
    except InfeasibleError as error:
        try:
            return hidet_dist.make_plan(graph, _CONFIG, {**options, "mem_budget": error.least_budget})
        except InfeasibleError:
            return free


def sizes_of(graph: FlowGraph, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
    """The size of each symbolic dim in a call, to plan for: at least 1."""
    return {
        dim.name: max(1, int(size))
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
