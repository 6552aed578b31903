"""Explanations of plans and of their stages: text for a person, JSON for a program."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from hidet_dist.codec import encode
from hidet_dist.errors import PlanError
from hidet_dist.files import json_text
from hidet_dist.spec.overlap import OverlapPlan
from hidet_dist.spec.report import Incumbent, PlanRow, StepTaken
from hidet_dist.spec.rows import microseconds, stage_rows
from hidet_dist.spec.schedule import schedule_lines

if TYPE_CHECKING:
    from hidet_dist.spec.pipeline import Pipeline
    from hidet_dist.spec.plan import Plan, StagePlan

FORMAT = 1
_WIDTH = 160  # columns of the text form


def explanation_file(number: int, stages: int) -> str:
    """Name the file in an artifact folder with the explanation of stage ``number`` of a plan of ``stages`` stages."""
    return "explain.json" if stages == 1 else f"stage{number}/explain.json"


class _Printed:
    """An object that rich can print; ``str()`` is the same text."""

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=_WIDTH).print(self)
        return text.getvalue()


@dataclass(frozen=True)
class Explanation(_Printed):
    """The explanations of a plan's stages.

    ``str()`` is text of fixed width, ``rich.print`` fits it to the terminal, :meth:`to_json` is for programs.

    Raises
    ------
    PlanError
        When a part of the plan fits no graph, or a report is one of another plan.
    """

    plan: Plan
    stages: tuple[StageExplanation, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(map(StageExplanation, self.plan.stages)))

    @property
    def schedule(self) -> list[str]:
        """The schedule lines of the stages, in their order."""
        return [line for stage in self.stages for line in stage.schedule]

    def to_data(self) -> dict[str, Any]:
        """Convert to plain JSON values: the explanation of the only stage, or ``stages``, a list with each one's."""
        if len(self.stages) == 1:
            return self.stages[0].to_data()
        return {
            "format": FORMAT,
            "seconds": self.plan.seconds,
            "makespan_seconds": self.plan.makespan_seconds,
            **({} if self.plan.pipeline is None else {"pipeline": self._pipeline_data(self.plan.pipeline)}),
            "stages": [stage.to_data() for stage in self.stages],
        }

    def _pipeline_data(self, pipeline: Pipeline) -> dict[str, Any]:
        """The stages of a pipeline as plain JSON values, with how long each works on a micro-batch and then waits."""
        seconds = [stage.makespan_seconds for stage in self.plan.stages]
        interval = pipeline.interval_seconds(seconds)
        return {
            "micro_batches": pipeline.micro_batches,
            "interval_seconds": interval,
            "stages": [
                {
                    "operators": [stage.operators[0], stage.operators[-1]],
                    "ranks": [stage.ranks[0], stage.ranks[-1]],
                    "seconds": own,
                    "period_seconds": period,
                    "idle_share": 1 - period / interval if interval else 0.0,
                }
                for stage, own, period in zip(pipeline.stages, seconds, pipeline.period_seconds(seconds), strict=True)
            ],
            "boundaries": encode(pipeline.boundaries),
            "search": None if pipeline.search is None else {**encode(pipeline.search), "gap": pipeline.search.gap},
        }

    def to_json(self) -> str:
        """The explanation as JSON text."""
        return json_text(self.to_data(), 2) + "\n"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.plan.pipeline is not None:
            yield from self._pipeline_tables(self._pipeline_data(self.plan.pipeline))
        for number, stage in enumerate(self.stages):
            if len(self.stages) > 1:
                yield Text(f"Stage {number}", style="bold")
            yield stage

    def _pipeline_tables(self, data: dict[str, Any]) -> Iterator[Table | Text]:
        """The tables of stages and of boundaries."""
        yield Text(
            f"Pipeline of {len(data['stages'])} stages and {data['micro_batches']} micro-batches: "
            f"{_time(self.plan.makespan_seconds)} a call, {_time(data['interval_seconds'])} between micro-batches"
        )
        if (search := data["search"]) is not None:
            yield Text(
                f"Searched by {search['objective']}: {_time(search['seconds'])}; lower bound of any pipeline: "
                f"{_time(search['bound_seconds'])} (gap {search['gap']:.2%})"
            )
        stages = Table(title=Text("Stages [µs]"))
        for column in ("stage", "operators", "ranks", "computes", "with messages", "idle"):
            stages.add_column(column, justify="right")
        for number, stage in enumerate(data["stages"]):
            stages.add_row(
                str(number),
                *("-".join(map(str, dict.fromkeys(stage[key]))) for key in ("operators", "ranks")),
                microseconds(stage["seconds"]),
                microseconds(stage["period_seconds"]),
                f"{stage['idle_share']:.0%}",
            )
        yield stages
        boundaries = Table(title=Text("What stages send"))
        for column in ("stage", "tensor", "leaves as", "arrives as", "size", "time [µs]"):
            boundaries.add_column(column, overflow="fold")
        for number in range(len(self.stages)):
            for row in self.plan.boundaries_from(number):
                boundaries.add_row(str(number), *map(Text, row))
        yield boundaries


