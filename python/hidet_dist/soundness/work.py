"""The units of work of the full harness, an operator class or a graph, which are distributed to processes."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec

import numpy as np

from hidet_dist.normalize import normalize
from hidet_dist.rules.rule import RuleTable, derive
from hidet_dist.soundness.check import check_operator, random_parts
from hidet_dist.soundness.cuts import Cuttable, check_pipeline, random_pipeline
from hidet_dist.soundness.graphs import GRAPHS
from hidet_dist.soundness.instances import MAKERS, instance
from hidet_dist.soundness.plans import check_calls, check_stage, evaluate_graph, graph_inputs, random_stage
from hidet_dist.soundness.served import check_served
from hidet_dist.soundness.states import STATEFUL
from hidet_dist.spec import DeviceMesh, Plan, StagePlan
from hidet_dist.symbolic.planning import planning_view, rule_table
from hidet_dist.view import GraphView

P = ParamSpec("P")
OPERATOR_MESHES: tuple[tuple[int, ...], ...] = ((2,), (4,), (2, 2), (2, 3), (2, 2, 2))
PART_MESHES: tuple[tuple[int, ...], ...] = ((3,), (5,), (2, 3))
"""The meshes whose axes split in random parts."""
STATE_MESHES: tuple[tuple[int, ...], ...] = ((2,), (3,), (2, 2))
FAMILY_MESHES: tuple[tuple[int, ...], ...] = ((3,), (2, 3))
"""The meshes of plans over one storage."""
CALLS = 4
"""The number of calls of a graph with states, each of which finds what the ones before it have left."""
GRAPH_MESHES: tuple[tuple[int, ...], ...] = ((2,), (4,), (2, 2), (2, 4))


@dataclass
class CheckResult:
    """The result of checking one operator class or graph: a line to print, counts, and failures."""

    line: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def difference_of(check: Callable[P, str], *args: P.args, **kwargs: P.kwargs) -> str:
    """Return what a check finds; of one that fails, why, so that a run goes on behind the plan that it fails on."""
    try:
        return check(*args, **kwargs)
    except Exception:
        return f"the check failed.\n{traceback.format_exc()}"


def check_class(number: int, instances: int, seed: int) -> CheckResult:
    """Check every choice of random instances of operator class ``number`` on all meshes, and in random parts."""
    cls = list(MAKERS)[number]
    result = CheckResult("", Counter(operators=1))
    for repeat in range(instances):
        rng = np.random.default_rng((seed, number, repeat))
        sample = instance(cls, rng)
        for mesh in map(DeviceMesh, OPERATOR_MESHES):
            checked = check_operator(sample.op, mesh, rng, sample.ranges)
            result.counts["choices"] += checked.choices
            result.failures += map(str, checked.failures)
        rule = derive(sample.op)
        for mesh in map(DeviceMesh, PART_MESHES):
            offered = random_parts([digit.extent for digit in rule.factors], mesh, rng)
            checked = check_operator(sample.op, mesh, rng, sample.ranges, rule, offered)
            result.counts["choices"] += checked.choices
            result.failures += map(str, checked.failures)
        result.counts["instances"] += 1
    result.line = f"{cls.__name__}: {result.counts['choices']} choices"
    return result


def check_graph(name: str, plans: int, seed: int) -> CheckResult:
    """Check random plans of a graph, on all meshes in turn, on those of ``PART_MESHES`` in random parts."""
    rng = np.random.default_rng((seed, list(GRAPHS).index(name)))
    traced = GRAPHS[name](rng)
    inputs = graph_inputs(traced, rng)
    expected = evaluate_graph(traced, inputs)
    graph = normalize(traced)
    view = GraphView(graph)
    shared = RuleTable(DeviceMesh(GRAPH_MESHES[0]))  # rules and proofs, for all meshes
    tables = {shape: RuleTable(DeviceMesh(shape), shared) for shape in GRAPH_MESHES}
    extents = _extents(view, shared)
    for mesh in map(DeviceMesh, PART_MESHES):
        tables[mesh.shape] = RuleTable(mesh, shared, random_parts(extents, mesh, rng))
    result = CheckResult(f"{name}: {plans} plans", Counter(plans=plans))
    for number in range(plans):
        shape = list(tables)[number % len(tables)]
        stage = random_stage(view, DeviceMesh(shape), tables[shape], rng)
        difference = difference_of(check_stage, graph, stage, inputs, expected, tables[shape])
        if difference:
            result.failures.append(f"{name} on {shape}: {difference}\n{Plan((stage,)).to_json()}")
    return result


def check_states(name: str, plans: int, seed: int, served: int = 0) -> CheckResult:
    """Check random plans of a graph with states over several random calls, on all meshes in turn.

    Every second plan of a mesh has random parts. The last ``served`` plans are compiled, and served by real processes.
    """
    result = CheckResult(f"{name}: {plans} plans of {CALLS} calls", Counter(plans=plans))
    result.failures += _failures_of_states(name, plans, (seed, 2), served, STATE_MESHES, 1)
    return result


def check_families(name: str, families: int, seed: int, served: int = 0) -> CheckResult:
    """Check pairs of random plans of a graph with states as programs over one storage, which calls run in turn.

    They are on the meshes of ``FAMILY_MESHES``, in random parts. The last ``served`` pairs are compiled, and served by
    real processes.
    """
    result = CheckResult(f"{name}: {families} families of {CALLS} calls", Counter(families=families))
    result.failures += _failures_of_states(name, families, (seed, 3), served, FAMILY_MESHES, 2)
    return result


def _failures_of_states(
    name: str, repeats: int, seed: tuple[int, int], served: int, meshes: Sequence[tuple[int, ...]], count: int
) -> Iterator[str]:
    """Check ``count`` random plans over one storage, as often as ``repeats`` says; yield what is wrong.

    One plan has random parts in every second repeat, several plans always.
    """
    begin, kind = seed
    rng = np.random.default_rng((begin, list(STATEFUL).index(name), kind))
    stateful = STATEFUL[name](rng)
    graph = normalize(stateful.graph)
    known = {}
    for mesh in map(DeviceMesh, meshes):
        view = planning_view(graph, stateful.symbols, mesh)
        table = rule_table(view, mesh)
        parted = rule_table(view, mesh, table, random_parts(_extents(view, table), mesh, rng))
        known[mesh] = view, (table, parted) if count == 1 else (parted,)
    for number in range(repeats):
        mesh = DeviceMesh(meshes[number % len(meshes)])
        view, tables = known[mesh]
        table = tables[number // len(meshes) % len(tables)]
        stages: list[StagePlan] = []
        for _ in range(count):
            stages.append(random_stage(view, mesh, table, rng, *stages[:1]))
        calls = [stateful.draw(rng) for _ in range(CALLS)]
        difference = difference_of(check_calls, graph, stages, calls)
        if not difference and number >= repeats - served:
            difference = difference_of(check_served, graph, stages, calls, table)
        if difference:
            written = "\n".join(Plan((stage,)).to_json() for stage in stages)
            yield f"{name} on {mesh}: {difference}\n{written}"


def _extents(view: GraphView, rules: RuleTable) -> list[int]:
    """List the extents of the factors of all operators."""
    return [digit.extent for op in view.operators for digit in rules.rule(op).factors]


def check_cuts(name: str, cuts: int, seed: int) -> CheckResult:
    """Check random cuts of a graph into stages, each with a random plan on a separate mesh."""
    rng = np.random.default_rng((seed, list(GRAPHS).index(name), 1))
    traced = GRAPHS[name](rng)
    inputs = graph_inputs(traced, rng)
    whole = evaluate_graph(traced, inputs)
    cuttable = Cuttable(normalize(traced))
    result = CheckResult(f"{name}: {cuts} cuts", Counter(cuts=cuts))
    for _ in range(cuts):
        pipeline = random_pipeline(cuttable, rng)
        difference = difference_of(check_pipeline, pipeline, inputs, whole, cuttable)
        if difference:
            plans = Plan(pipeline.stages).to_json()
            result.failures.append(f"{name} as {pipeline}: {difference}\n{plans}")
    return result
