"""Time the rules of a large model's operators, and of single operators; the last line is JSON.

    python -m benchmarks.rules

``graph_cpu_seconds`` is for the rules and choices of all operators of a GPT-3 175B (96 layers) on a mesh of 8 x 8, from
the traced graph, ``distinct_operators`` how many of them had to be analysed. For single operators on that mesh:
microseconds to analyse the definition, and to find and prove all choices. CPU time, so that others on the machine do
not count.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable

import hidet
from hidet import ops
from hidet.graph import Operator

from hidet_dist.normalize import normalize
from hidet_dist.rules.rule import RuleTable, derive
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import shapes
from hidet_dist.view import GraphView

MESH = DeviceMesh((8, 8))
REPEATS = 20


def symbol(shape: list[int], dtype: str = "float16") -> hidet.Tensor:
    return hidet.symbol(shape, dtype, "cpu")


SINGLE: dict[str, Callable[[], Operator]] = {
    "add": lambda: ops.add(symbol([8, 2048, 12288]), symbol([12288])).op,
    "matmul": lambda: ops.matmul(symbol([8, 2048, 12288]), symbol([12288, 49152])).op,
    "split_heads": lambda: ops.reshape(symbol([8, 2048, 12288]), [8, 2048, 96, 128]).op,
    "embedding": lambda: ops.take(symbol([50264, 12288]), symbol([8, 2048], "int32")).op,
    "convolution": lambda: ops.conv2d(symbol([64, 256, 56, 56]), symbol([512, 256, 3, 3])).op,
}


def main() -> None:
    graph = normalize(shapes.gpt(shapes.GPT3_175B))
    view = GraphView(graph)
    begin = time.process_time()
    table = RuleTable(MESH)
    choices = sum(len(table(op)[1]) for op in view.operators)
    result = {
        "machine": platform.machine(),
        "operators": len(view.operators),
        "distinct_operators": len({id(table(op)[0]) for op in view.operators}),
        "choices": choices,
        "graph_cpu_seconds": round(time.process_time() - begin, 3),
    }
    single = {}
    for name, build in SINGLE.items():
        made = [build() for _ in range(REPEATS)]
        begin = time.process_time()
        rules = [derive(op) for op in made]
        middle = time.process_time()
        for rule in rules:
            rule.choices(MESH)
        end = time.process_time()
        microseconds = [round((b - a) / REPEATS * 1e6) for a, b in ((begin, middle), (middle, end))]
        single[name] = dict(zip(("analysis_microseconds", "choices_microseconds"), microseconds, strict=True))
        print(f"{name}: {microseconds[0]} us to analyse, {microseconds[1]} us for its choices")
    print(json.dumps({**result, "single": single}))


if __name__ == "__main__":
    main()
