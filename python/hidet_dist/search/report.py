"""The report of a search: runner-ups, incumbents, memory over time, and communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hidet_dist.reshard import Step, walk
from hidet_dist.search.eliminate import Tables, marginals
from hidet_dist.search.formulation import Formulation
from hidet_dist.search.limits import Limits, OutOfTimeError
from hidet_dist.search.memory import live_bytes
from hidet_dist.search.prices import Prices
from hidet_dist.search.problem import Edge, Problem, evaluate
from hidet_dist.spec import OpShardSpec, StagePlan, TensorShardSpec
from hidet_dist.spec.partial import Layout, PartialSpec, split_of
from hidet_dist.spec.report import Incumbent, Row, RunnerUp, SearchReport, Traffic
from hidet_dist.view import GraphView


class Known(NamedTuple):
    """A plan that was the best known at some time: its choices and seconds, and the bound and elapsed seconds then."""

    choices: tuple[int, ...]
    seconds: float
    bound_seconds: float
    elapsed_seconds: float


@dataclass
class Incumbents:
    """The best plans known in turn, as the search reports them."""

    known: list[Known] = field(default_factory=list)

    def __call__(self, choices: Sequence[int], seconds: float, bound: float, elapsed: float) -> None:
        """Record a plan that is better than those before, or a better bound for the last one."""
        picks = tuple(choices)
        if self.known and self.known[-1].choices == picks:
            self.known.pop()
        self.known.append(Known(picks, seconds, min(bound, seconds), elapsed))


def write_report(
    view: GraphView,
    formulation: Formulation,
    stage: StagePlan,
    picks: Sequence[int],
    incumbents: Sequence[tuple[Known, StagePlan]],
    mode: str,
    gap: float,
    budget: int,
    limits: Limits,
) -> SearchReport:
    """Write the report of the search that found ``stage``; ``incumbents`` are the plans that were the best known."""
    others = runner_ups(formulation, picks, stage.seconds * (1 - gap), limits)
    return SearchReport(
        mode,
        stage.seconds * (1 - gap),
        gap,
        budget,
        tuple(live_bytes(view, stage)),
        traffic(view, stage),
        others,
        _incumbents(incumbents),
        limits.time_reached,
    )


def runner_ups(
    formulation: Formulation, picks: Sequence[int], bound_seconds: float, limits: Limits
) -> tuple[RunnerUp | None, ...]:
    """Select the next best choice of each operator: that of the least bound, or without bounds, the least cost.

    The bound is a min-marginal of the problem without its budget (a backward pass of the elimination over all choices),
    and no less than ``bound_seconds``, below which there is no plan that fits.
    """
    problem = formulation.problem
    count = len(formulation.choices)
    free = Prices([0.0] * problem.activations.points)
    try:
        least = marginals(problem, [list(range(len(costs))) for costs in problem.cost], Tables(limits), free)
    except OutOfTimeError:
        least = None
    alone = _alone(problem, picks, count)
    result: list[RunnerUp | None] = []
    for number, choices in enumerate(formulation.choices):
        others = [k for k in range(len(choices)) if k != picks[number]]
        if not others:
            result.append(None)
            continue
        bounds = None if least is None else least[number]
        best = min(
            others, key=lambda k: (0.0 if bounds is None else max(float(bounds[k]), bound_seconds), alone[number][k], k)
        )
        bound = None if bounds is None else max(float(bounds[best]), bound_seconds)
        result.append(RunnerUp(str(choices[best].spec), bound, alone[number][best]))
    return tuple(result)


def _alone(problem: Problem, picks: Sequence[int], count: int) -> list[list[float]]:
    """Cost the plans in which one choice of one of the first entities is changed."""
    total = evaluate(problem, picks)
    edges: list[list[Edge]] = [[] for _ in problem.cost]
    groups: dict[int, list[Edge]] = {}
    for edge in problem.edges:
        groups.setdefault(edge.tensor, []).append(edge)
    for group in groups.values():
        for entity in {group[0].producer, *(edge.consumer for edge in group)}:
            edges[entity].append(group[0])

    def around(entity: int, k: int) -> float:
        def pick(other: int) -> int:
            return k if other == entity else picks[other]

        seconds = problem.cost[entity][k]
        for first in edges[entity]:
            group = groups[first.tensor]
            source = first.produced[pick(first.producer)]
            required = dict.fromkeys(edge.consumed[pick(edge.consumer)] for edge in group)
            seconds += sum(first.convert[source][spec] for spec in required)
        return seconds

    return [
        [total - around(entity, picks[entity]) + around(entity, k) for k in range(len(problem.cost[entity]))]
        for entity in range(count)
    ]


def traffic(view: GraphView, stage: StagePlan) -> dict[str, Traffic]:
    """Count the communication of a run by kind of collective, in bytes of the tensors whole within their groups."""
    mesh = stage.mesh
    result: dict[str, Traffic] = {}

    def add(name: str, steps: Sequence[Step], source: Layout) -> None:
        shape, itemsize = view.shape(name), view.itemsize(name)
        for step, after in zip(steps, walk(steps, source, shape, mesh), strict=True):
            if step.collective.communicates:
                # A collective's group holds the tensor once, in pieces or whole: before it or after it.
                sizes = (split_of(layout).local_nbytes(shape, itemsize, mesh) for layout in (source, after))
                whole = max(sizes) * (mesh.group_size(step.mesh_axes) if step.collective.moves else 1)
                before_this = result.get(step.kind, Traffic(0, 0))
                result[step.kind] = Traffic(before_this.count + 1, before_this.nbytes + whole)
            source = after

    for op, planned in zip(view.operators, stage.operators, strict=True):
        for conversion in planned.conversions:
            add(conversion.tensor, tuple(map(Step.parse, conversion.steps)), conversion.source)
        for o, fns in enumerate(planned.spec.reduce_fns):
            for n, fn in enumerate(fns):
                axes = tuple(axis for later in fns[n:] for axis in later.mesh_axes)
                partial = PartialSpec(_before(planned.spec, o, n), fn.op, axes)
                add(view.names[op.outputs[o]], [Step.of(fn)], partial)
    for conversion in stage.output_conversions:
        add(conversion.tensor, tuple(map(Step.parse, conversion.steps)), conversion.source)
    return dict(sorted(result.items()))


def _before(spec: OpShardSpec, output: int, fn: int) -> TensorShardSpec:
    """Compute the spec of a partial output before one of its reduce functions."""
    spec_of = spec.partial_spec(output)
    for earlier in spec.reduce_fns[output][:fn]:
        if earlier.dim is not None:
            spec_of = spec_of.with_dim(earlier.dim, (*spec_of.mesh_axes_per_dim[earlier.dim], *earlier.mesh_axes))
    return spec_of


def _incumbents(incumbents: Sequence[tuple[Known, StagePlan]]) -> tuple[Incumbent, ...]:
    result = []
    before: dict[int, tuple[Row, ...]] = {}
    for known, stage in incumbents:
        rows = _rows(stage)
        changed = {number: new_rows for number, new_rows in rows.items() if before.get(number) != new_rows}
        result.append(Incumbent(known.seconds, known.bound_seconds, known.elapsed_seconds, changed))
        before = rows
    return tuple(result)


def _rows(stage: StagePlan) -> dict[int, tuple[Row, ...]]:
    """Make the plan's table by operator number, as the Slapo autosharder prints it: operator, then its conversions."""
    rows: dict[int, tuple[Row, ...]] = {}
    for op in stage.operators:
        ins, outs = (" x ".join(map(str, specs)) for specs in (op.spec.in_specs, op.spec.out_specs))
        lines = [Row(op.label or f"{op.operator} {op.index}", ins, outs, op.compute_seconds + op.reduce_seconds)]
        lines += [Row(f"|-{c.tensor}", str(c.source), str(c.target), c.seconds) for c in op.conversions]
        rows[op.index] = tuple(lines)
    rows[len(rows)] = tuple(Row("output", str(c.source), str(c.target), c.seconds) for c in stage.output_conversions)
    return rows