@dataclass(frozen=True)
class StageExplanation(_Printed):
    """The costs in a stage, the alternatives to each choice, and the lines to apply its plan by hand.

    Costs are in seconds, memory in bytes. Runner-ups, memory over time, bounds and incumbents need the report of the
    search in the stage.

    Raises
    ------
    PlanError
        When a part of the stage fits no graph, or the report is one of another plan.
    """

    stage: StagePlan

    def __post_init__(self) -> None:
        stage, report = self.stage, self.stage.report
        stage.check()
        schedule_lines(stage)
        operators = len(stage.operators)
        if report is not None and (len(report.runner_ups), len(report.live_bytes)) != (operators, operators + 1):
            raise PlanError(
                f"The plan has {operators} operators; the report of its search has {len(report.runner_ups)} runner-ups "
                f"and {len(report.live_bytes)} figures of memory."
            )

    @property
    def schedule(self) -> list[str]:
        """The plan as lines such as ``shard("fc1.weight", dim=1)`` and ``sync("fc2", "all_reduce")``."""
        return schedule_lines(self.stage)

    @property
    def compute_seconds(self) -> float:
        """Predicted seconds of all operators without their communication."""
        return sum(op.compute_seconds for op in self.stage.operators)

    def to_data(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        stage, report = self.stage, self.stage.report
        operators = []
        for row in stage_rows(stage):
            if row.index is None:
                continue
            one = {
                "index": row.index,
                "operator": row.operator,
                "label": row.label,
                "spec": row.spec,
                "note": row.note,
                "compute_seconds": row.compute_seconds,
                "communication_seconds": row.communication_seconds,
                "communication": list(row.communication),
            }
            if report is not None:
                runner_up = report.runner_ups[row.index]
                one["runner_up"] = None if runner_up is None else vars(runner_up)
                one["live_bytes"] = report.live_bytes[row.index]
            operators.append(one)
        return {
            "format": FORMAT,
            "mesh": str(stage.mesh),
            "fingerprint": stage.fingerprint,
            "seconds": stage.seconds,
            "compute_seconds": self.compute_seconds,
            "communication_seconds": stage.seconds - self.compute_seconds,
            "makespan_seconds": stage.makespan_seconds,
            "overlap": encode(stage.overlap),
            "collectives": stage.collectives(),
            "weight_bytes_per_device": stage.weight_bytes_per_device,
            "operators": operators,
            "schedule": self.schedule,
            "report": None if report is None else report.to_json(),
        }

    def to_json(self) -> str:
        """The explanation as JSON text."""
        return json_text(self.to_data(), 2) + "\n"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._totals()
        yield self._operators()
        overlap = self.stage.overlap
        if overlap is not None and overlap.communications:
            yield self._overlap(overlap)
        report = self.stage.report
        if report is not None:
            for number, incumbent in enumerate(report.incumbents):
                yield self._incumbent(number, incumbent)
            if report.steps:
                yield _steps(report.steps)
        yield Text("Schedule" if self.schedule else "Schedule: nothing is sharded or sent")
        yield Group(*(Text("  " + line) for line in self.schedule))

    def _totals(self) -> Iterator[Text]:
        stage, report = self.stage, self.stage.report
        communication = stage.seconds - self.compute_seconds
        yield Text(
            f"Plan on {stage.mesh}: {_time(stage.seconds)}, of which {_time(self.compute_seconds)} compute and "
            f"{_time(communication)} communication"
        )
        overlap = stage.overlap
        if overlap is not None:
            yield Text(
                f"With overlap: {_time(overlap.seconds)}, {_time(overlap.hidden_seconds)} of the "
                f"collectives hidden; {overlap.held_bytes} bytes a device"
            )
        if report is None:
            counts = ", ".join(f"{count} {kind}" for kind, count in stage.collectives().items())
            yield Text(f"Collectives: {counts or 'none'}")
            yield Text(f"Weights: {stage.weight_bytes_per_device} bytes a device")
            return
        # Bounds are of sums of seconds. A plan chosen for its time with overlap may have more than the least sum.
        serially = "" if overlap is None else ", one operator or collective after the other"
        of = "" if overlap is None else " of the least such time that was found"
        if report.mode == "propagate":
            yield Text("Propagated from pins, without a proven bound of its time")
        else:
            yield Text(f"Lower bound of any plan: {_time(report.bound_seconds)}{serially} (gap {report.gap:.2%}{of})")
        if report.time_limit_reached:
            yield Text("The time limit was reached: the plan depends on the speed of the machine that searched")
        traffic = ", ".join(f"{one.count} {kind} of {one.nbytes} bytes" for kind, one in report.traffic.items())
        yield Text(f"Collectives: {traffic or 'none'}")
        peak = max(report.live_bytes)
        where = report.live_bytes.index(peak)
        at = f"operator {where}" if where < len(stage.operators) else "the graph outputs"
        device, weights = "a device", stage.weight_bytes_per_device
        if report.device:
            device, weights = f"at {report.device}", stage.weight_bytes_of(stage.mesh.rank(report.device))
        yield Text(f"Memory: {peak} bytes {device} at {at}, of {report.mem_budget}; weights are {weights}")

    def _operators(self) -> Table:
        report = self.stage.report
        table = Table(title=Text("Operators [µs]"))
        for column in ("#", "operator", "spec", "communication"):
            table.add_column(column, overflow="fold")
        for column in ("compute", "communication", "held [bytes]"):
            table.add_column(column, justify="right")
        table.add_column("runner-up: at least, alone", overflow="fold")
        for number, row in enumerate(stage_rows(self.stage)):
            runner_up, held = "", ""
            if report is not None and row.index is not None:
                held = str(report.live_bytes[number])
                second = report.runner_ups[number]
                if second is not None:
                    bound = second.at_least_seconds
                    least = "?" if bound is None else _more(bound - self.stage.seconds)
                    runner_up = f"{second.spec}: {least}, {_more(second.alone_seconds - self.stage.seconds)}"
            cells = (
                row.number,
                row.title,
                row.spec,
                "; ".join(row.communication),
                microseconds(row.compute_seconds),
                microseconds(row.communication_seconds),
                held,
                runner_up,
            )
            table.add_row(*map(Text, cells))
        return table

    def _overlap(self, overlap: OverlapPlan) -> Table:
        """The table of collectives in launch order, with the time of each that computation hides."""
        table = Table(title=Text("Collectives beside computation [µs]"))
        for column in ("operator", "tensor", "collective"):
            table.add_column(column, overflow="fold")
        for column in ("time", "hidden"):
            table.add_column(column, justify="right")
        for one in overlap.communications:
            where = "output" if one.operator is None else str(one.operator)
            times = microseconds(one.seconds), microseconds(one.hidden_seconds)
            table.add_row(*map(Text, (where, one.tensor, one.step, *times)))
        return table

    def _incumbent(self, number: int, incumbent: Incumbent) -> Table:
        """The table of an incumbent: whole for the first one, then the rows that changed."""
        gone = "" if incumbent.elapsed_seconds is None else f" after {incumbent.elapsed_seconds:.2f} s"
        rest = "" if number == 0 else ", changed rows"
        title = f"Incumbent {number}{gone}: {_time(incumbent.seconds)}, bound {_time(incumbent.bound_seconds)}{rest}"
        table = Table(title=Text(title))
        for column in ("Name", "InSpec", "OutSpec"):
            table.add_column(column, overflow="fold")
        table.add_column("Cost [µs]", justify="right")
        rows: list[PlanRow] = [row for part in incumbent.rows.values() for row in part]
        for row in rows:
            table.add_row(*map(Text, (row.name, row.in_spec, row.out_spec, microseconds(row.seconds))))
        table.add_row("Total", "", "", microseconds(incumbent.seconds))
        return table


def _steps(steps: Sequence[StepTaken]) -> Table:
    """The table of the steps of the search within the memory budget."""
    table = Table(title="Steps of the search")
    table.add_column("Step")
    for column in ("Gap before", "Gap after", "Took [s]"):
        table.add_column(column, justify="right")
    for step in steps:
        gaps = ("no plan" if gap is None else f"{gap:.2%}" for gap in (step.gap_before, step.gap_after))
        table.add_row(step.name, *gaps, "" if step.seconds is None else f"{step.seconds:.2f}")
    return table


def _time(seconds: float) -> str:
    return f"{microseconds(seconds)} µs"


def _more(seconds: float) -> str:
    return f"{seconds * 1e6:+.1f}"
