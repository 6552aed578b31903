"""Independent branches of a graph, such as the two towers of a retrieval model, as stages side by side.

A *branch* depends on the graph's inputs and weights alone, and shares no computed tensor with other branches. The
operators that read several branches, and all that depend on them, are the *join*. Each branch and the join become a
stage on a slice of the mesh. The branches compute at the same time, so that one micro-batch takes the longest way
through the stages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hidet_dist.cost.model import PredictedCost
from hidet_dist.cost.transfer import transfer_seconds
from hidet_dist.errors import ConfigError, InfeasibleError
from hidet_dist.machine import Cluster
from hidet_dist.machine.slices import MeshSlice, link_between, sub_cluster
from hidet_dist.partitioning.stages import cut_graph
from hidet_dist.pipeline.messages import message_seconds
from hidet_dist.pipeline.stage_search import StageSearch
from hidet_dist.pipeline.stages import PipelineResult, PlannedStage, StageMessage, StagePart
from hidet_dist.pipeline.tables import stage_rules
from hidet_dist.rules.rule import RuleTable, signature_of
from hidet_dist.search.formulation.formulate import stored_specs
from hidet_dist.search.result import SearchResult
from hidet_dist.spec import DeviceMesh, TensorShardSpec
from hidet_dist.transfer import MeshLayout, plan_transfer
from hidet_dist.view import GraphView

LEAST_FRACTION = 0.1
"""The least fraction of the graph's predicted time for a part to be a branch."""
MOST_BRANCHES = 4  # every order of the branches is tried


@dataclass(frozen=True)
class Branches:
    """The operators of each branch and of the join, by number, ascending."""

    branches: tuple[tuple[int, ...], ...]
    join: tuple[int, ...]


def find_branches(view: GraphView, cluster: Cluster) -> Branches | None:
    """Find the independent branches of a graph; None if there are fewer than two, or nothing joins them.

    Parts with less than ``LEAST_FRACTION`` of the time belong to the branch that reads them.
    """
    read = _reads(view)
    if not may_branch(view):
        return None
    seconds = _operator_seconds(view, cluster)
    least = LEAST_FRACTION * math.fsum(seconds)
    parts = _DisjointSets(seconds)
    join: set[int] = set()
    for number, numbers in enumerate(read):
        roots = {parts.find(n) for n in numbers if n not in join}
        if not join.isdisjoint(numbers) or sum(parts.seconds[root] >= least for root in roots) > 1:
            join.add(number)
            continue
        for root in sorted(roots):
            parts.merge(root, number)
    members: dict[int, list[int]] = {}
    for number in range(len(read)):
        root = parts.find(number)
        if number not in join and parts.seconds[root] >= least:
            members.setdefault(root, []).append(number)
    if not join or not 2 <= len(members) <= MOST_BRANCHES:
        return None
    inside = {number for numbers in members.values() for number in numbers}
    branches = tuple(tuple(numbers) for numbers in members.values())
    return Branches(branches, tuple(number for number in range(len(read)) if number not in inside))


def may_branch(view: GraphView) -> bool:
    """Tell whether a graph may have branches: False if all operators depend on the first one."""
    return sum(not numbers for numbers in _reads(view)) > 1


def _reads(view: GraphView) -> list[set[int]]:
    """List, for each operator, the operators that it reads."""
    maker = {y: number for number, op in enumerate(view.operators) for y in op.outputs}
    return [{maker[x] for x in op.inputs if x in maker} for op in view.operators]


def _operator_seconds(view: GraphView, cluster: Cluster) -> list[float]:
    """Predict the seconds of each operator on one device; equal operators are predicted once."""
    model = PredictedCost(cluster)
    known: dict[Any, float] = {}
    result = []
    for op in view.operators:
        key = signature_of(op)
        if key not in known:
            known[key] = model.local(op, {})
        result.append(known[key])
    return result


