"""Builds a model for this machine's GPU: ``build.py MODEL PRECISION RANKS VARIANT ARCH OUT``.

Beside the artifacts it leaves the inputs and what the unsharded model answers in float32 on the CPU, operator by
operator with hidet's CPU kernels.
"""

from __future__ import annotations

import sys

import numpy as np
from hidet.graph import FlowGraph

from hidet_dist import auto_parallel
from hidet_dist.machine import builtin
from hidet_dist.machine.gpu import MACHINE_OF_ARCH
from hidet_dist.search import search
from hidet_dist.search.memory import live_bytes
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import bert, models
from hidet_dist.view import GraphView

Case = tuple[FlowGraph, list[np.ndarray], list[np.ndarray]]


def minilm() -> Case:
    """A small BERT with random weights: the released ones need not be here."""
    config = bert.BertConfig(96, 64, 2, 4, 256, 32)
    graph = bert.trace(bert.random_bert(config, 0), 2, 8)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 96, (2, 8)).astype(np.int32)
    mask = (np.arange(8) < np.array([[8], [5]])).astype(np.float32)
    return graph, [ids, mask], models.run_whole(graph, [ids, mask])


def whole(graph: FlowGraph, inputs: list[np.ndarray]) -> Case:
    """A model with what it answers."""
    return graph, inputs, models.run_whole(graph, inputs)


CASES = {
    "minilm": minilm,
    "gpt2": lambda: whole(*models.gpt2()),
    "llama": lambda: whole(*models.llama()),
    "resnet18": lambda: whole(*models.resnet18()),
}


def main() -> None:
    """Build, and say what is communicated."""
    name, precision, ranks, variant, arch, out = sys.argv[1:]
    graph, inputs, expected = CASES[name]()
    np.savez(f"{out}.npz", *inputs, **{f"expected{number}": y for number, y in enumerate(expected)})
    plan = search(graph, builtin(MACHINE_OF_ARCH[arch], DeviceMesh((1,))))
    weights = plan.stage.weight_bytes_per_device
    beside = max(live_bytes(GraphView(graph), plan.stage)) - weights
    config = {
        "target": "cuda",
        "arch": arch,
        "mem_budget": int(weights * 1.3 / int(ranks)) + beside if int(ranks) > 1 else None,  # so that it is split
        "precision": None if precision == "float32" else precision,
        "cuda_graph": variant == "graph",
        "space": 1 if variant == "candidates" else 0,
    }
    result = auto_parallel(graph, {"mesh_shape": [int(ranks)]}, config, out)
    print(f"{len(result.communications)} collectives, built in {result.compile_seconds:.1f} s")


main()
