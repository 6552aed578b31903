"""Explanations of plans: costs, and the reasons for each choice, as text, as JSON, and as schedule lines."""

from hidet_dist.explain.explanation import Explanation, StageExplanation, explanation_file
from hidet_dist.explain.schedule import schedule_lines
from hidet_dist.spec.report import Incumbent, PlanRow, RunnerUp, SearchReport, Traffic

__all__ = [
    "Explanation",
    "Incumbent",
    "PlanRow",
    "RunnerUp",
    "SearchReport",
    "StageExplanation",
    "Traffic",
    "explanation_file",
    "schedule_lines",
]
