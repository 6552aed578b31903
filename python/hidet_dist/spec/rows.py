"""The rows of a stage's tables: what every form of a plan says of an operator, or of a graph output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hidet_dist.spec.plan import StagePlan


@dataclass(frozen=True)
class StageRow:
    """An operator, or the conversion of a graph output.

    Attributes
    ----------
    index: the number of the operator; None for a graph output.
    operator: the name of the operator; ``graph output`` for one.
    label: the user's name; empty if there is none.
    in_specs, out_specs: the specs of inputs and outputs, as text; of a graph output, the spec in which its operator
        produces it, and that in which it is delivered.
    spec: the whole spec of the operator, with its reduce functions, as text.
    communication: the steps of conversions before it, then its reduce functions, as text.
    compute_seconds, communication_seconds: predicted times.
    note: what is to be said of the operator (:class:`hidet_dist.spec.OperatorPlan`).
    """

    index: int | None
    operator: str
    label: str
    in_specs: str
    out_specs: str
    spec: str
    communication: tuple[str, ...]
    compute_seconds: float
    communication_seconds: float
    note: str

    @property
    def number(self) -> str:
        """The number of the operator as text; empty for a graph output."""
        return "" if self.index is None else str(self.index)

    @property
    def title(self) -> str:
        """The operator with its label, and its note in parentheses."""
        return " ".join(filter(None, (self.operator, self.label, f"({self.note})" if self.note else "")))

    @property
    def seconds(self) -> float:
        """The predicted time with communication."""
        return self.compute_seconds + self.communication_seconds


def stage_rows(stage: StagePlan) -> Iterator[StageRow]:
    """Yield the rows of a stage: operators in the graph's order, then the graph outputs that are converted."""
    for op in stage.operators:
        yield StageRow(
            op.index,
            op.operator,
            op.label,
            ", ".join(map(str, op.spec.in_specs)),
            ", ".join(map(str, op.spec.out_specs)),
            str(op.spec),
            op.communication,
            op.compute_seconds,
            op.communication_seconds,
            op.note,
        )
    for conversion in stage.output_conversions:
        source, target = str(conversion.source), str(conversion.target)
        whole = f"{source} -> {target}"
        yield StageRow(None, "graph output", "", source, target, whole, conversion.steps, 0.0, conversion.seconds, "")


def microseconds(seconds: float) -> str:
    """Write a time in microseconds, as tables do."""
    return f"{seconds * 1e6:.1f}"
