"""Pipelines of given stages: the user gives the operators and the mesh of each, and the specs are searched."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hidet_dist.checks import is_list, is_whole, shown
from hidet_dist.cost.transfer import transfer_seconds
from hidet_dist.errors import ConfigError, SpecError
from hidet_dist.machine import Cluster, DeviceGroup
from hidet_dist.machine.groups import slowest
from hidet_dist.machine.slices import (
    MeshSlice,
    device_groups,
    devices_along,
    link_between,
    slice_sizes,
    sub_cluster,
)
from hidet_dist.normalize import NormalGraph
from hidet_dist.partitioning.micro_batches import micro_batch
from hidet_dist.partitioning.stages import cut_graph
from hidet_dist.pipeline.messages import delivery_seconds
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search import SearchOptions, SearchResult, search
from hidet_dist.search.formulation.pins import parse_pins
from hidet_dist.search.shares import AUTO, parse_shares
from hidet_dist.spec import DeviceMesh, Plan, StagePlan, TensorShardSpec
from hidet_dist.spec.pipeline import ALL, Pipeline, Port
from hidet_dist.transfer import MeshLayout, plan_transfer

_KEYS = ("operators", "mesh_shape", "mesh_axis_names", "shares", "pins")


@dataclass(frozen=True)
class GivenStage:
    """A stage with given operators and mesh.

    Attributes
    ----------
    operators: the numbers of its operators in the normal graph, ascending.
    mesh: the mesh of its ranks, with any given shares.
    searches_shares: whether shares of the mesh's first axis are searched, with the even split.
    pins: specs of its weights, inputs, outputs and operators, by their names within the stage; see
        :class:`hidet_dist.search.formulation.pins.Pin`. Inputs and outputs without one are replicated.
    """

    operators: tuple[int, ...]
    mesh: DeviceMesh
    pins: Mapping[str, Any] = field(default_factory=dict, hash=False)
    searches_shares: bool = False

    @classmethod
    def parse(cls, given: Any, what: str) -> GivenStage:
        """Parse a stage such as ``{"operators": [0, 12], "mesh_shape": [2]}``, which has the operators 0 to 11.

        Parameters
        ----------
        given: mapping
            ``operators`` is a range without its end, or a list of such ranges. ``mesh_axis_names``, ``shares`` (as in
            :class:`hidet_dist.config.DistributedConfig`) and ``pins`` are optional.
        what: str
            The stage's name in errors.

        Raises
        ------
        ConfigError
            For unknown keys and invalid values.
        """
        if not isinstance(given, Mapping):
            raise ConfigError(f"{what} must be a dict with operators and mesh_shape; got {shown(given)}.")
        for key in given:
            if key not in _KEYS:
                raise ConfigError(f"Unknown key {shown(key)} in {what}; the keys are {', '.join(_KEYS)}.")
        for key in _KEYS[:2]:
            if key not in given:
                raise ConfigError(f"{what} lacks {key!r}.")
        operators = _operators(given["operators"], what)
        shape, names = given["mesh_shape"], given.get("mesh_axis_names", ())
        if not is_list(shape) or not (is_list(names) or names == ()):
            raise ConfigError(f"{what}['mesh_shape'] must be a list of ints such as [2]; got {shown(shape)}.")
        searches = given.get("shares") == AUTO
        try:
            mesh = DeviceMesh(tuple(shape), tuple(names))
            shares = () if searches else parse_shares(given.get("shares"), mesh, f"{what}['shares']")
            mesh = DeviceMesh(mesh.shape, mesh.axis_names, shares)
        except SpecError as error:
            raise ConfigError(f"{what} describes no mesh: {error}") from error
        pins = given.get("pins")
        parse_pins(pins, f"{what}['pins']")
        return cls(operators, mesh, dict(pins or {}), searches)


def _operators(given: Any, what: str) -> tuple[int, ...]:
    """Parse the operators of a stage: a range without its end, or a list of them. Raises ConfigError."""
    ranges = given if is_list(given) and given and is_list(given[0]) else [given]
    for one in ranges:
        if not (is_list(one) and len(one) == 2 and all(is_whole(n, 0) for n in one) and one[0] < one[1]):
            raise ConfigError(
                f"{what}['operators'] must be a range such as [0, 12], for the operators 0 to 11, or a list of "
                f"such ranges; got {shown(given)}."
            )
    if any(a[1] > b[0] for a, b in itertools.pairwise(ranges)):
        raise ConfigError(f"The ranges of {what}['operators'] must ascend; got {shown(given)}.")
    return tuple(number for one in ranges for number in range(*one))


def stage_cluster(cluster: Cluster, mesh: DeviceMesh, ranks: Sequence[int]) -> Cluster:
    """Describe the part of a machine that a stage has: consecutive ranks, with a mesh of their own.

    If the ranks are a slice of the machine (:mod:`hidet_dist.machine.slices`) and the mesh has the slice's shape, the
    part is that slice. Otherwise, the mesh axes use the links of the machine's last axes.

    Raises
    ------
    ConfigError
        When the mesh has more axes than the machine's.
    """
    part = MeshSlice(ranks[0], ranks[-1] + 1)
    devices = devices_along(cluster, mesh, part.start)
    groups = device_groups(mesh, devices)
    if part.size in slice_sizes(cluster.mesh) and part.start % part.size == 0:
        sliced = sub_cluster(cluster, part)
        if sliced.mesh.shape == mesh.shape:
            return replace(sliced, mesh=mesh, groups=groups)
    if mesh.ndim > cluster.mesh.ndim:
        raise ConfigError(f"The mesh {mesh} of a stage has more axes than the machine's, {cluster.mesh}.")
    return Cluster(mesh, cluster.links[cluster.mesh.ndim - mesh.ndim :], slowest(devices), groups)


def plan_given(
    graph: NormalGraph,
    cluster: Cluster,
    stages: Sequence[GivenStage],
    options: SearchOptions | None = None,
    *,
    micro_batches: int = 1,
    batch_dims: Sequence[int | None] | None = None,
    results: str = ALL,
    rules: RuleTable | None = None,
) -> SearchResult:
    """Plan a pipeline of given stages, with a search for each. Nothing is proven of the pipeline's seconds.

    Parameters
    ----------
    graph: NormalGraph
        The graph in normal form, of the whole batch.
    cluster: Cluster
        The machine. The stages take all of its devices, in order.
    stages: sequence of GivenStage
        The stages. A stage may read tensors of earlier stages.
    options: SearchOptions, optional
        The options of each stage's search; pins are those of the stages.
    micro_batches: int
        The number of micro-batches of a call.
    batch_dims: sequence of int or None, optional
        The dim of each graph input that they split; see
        :func:`hidet_dist.partitioning.micro_batches.micro_batch`.
    results: str
        ``all`` for outputs on all ranks, ``last`` for the ranks of the last stage.
    rules: RuleTable, optional
        A table, for any mesh, with which rules and proofs are shared.

    Raises
    ------
    ConfigError
        When the stages do not fit the graph or the machine, or the batch cannot be cut.
    InfeasibleError, SolverError
        When the search for a stage fails.
    """
    options = SearchOptions.of(options, {})
    ends = [sum(stage.mesh.size for stage in stages[: number + 1]) for number in range(len(stages))]
    ranks = [range(end - stage.mesh.size, end) for end, stage in zip(ends, stages, strict=True)]
    devices = ends[-1] if ends else 0
    if devices != cluster.mesh.size:
        raise ConfigError(
            f"The meshes of the stages have {devices} devices together; the machine's mesh {cluster.mesh} has "
            f"{cluster.mesh.size}."
        )
    symbols = tuple(size.of(name) for name, size in options.symbols.items())
    batch = micro_batch(graph, micro_batches, batch_dims, symbols, rules)
    options = replace(options, symbols=batch.declared)
    cut = cut_graph(batch, [stage.operators for stage in stages])
    results_of_stages: list[SearchResult] = []
    for number, (stage, stage_graph) in enumerate(zip(stages, cut.graphs, strict=True)):
        try:
            part = stage_cluster(cluster, stage.mesh, ranks[number])
            if stage.searches_shares:
                along = devices_along(cluster, stage.mesh, ranks[number].start)
                part = replace(part, groups=tuple(DeviceGroup(1, device) for device in along))
            own = replace(options, pins=dict(stage.pins) or None, searches_shares=stage.searches_shares)
            results_of_stages.append(search(stage_graph, part, own, rules=rules))
        except ConfigError as error:
            raise ConfigError(f"Stage {number}: {error}") from error
    planned = [result.plan.stages[0] for result in results_of_stages]
    pipeline = cut.pipeline([stage.operators for stage in stages], ranks, results)
    plan = Plan(tuple(planned), with_seconds(pipeline, planned, cluster))
    plan.check_pipeline()
    late = any(result.time_limit_reached for result in results_of_stages)
    return SearchResult((plan,), plan.makespan_seconds, 1.0, 0.0, late)


def with_seconds(pipeline: Pipeline, stages: Sequence[StagePlan], cluster: Cluster) -> Pipeline:
    """Add the predicted seconds of each boundary, over the link between the ranks of its stages, and of the outputs."""
    boundaries = []
    parts = [MeshSlice(stage.ranks[0], stage.ranks[-1] + 1) for stage in pipeline.stages]
    for boundary in pipeline.boundaries:
        source = stages[boundary.source.stage]
        tensor = source.outputs[boundary.source.number]
        seconds = 0.0
        for reader in boundary.readers:
            stage = stages[reader.stage]
            target = stage.inputs[reader.number]
            transfer = plan_transfer(
                tensor.shape, MeshLayout(source.mesh, tensor.spec), MeshLayout(stage.mesh, target.spec)
            )
            link = link_between(cluster, parts[boundary.source.stage], parts[reader.stage])
            part = stage_cluster(cluster, stage.mesh, pipeline.stages[reader.stage].ranks)
            seconds += transfer_seconds(transfer, boundary.nbytes, link, part)
        boundaries.append(replace(boundary, seconds=seconds))
    last = len(stages) - 1
    outputs, sent = [], {y.source: stages[y.source.stage].outputs[y.source.number] for y in pipeline.outputs}
    known: set[Port] = set()
    for y in pipeline.outputs:
        seconds = 0.0
        if y.source.stage != last and y.source not in known:
            source, tensor = stages[y.source.stage], sent[y.source]
            whole = MeshLayout(stages[last].mesh, TensorShardSpec.replicated(len(tensor.shape)))
            transfer = plan_transfer(tensor.shape, MeshLayout(source.mesh, tensor.spec), whole)
            link = link_between(cluster, parts[y.source.stage], parts[last])
            part = stage_cluster(cluster, stages[last].mesh, pipeline.stages[last].ranks)
            seconds = transfer_seconds(transfer, tensor.nbytes, link, part)
        known.add(y.source)
        outputs.append(replace(y, seconds=seconds))
    delivery = 0.0
    if pipeline.results == ALL:
        delivery = delivery_seconds(cluster, parts[last], sum(tensor.nbytes for tensor in sent.values()))
    return replace(pipeline, boundaries=tuple(boundaries), outputs=tuple(outputs), delivery_seconds=delivery)
