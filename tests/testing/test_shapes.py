from __future__ import annotations

import dataclasses
from pathlib import Path

import hidet

from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import shapes
from hidet_dist.view import GraphView


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def weight_bytes(graph: hidet.FlowGraph) -> int:
    view = GraphView(normalize(graph))
    return sum(map(view.nbytes, view.weights))


def test_planning_does_not_touch_the_weights() -> None:
    graph = normalize(shapes.gpt(dataclasses.replace(shapes.GPT3_175B, layers=2)))
    assert weight_bytes(graph) > 9e9
    before = resident_bytes()
    plan = search(graph, builtin("dgx-a100", DeviceMesh((8,)))).plan
    assert sum(weight.nbytes for weight in plan.stages[0].weights) == weight_bytes(graph)
    assert resident_bytes() - before < 2**29


def test_the_sizes_are_those_of_the_models() -> None:
    # 12 h^2 + 13 h a layer, the embeddings, the last norm and the head, of 2 bytes each (Brown et al. 2020, table 2.1).
    layer = shapes.gpt(dataclasses.replace(shapes.GPT3_175B, layers=1))
    h = 12288
    assert weight_bytes(layer) == 2 * (12 * h * h + 13 * h + (2 * 50257 + 2048 + 2) * h)
    assert 96 * (12 * h * h) > 173e9
    # Llama 3 8B has 8.03e9 parameters (Meta's model card).
    h, layers = 4096, 32
    one = GraphView(normalize(shapes.llama(dataclasses.replace(shapes.LLAMA3_8B, layers=1))))
    blocks = sum(map(one.nbytes, one.weights)) / 2 - 2 * 128256 * h
    assert abs(layers * blocks + 2 * 128256 * h - 8.03e9) < 0.01e9
