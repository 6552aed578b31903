"""``python -m hidet_dist.rules.soundness``: the harness at full size; the last line of its output is JSON."""

from __future__ import annotations

import argparse
import json

import numpy as np

from hidet_dist.rules.catalog import REPLICATE_ONLY, catalog
from hidet_dist.rules.rule import RuleTable
from hidet_dist.rules.soundness.check import check_operator
from hidet_dist.rules.soundness.graphs import GRAPHS
from hidet_dist.rules.soundness.instances import MAKERS, instance
from hidet_dist.rules.soundness.plans import check_plan, evaluate_graph, graph_inputs, random_plan
from hidet_dist.spec import DeviceMesh
from hidet_dist.view import GraphView

OPERATOR_MESHES: tuple[tuple[int, ...], ...] = ((2,), (4,), (2, 2), (2, 3), (2, 2, 2))
GRAPH_MESHES: tuple[tuple[int, ...], ...] = ((2,), (4,), (2, 2), (2, 4))


def main(arguments: list[str] | None = None) -> int:
    """Run the harness; the exit status is 1 when a choice or a plan is wrong."""
    parser = argparse.ArgumentParser(prog="python -m hidet_dist.rules.soundness", description=__doc__)
    parser.add_argument("--instances", type=int, default=10, help="random instances of each operator class")
    parser.add_argument("--plans", type=int, default=200, help="random plans of each graph, over all meshes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only operator classes and graphs with this in their name")
    given = parser.parse_args(arguments)
    counts = {"operators": 0, "replicate_only": 0, "instances": 0, "choices": 0, "plans": 0, "failures": 0}
    counts["replicate_only"] = sum(entry.group == REPLICATE_ONLY for entry in catalog())

    def failed(what: object) -> None:
        counts["failures"] += 1
        print(f"FAILURE {what}", flush=True)

    for number, cls in enumerate(MAKERS):
        if given.only not in cls.__name__:
            continue
        before = counts["choices"]
        for repeat in range(given.instances):
            rng = np.random.default_rng((given.seed, number, repeat))
            made = instance(cls, rng)
            for mesh in map(DeviceMesh, OPERATOR_MESHES):
                checked = check_operator(made.op, mesh, rng, made.ranges)
                counts["choices"] += checked.choices
                for failure in checked.failures:
                    failed(failure)
            counts["instances"] += 1
        counts["operators"] += 1
        print(f"{cls.__name__}: {counts['choices'] - before} choices", flush=True)
    for name, build in GRAPHS.items():
        if given.only not in name:
            continue
        rng = np.random.default_rng((given.seed, len(name)))
        graph = build(rng)
        view, inputs = GraphView(graph), graph_inputs(graph, rng)
        whole = evaluate_graph(graph, inputs)
        tables = {shape: RuleTable(DeviceMesh(shape)) for shape in GRAPH_MESHES}
        for number in range(given.plans):
            shape = GRAPH_MESHES[number % len(GRAPH_MESHES)]
            plan = random_plan(view, DeviceMesh(shape), tables[shape], rng)
            what = check_plan(graph, plan, inputs, whole)
            counts["plans"] += 1
            if what:
                failed(f"{name} on {shape}: {what}\n{plan.to_json()}")
        print(f"{name}: {given.plans} plans", flush=True)
    print(json.dumps(counts))
    return 1 if counts["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
