"""Explanations of plans: costs, and the reasons for each choice, as text, as JSON, and as schedule lines."""

from hidet_dist.explain.explanation import Explanation
from hidet_dist.explain.report import Incumbent, Row, RunnerUp, SearchReport, Traffic
from hidet_dist.explain.schedule import schedule_lines

__all__ = ["Explanation", "Incumbent", "Row", "RunnerUp", "SearchReport", "Traffic", "schedule_lines"]
