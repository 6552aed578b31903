"""Models small enough to plan, compile and run in seconds, and the means to serve them with real processes."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import hidet_dist
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.search import search
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import minilm as sentences
from hidet_dist.testing import models
from hidet_dist.view import GraphView

SERVE = Path(__file__).with_name("serve.py")
SENTENCES = ["Two ranks share one model.", "The weather is fine today.", "Sharding splits a tensor.", "It rains."]


def minilm():
    model, tokens = sentences.load_minilm(), sentences.tokenize(SENTENCES, 16)
    graph = hidet_dist.from_torch(model, {name: torch.from_numpy(x) for name, x in tokens.items()})
    return graph, list(tokens.values()), [sentences.embed(model, tokens)]


def gpt2():
    graph, inputs = models.gpt2()
    return graph, inputs, models.run_whole(graph, inputs)


def resnet18():
    graph, inputs = models.resnet18()
    return graph, inputs, models.run_whole(graph, inputs)


MODELS = {"minilm": minilm, "gpt2": gpt2, "resnet18": resnet18}


@functools.cache
def made(name):
    return name, *MODELS[name]()


@pytest.fixture
def model(request):
    """(name, graph, inputs, outputs of the unsharded model), which ``on_models`` chooses"""
    return made(request.param)


def on_models(*quick):
    """Run a test on these models, and on the others where time does not matter."""
    slow = (pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name not in quick)
    return pytest.mark.parametrize("model", [*quick, *slow], indirect=True)


def weight_bytes(graph):
    view = GraphView(normalize(graph))
    return sum(view.nbytes(name) for name in view.weights)


def budget(graph, ranks):
    """Bytes for 1.2 of an even share of the weights, beside what a single device would hold of all else."""
    normal = normalize(graph)
    plan = search(normal, builtin("cpu", DeviceMesh((1,)))).plan
    beside = max(live_bytes(GraphView(normal), plan.stages[0])) - plan.stages[0].weight_bytes_per_device
    return int(weight_bytes(graph) * 1.2 / ranks) + beside


def launch(ranks, script, *arguments, timeout=1000, **environment):
    """Run ``script`` on ``ranks`` real processes through the launcher; never hangs."""
    command = [sys.executable, "-m", "hidet_dist.launch", "-n", str(ranks), str(script), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, env={**os.environ, **environment}
    )


def serve(ranks, artifacts, inputs, folder, timeout=1000):
    """The outputs of each rank."""
    np.savez(folder / "inputs.npz", *inputs)
    done = launch(ranks, SERVE, artifacts, folder / "inputs.npz", folder, timeout)
    assert done.returncode == 0, done.stderr
    outputs = []
    for rank in range(ranks):
        with np.load(folder / f"rank{rank}.npz") as data:
            outputs.append([data[name] for name in data.files])
    return outputs