class _DisjointSets:
    """Disjoint sets of operators, each with the seconds of its operators; ``seconds`` is by root."""

    def __init__(self, seconds: Sequence[float]):
        self.seconds = list(seconds)
        self._parents = list(range(len(seconds)))

    def find(self, number: int) -> int:
        """Return the root of an operator's set."""
        root = number
        while self._parents[root] != root:
            root = self._parents[root]
        while self._parents[number] != root:
            self._parents[number], number = root, self._parents[number]
        return root

    def merge(self, first: int, second: int) -> None:
        """Merge the sets of two operators."""
        first, second = self.find(first), self.find(second)
        if first != second:
            self._parents[first] = second
            self.seconds[second] += self.seconds[first]


def tilings(slices: Mapping[int, Sequence[MeshSlice]], count: int, start: int = 0) -> Iterator[tuple[MeshSlice, ...]]:
    """Divide all ranks, from ``start`` on, into ``count`` consecutive slices, in every way; ``slices`` are by rank."""
    size = max(slices) + 1
    for part in slices[start]:
        if count == 1:
            if part.stop == size:
                yield (part,)
        elif part.stop < size:
            yield from ((part, *others) for others in tilings(slices, count - 1, part.stop))


class BranchSearch(StageSearch):
    """The search for stages side by side."""

    def _prepare(self) -> None:
        self._tables: dict[Cluster, RuleTable] = {}
        self._parts: dict[tuple[tuple[int, ...], DeviceMesh], StagePart] = {}

    def _search(self, best_value: float) -> None:
        branching = find_branches(self.view, self.cluster)
        if branching is None or self.cluster.mesh.size <= len(branching.branches):
            self.bound = math.inf
            return
        bound = math.inf
        for parts in tilings(self.slices, len(branching.branches) + 1):
            for order in itertools.permutations(branching.branches):
                operators = (*order, branching.join)
                if self.view.symbols and not self._can_cut(operators):
                    continue
                floor = self._value([0.0] * len(parts), self._least_messages(operators, parts), parts[-1])
                if floor >= self._least(best_value):
                    bound = min(bound, floor)
                    continue
                pipeline = self._pipeline(operators, parts)
                if pipeline is not None:
                    bound = min(bound, pipeline.bound_seconds)
                    self._keep(pipeline)
        self.bound = bound  # until all candidates were tried there is none

    def _can_cut(self, operators: Sequence[tuple[int, ...]]) -> bool:
        """Tell whether all stages know the sizes of their symbolic dims at the time of a call."""
        try:
            cut_graph(self.micro, operators)
        except ConfigError:
            return False
        return True

    def _pipeline(self, operators: Sequence[tuple[int, ...]], parts: Sequence[MeshSlice]) -> PipelineResult | None:
        """Plan the stages with these operators on these slices; None if one of them cannot be planned."""
        stages: list[PlannedStage] = []
        bounds: list[float] = []
        least = self._least_messages(operators, parts)
        for number, (numbers, part) in enumerate(zip(operators, parts, strict=True)):
            sent = [message for message in least if message.source == number]
            best = self._branch(numbers, part, parts[-1], sent)
            if best is None:
                return None
            result, bound = best
            stages.append(PlannedStage(numbers, part, sub_cluster(self.cluster, part), result.plan.stages[0]))
            bounds.append(bound - math.fsum(message.seconds for message in sent))
        return self._result(stages, self._value(bounds, least, parts[-1]))

    def _branch(
        self, operators: tuple[int, ...], part: MeshSlice, last: MeshSlice, sent: Sequence[StageMessage]
    ) -> tuple[SearchResult, float] | None:
        """Plan a branch so that its seconds and those of its messages are the least; None if nothing fits.

        Returns the plan, and a lower bound of these seconds. Where one tensor is sent, its specs are tried in the order
        of the message's seconds, until the message and the bound of the branch in any spec exceed the best sum.
        """
        free = self._plan(operators, part, ())
        if isinstance(free, InfeasibleError):
            return None
        least = free.bound_seconds + math.fsum(message.seconds for message in sent)
        if not sent:
            return free, least
        cluster = sub_cluster(self.cluster, part)
        mesh, offered = cluster.mesh, self._rules(cluster).offered
        names = {name: made for made, name in self._part(operators, mesh).names.items()}
        specs_of = {names[tensor.name]: tensor.spec for tensor in free.plan.stages[0].outputs}
        best, value = free, free.plan.stages[0].seconds
        value += math.fsum(self._sent_seconds(one.tensor, specs_of[one.tensor], part, last) for one in sent)
        if len(sent) > 1:
            return best, least
        (message,) = sent
        specs = stored_specs(self.view.pieces(message.tensor)[0], mesh, False, offered)
        candidates = [(self._sent_seconds(message.tensor, spec, part, last), spec) for spec in specs]
        bound = math.inf
        for seconds, spec in sorted(candidates, key=lambda candidate: candidate[0]):
            if free.bound_seconds + seconds >= value * (1 - self.options.solver_gap):
                bound = min(bound, free.bound_seconds + seconds)
                break
            result = self._plan(operators, part, ((message.tensor, spec),))
            if isinstance(result, InfeasibleError):
                continue
            bound = min(bound, result.bound_seconds + seconds)
            if result.plan.stages[0].seconds + seconds < value:
                best, value = result, result.plan.stages[0].seconds + seconds
        return best, max(least, min(bound, value))

    def _plan(
        self, operators: tuple[int, ...], part: MeshSlice, specs: tuple[tuple[str, TensorShardSpec], ...]
    ) -> SearchResult | InfeasibleError:
        """Plan a stage with the given specs of its outputs, or return the plan of the same stage on an equal slice."""
        self.limits.check()
        cluster = sub_cluster(self.cluster, part)
        stage = self._part(operators, cluster.mesh)
        pins = {f"y{stage.view.outputs.index(stage.names[name])}": str(spec) for name, spec in specs}
        return self._plan_once(
            (operators, cluster, specs), stage, cluster, replace(self.options, pins=pins), self._rules(cluster)
        )

    def _rules(self, cluster: Cluster) -> RuleTable:
        if cluster not in self._tables:
            self._tables[cluster] = stage_rules(self.view, cluster.mesh, self.options.unequal_parts, self.rules)
        return self._tables[cluster]

    def _part(self, operators: tuple[int, ...], mesh: DeviceMesh) -> StagePart:
        key = operators, mesh
        if key not in self._parts:
            self._parts[key] = StagePart.of(self.view, operators, mesh)
        return self._parts[key]

    def _sent_seconds(self, name: str, spec: TensorShardSpec, part: MeshSlice, last: MeshSlice) -> float:
        """Predict the seconds to send a tensor from a slice, where it is in ``spec``, to the last one, replicated."""
        source, target = (sub_cluster(self.cluster, one) for one in (part, last))
        shape, link = self.view.shape(name), link_between(self.cluster, part, last)
        whole = TensorShardSpec.replicated(len(shape))
        transfer = plan_transfer(shape, MeshLayout(source.mesh, spec), MeshLayout(target.mesh, whole))
        return transfer_seconds(transfer, self.view.nbytes(name), link, target)

    def _least_messages(
        self, operators: Sequence[tuple[int, ...]], parts: Sequence[MeshSlice]
    ) -> tuple[StageMessage, ...]:
        """Make the messages to the join, which arrive replicated, with lower bounds of their seconds."""
        view, last = self.view, len(operators) - 1
        stage_of = {operator: k for k, numbers in enumerate(operators) for operator in numbers}
        source_of = {view.names[y]: stage_of[n] for n, op in enumerate(view.operators) for y in op.outputs}
        read = {view.names[x] for n in operators[last] for x in view.operators[n].inputs} | set(view.outputs)
        target = sub_cluster(self.cluster, parts[last])
        result = []
        for name in sorted(read):
            source = source_of.get(name, last)
            if source == last:
                continue
            link = link_between(self.cluster, parts[source], parts[last])
            spec = TensorShardSpec.replicated(len(view.shape(name)))
            seconds = message_seconds(view, name, parts[source].size, target, spec, link)
            result.append(StageMessage(name, source, last, spec, spec, view.nbytes(name), seconds))
        return tuple(result)
