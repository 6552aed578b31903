"""The report of a search: runner-ups, incumbents, memory over time, and communication."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hidet_dist.cost.dispatch import TokenExchange, exchanges
from hidet_dist.reshard import Step, walk
from hidet_dist.search import tuning
from hidet_dist.search.elimination.eliminate import marginals
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.elimination.network import Tables
from hidet_dist.search.elimination.tensor_relaxation import TensorRelaxation
from hidet_dist.search.formulation.devices import DeviceHeld
from hidet_dist.search.formulation.formulate import Formulation
from hidet_dist.search.limits import Limits, OutOfTimeError
from hidet_dist.search.problem import Edge, Problem, evaluate, readers
from hidet_dist.search.problem.descent import Neighbourhood
from hidet_dist.search.problem.prices import Prices
from hidet_dist.spec import OpShardSpec, StagePlan, TensorShardSpec
from hidet_dist.spec.partial import Layout, PartialSpec, split_of
from hidet_dist.spec.plan import ConversionPlan
from hidet_dist.spec.report import Incumbent, PlanRow, RunnerUp, Saving, SearchReport, StepTaken, Traffic
from hidet_dist.view import GraphView

_Numbers = npt.NDArray[np.int64]
_Seconds = npt.NDArray[np.float64]


class KnownIncumbent(NamedTuple):
    """An incumbent: its choices and seconds, and the lower bound and the elapsed seconds at its time."""

    choices: tuple[int, ...]
    seconds: float
    bound_seconds: float
    elapsed_seconds: float


@dataclass
class Incumbents:
    """The successive incumbents of a search: each was the best plan so far.

    Those between two that differ little are left out: each one is written down as a plan for the report.
    """

    known: list[KnownIncumbent] = field(default_factory=list)

    def __call__(self, choices: Sequence[int], seconds: float, bound: float, elapsed: float) -> None:
        """Record a better plan, or a better bound for the last one."""
        picks = tuple(choices)
        repeated = bool(self.known) and self.known[-1].choices == picks
        if repeated or (len(self.known) > 1 and seconds > self.known[-2].seconds * (1 - tuning.INCUMBENT_GAP)):
            self.known.pop()
        self.known.append(KnownIncumbent(picks, seconds, min(bound, seconds), elapsed))


def write_report(
    view: GraphView,
    formulation: Formulation,
    stage: StagePlan,
    picks: Sequence[int],
    incumbents: Sequence[tuple[KnownIncumbent, StagePlan]],
    mode: str,
    bound_seconds: float,
    gap: float,
    held: DeviceHeld,
    limits: Limits,
    steps: Sequence[StepTaken] = (),
    narrowed: frozenset[int] | None = None,
) -> SearchReport:
    """Write the report of the search that chose ``stage``.

    ``incumbents`` are the best plans over time, ``held`` what it holds on the fullest device. ``narrowed`` are tensors
    that the search relaxed so that eliminations were not too wide.
    """
    others = Alternatives(formulation, picks, bound_seconds, limits, narrowed)
    return SearchReport(
        mode=mode,
        bound_seconds=bound_seconds,
        gap=gap,
        time_limit_reached=limits.time_reached,
        incumbents=_incumbents(incumbents),
        steps=tuple(steps),
        mem_budget=held.device.nbytes,
        live_bytes=tuple(held.live_bytes),
        traffic=traffic(view, stage),
        runner_ups=others.runner_ups(),
        weights=others.weights(),
        savings=others.savings(view, stage),
        device=held.device.coordinate or (),
    )


class Alternatives:
    """The costs of plans in which an operator, a weight, an input or an output makes another choice.

    The bound of a choice is a min-marginal of the problem without its budget (a backward pass of the elimination over
    all choices), or ``bound_seconds``, the lower bound of plans that fit, if that is greater. The best of several
    choices has the least bound, or without bounds the least cost.
    """

    def __init__(
        self,
        formulation: Formulation,
        picks: Sequence[int],
        bound_seconds: float,
        limits: Limits,
        narrowed: frozenset[int] | None = None,
    ):
        self.formulation, self.picks, self.bound_seconds = formulation, picks, bound_seconds
        problem = formulation.of_first_device
        free = Prices([0.0] * problem.activations.points)
        try:
            limits.check()
            every = [list(range(len(costs))) for costs in problem.cost]
            relaxation = TensorRelaxation(narrowed)
            self.least = marginals(EliminationInstance(problem, every, Tables(limits), free, relaxation))
        except OutOfTimeError:
            self.least = None
        self.alone = _alone(problem, picks)
        self._numbers: dict[tuple[int, int], _Numbers] = {}  # by the identities of what is numbered
        self._texts: dict[int, str] = {}
        self.stored = [*formulation.weight_specs, *formulation.inputs, *formulation.outputs, *formulation.states]

    def _choice(self, entity: int, k: int) -> RunnerUp:
        choices = self.formulation.choices
        spec = choices[entity][k].spec if entity < len(choices) else self.stored[entity - len(choices)][k]
        bound = None if self.least is None else max(float(self.least[entity][k]), self.bound_seconds)
        return RunnerUp(self._text(spec), bound, float(self.alone[entity][k]))

    def _text(self, spec: OpShardSpec | TensorShardSpec) -> str:
        """Write a spec; those of equal layers are one object, which the formulation keeps."""
        if id(spec) not in self._texts:
            self._texts[id(spec)] = str(spec)
        return self._texts[id(spec)]

    def _best(self, entity: int, avoided: _Numbers | None = None) -> RunnerUp | None:
        """Select the best other choice; with ``avoided`` (one entry a choice), of those whose entry differs."""
        pick = self.picks[entity]
        if avoided is None:
            avoided = np.arange(len(self.alone[entity]))
        (others,) = np.nonzero(avoided != avoided[pick])
        if not others.size:
            return None
        alone = self.alone[entity][others]
        bounds = alone if self.least is None else np.maximum(self.least[entity][others], self.bound_seconds)
        (best,) = np.nonzero(bounds == bounds.min())
        return self._choice(entity, int(others[best[alone[best].argmin()]]))

    def _specs_of(self, numbers: Sequence[int], layouts: Sequence[TensorShardSpec]) -> _Numbers:
        """Number the specs that a tensor has by the choices of an operator, equal ones alike."""
        key = id(numbers), id(layouts)
        if key not in self._numbers:
            first = _first_numbers(layouts)
            self._numbers[key] = first[np.array(numbers, dtype=np.int64)]
        return self._numbers[key]

    def _reductions_of(self, operator: int, output: int) -> _Numbers:
        """Number the reductions of an output by the choices of its operator, equal ones alike."""
        choices = self.formulation.choices[operator]
        key = id(choices), output
        if key not in self._numbers:
            self._numbers[key] = _first_numbers([choice.spec.reduce_fns[output] for choice in choices])
        return self._numbers[key]

    def runner_ups(self) -> tuple[RunnerUp | None, ...]:
        """Select the next best choice of each operator."""
        return tuple(self._best(number) for number in range(len(self.formulation.choices)))

    def weights(self) -> tuple[tuple[RunnerUp, ...], ...]:
        """Cost every other choice of each weight."""
        return tuple(
            tuple(self._choice(entity, k) for k in range(len(self.alone[entity])) if k != self.picks[entity])
            for entity in self.formulation.weights
        )

    def savings(self, view: GraphView, stage: StagePlan) -> tuple[Saving, ...]:
        """Select the best choice that avoids each reduction and conversion of the plan.

        Another choice of its operator avoids a reduction. A conversion is avoided if the producer makes the tensor in
        another spec, or if no consumer requires the spec any more: that has the greatest of the consumers' bounds.
        """
        edges: dict[str, list[Edge]] = {}
        names = list(self.formulation.layouts)
        for edge in self.formulation.edges:
            edges.setdefault(names[edge.tensor], []).append(edge)
        result: list[Saving] = []
        for number, plan in enumerate(stage.operators):
            for conversion in plan.conversions:
                result += self._saving(view, number, conversion, edges[conversion.tensor])
            for o, fns in enumerate(plan.spec.reduce_fns):
                best = self._best(number, self._reductions_of(number, o)) if fns else None
                if best is not None:
                    name = view.names[view.operators[number].outputs[o]]
                    result.append(Saving(number, name, "", f"op:{number}", **vars(best)))
        for conversion in stage.output_conversions:
            result += self._saving(view, None, conversion, edges[conversion.tensor])
        return tuple(result)

    def _saving(
        self, view: GraphView, operator: int | None, conversion: ConversionPlan, edges: Sequence[Edge]
    ) -> Iterator[Saving]:
        layouts = self.formulation.layouts[conversion.tensor]
        producer = edges[0].producer
        alternatives = [(producer, self._best(producer, self._specs_of(edges[0].produced, layouts)))]
        others = []
        for edge in edges:
            if layouts[edge.consumed[self.picks[edge.consumer]]] == conversion.target:
                required = self._specs_of(edge.consumed, layouts)
                others.append((edge.consumer, self._best(edge.consumer, required)))
        if all(choice is not None for _, choice in others):
            alternatives.append(max(others, key=lambda one: _order(one[1])))
        possible = [(entity, choice) for entity, choice in alternatives if choice is not None]
        if possible:
            entity, choice = min(possible, key=lambda one: _order(one[1]))
            name = _entity_name(view, entity)
            yield Saving(operator, conversion.tensor, str(conversion.target), name, **vars(choice))


def _first_numbers(values: Sequence[Hashable]) -> _Numbers:
    """Number values, each by the place of the first one that equals it."""
    first: dict[Hashable, int] = {}
    return np.array([first.setdefault(value, place) for place, value in enumerate(values)], dtype=np.int64)


def _order(choice: RunnerUp | None) -> tuple[float, float]:
    return (0.0, 0.0) if choice is None else (choice.at_least_seconds or 0.0, choice.alone_seconds)


def _entity_name(view: GraphView, entity: int) -> str:
    """Return the name of an entity in pins and edits."""
    count, stored = len(view.operators), (*view.weights, *view.inputs)
    if entity < count:
        return f"op:{entity}"
    number = entity - count
    outputs = (f"y{output}" for output in range(len(view.outputs)))
    return (*stored, *outputs, *view.states)[number]


def _alone(problem: Problem, picks: Sequence[int]) -> list[_Seconds]:
    """Cost the plans that differ in one choice of one entity."""
    total = evaluate(problem, picks)
    plan = Neighbourhood(problem, readers(problem), picks)
    known: dict[tuple[int, int], _Seconds] = {}  # equal entities share their seconds
    result = []
    for entity, pick in enumerate(picks):
        seconds = plan.seconds(entity)
        key = id(seconds), pick
        if key not in known:
            known[key] = np.array([total - seconds[pick] + value for value in seconds])
        result.append(known[key])
    return result


@dataclass(frozen=True)
class SentStep:
    """A step of a conversion, or a reduce function, in its place in the plan.

    Attributes
    ----------
    operator: the number of the operator; None for a graph output.
    tensor: the name of the communicated tensor.
    step: the step.
    before, after: the layouts of the tensor before and after the step.
    source, target: the specs before and after all steps of the conversion or reduction.
    nbytes: the bytes of the tensor as a group holds it together; 0 for a local step.
    reduces: whether it is a reduce function.
    exchange: the exchange of a dispatch that takes its place; None for any other step.
    """

    operator: int | None
    tensor: str
    step: Step
    before: Layout
    after: Layout
    source: TensorShardSpec
    target: TensorShardSpec
    nbytes: int
    reduces: bool
    exchange: TokenExchange | None = None


def sent_steps(view: GraphView, stage: StagePlan) -> Iterator[SentStep]:
    """Yield each conversion step and reduce function of a plan, in execution order."""
    mesh = stage.mesh

    def steps_of(operator: int | None, conversion: ConversionPlan) -> Iterator[SentStep]:
        name = conversion.tensor
        layout: Layout = conversion.source
        steps = tuple(map(Step.parse, conversion.steps))
        for step, after in zip(steps, walk(steps, layout, view.shape(name), mesh), strict=True):
            nbytes = sent_nbytes(name, step, layout, after)
            yield SentStep(operator, name, step, layout, after, conversion.source, conversion.target, nbytes, False)
            layout = after

    def sent_nbytes(name: str, step: Step, before: Layout, after: Layout) -> int:
        if not step.collective.communicates:
            return 0
        # A group of the collective holds the tensor once, in pieces or whole, either before or after it.
        shape, itemsize = view.shape(name), view.itemsize(name)
        sent, received = (split_of(layout).local_nbytes(shape, itemsize, mesh) for layout in (before, after))
        if step.is_uneven(mesh):
            return step.whole_nbytes(sent, mesh)
        return max(sent, received) * (mesh.group_size(step.mesh_axes) if step.collective.moves else 1)

    for number, (op, plan) in enumerate(zip(view.operators, stage.operators, strict=True)):
        for conversion in plan.conversions:
            yield from steps_of(number, conversion)
        dispatched = () if plan.spec.dispatch is None else exchanges(view.operators[number], plan.spec, mesh)
        for one in dispatched:
            if one.input is not None:
                name, received = view.names[op.inputs[one.input]], plan.spec.in_specs[one.input]
                step, gathered = Step(one.kind.name, one.mesh_axes, 0), plan.spec.local.in_specs[one.input]
                yield SentStep(number, name, step, received, gathered, received, gathered, one.nbytes, False, one)
        for o, fns in enumerate(plan.spec.reduce_fns):
            name = view.names[op.outputs[o]]
            for n, fn in enumerate(fns):
                axes = tuple(axis for later in fns[n:] for axis in later.mesh_axes)
                partial = PartialSpec(_before(plan.spec, o, n), fn.op, axes)
                step = Step.of(fn)
                (after,) = walk([step], partial, view.shape(name), mesh)
                nbytes = sent_nbytes(name, step, partial, after)
                source, target = plan.spec.partial_spec(o), plan.spec.out_specs[o]
                exchange = dispatched[-1] if dispatched and o == n == 0 else None
                moved = nbytes if exchange is None else exchange.nbytes
                yield SentStep(number, name, step, partial, after, source, target, moved, True, exchange)
    for conversion in stage.output_conversions:
        yield from steps_of(None, conversion)


def traffic(view: GraphView, stage: StagePlan) -> dict[str, Traffic]:
    """Count the collectives of a run, and the bytes of their tensors as a group holds them together, by kind."""
    result: dict[str, Traffic] = {}
    for sent in sent_steps(view, stage):
        if sent.step.collective.communicates:
            earlier = result.get(sent.step.kind, Traffic(0, 0))
            result[sent.step.kind] = Traffic(earlier.count + 1, earlier.nbytes + sent.nbytes)
    return dict(sorted(result.items()))


def _before(spec: OpShardSpec, output: int, fn: int) -> TensorShardSpec:
    """Compute the spec of a partial output before one of its reduce functions."""
    spec_of = spec.partial_spec(output)
    for earlier in spec.reduce_fns[output][:fn]:
        spec_of = earlier.after(spec_of)
    return spec_of


def _incumbents(incumbents: Sequence[tuple[KnownIncumbent, StagePlan]]) -> tuple[Incumbent, ...]:
    result = []
    before: dict[int, tuple[PlanRow, ...]] = {}
    written: dict[tuple[TensorShardSpec, ...], str] = {}  # equal layers of all plans have few specs
    for known, stage in incumbents:
        rows = _rows(stage, written)
        changed = {number: new_rows for number, new_rows in rows.items() if before.get(number) != new_rows}
        result.append(Incumbent(known.seconds, known.bound_seconds, known.elapsed_seconds, changed))
        before = rows
    return tuple(result)


def _rows(stage: StagePlan, written: dict[tuple[TensorShardSpec, ...], str]) -> dict[int, tuple[PlanRow, ...]]:
    """Make the plan's table by operator number, as the Slapo autosharder prints it: operator, then its conversions.

    ``written`` are specs that were written out already.
    """

    def joined(specs: tuple[TensorShardSpec, ...]) -> str:
        if specs not in written:
            written[specs] = " x ".join(map(str, specs))
        return written[specs]

    rows: dict[int, tuple[PlanRow, ...]] = {}
    for op in stage.operators:
        ins, outs = joined(op.spec.in_specs), joined(op.spec.out_specs)
        lines = [PlanRow(op.label or f"{op.operator} {op.index}", ins, outs, op.compute_seconds + op.reduce_seconds)]
        lines += [PlanRow(f"|-{c.tensor}", str(c.source), str(c.target), c.seconds) for c in op.conversions]
        rows[op.index] = tuple(lines)
    rows[len(rows)] = tuple(
        PlanRow("output", str(c.source), str(c.target), c.seconds) for c in stage.output_conversions
    )
    return rows
