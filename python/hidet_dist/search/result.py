"""The result of a search: plans, and what is proven of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from hidet_dist.frugal import collector_paused
from hidet_dist.search.limits import Limits, limits_as_errors
from hidet_dist.spec import Plan, TensorShardSpec
from hidet_dist.spec.report import SearchReport


@dataclass(frozen=True)
class SearchResult:
    """The plan of a graph, or those of several graphs that share weights, and the lower bound that was proven.

    Attributes
    ----------
    plans: the plan of each graph. Shared weights and states have one spec in all of them.
    seconds: predicted, of one run: the makespan of the plan; of several graphs, the weighted sum of their times.
    gap: what the search proves, ``(least - bound_seconds) / least``, where ``least`` is the least sum of seconds that
        it found: that of the plans, unless a plan was chosen for its makespan, on a machine that overlaps communication
        with computation. Of makespans nothing is proven. The gap is 1 for a propagated plan.
    bound_seconds: the lower bound: no plan's sum of seconds is less. It is 0 for a propagated plan, of which nothing is
        proven.
    time_limit_reached: whether the time limit cut the search short. The plans then depend on the machine's speed.
    second_per_byte: the price of memory at which the bound was proven, summed over program points; 0 where the budget
        does not bind, and for several graphs.
    param_specs: of several graphs, the layouts of all weights and states, by the user's names, or else by graph and
        weight (``0:w3``); empty for one graph, whose plan has them.
    write_report: writes the report of the search, which takes a while: of several searches, only the best one's is
        written. None if it is written, or there is none.
    """

    plans: tuple[Plan, ...]
    seconds: float
    gap: float
    bound_seconds: float
    time_limit_reached: bool = False
    second_per_byte: float = 0.0
    param_specs: Mapping[str, TensorShardSpec] = field(default_factory=dict)
    write_report: Callable[[Limits], SearchReport] | None = field(default=None, compare=False, repr=False)

    @property
    def plan(self) -> Plan:
        """The plan of the only graph."""
        (plan,) = self.plans
        return plan

    def reported(self, limits: Limits) -> SearchResult:
        """The same with the report of the search in its plan, which has what can be found out within the limits."""
        if self.write_report is None:
            return self
        with collector_paused(), limits_as_errors(limits):
            report = self.write_report(limits)
        stages = tuple(replace(stage, report=report) for stage in self.plan.stages)
        return replace(self, plans=(replace(self.plan, stages=stages),), write_report=None)
