"""Several graphs over one set of weights, on the way to one artifact folder with a program for each of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hidet.graph import FlowGraph, Tensor

from hidet_dist.artifacts import Manifest
from hidet_dist.artifacts.coherence import PROGRAM_NAME, PROGRAM_NAME_RULE
from hidet_dist.checks import is_finite, shown
from hidet_dist.config import OptimizationConfig
from hidet_dist.errors import ConfigError, WeightsError
from hidet_dist.export.storage import different_layouts, held_bytes, share_storage, weight_bytes
from hidet_dist.export.write import write_artifacts
from hidet_dist.machine import Cluster
from hidet_dist.normalize.storage import storable_weights, tables_of
from hidet_dist.partitioning import Program
from hidet_dist.phases.values import Compiled, Partitioned, Planned, Prepared, Traced
from hidet_dist.pipeline.planning import Planning, find_plans
from hidet_dist.progress import Progress
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search import FamilyMember, SearchResult
from hidet_dist.search.family import held_keys
from hidet_dist.search.formulation.labels import tensor_labels
from hidet_dist.spec.extents import extents_of, symbols_in
from hidet_dist.weights.equality import equal_weights
from hidet_dist.weights.sources import same_elements
from hidet_dist.weights.states import is_state, same_initial

OWN_KEYS = ("frequency", "pins", "input_specs", "output_specs", "names", "symbols")
"""The keys that each program of a family may have besides the common configuration."""


@dataclass(frozen=True, repr=False)
class TracedFamily:
    """Graphs as traced, by the names of their programs, with configurations that are checked.

    Attributes
    ----------
    members: each graph with its configurations.
    frequencies: the factor of each program's time in the sum that is minimized.
    """

    members: Mapping[str, Traced]
    frequencies: Mapping[str, float]

    @classmethod
    def of(
        cls,
        graphs: Mapping[str, FlowGraph],
        distributed_config: Mapping[str, Any],
        optimization_config: Mapping[str, Any] | None = None,
        own: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> TracedFamily:
        """Check graphs and configurations, as :func:`hidet.distributed.build_family` takes them. Raises ConfigError."""
        common, own = dict(optimization_config or {}), {} if own is None else own
        _check_names(graphs, own)
        frequencies = {name: own.get(name, {}).get("frequency", 1.0) for name in graphs}
        for name, frequency in frequencies.items():
            if not (is_finite(frequency) and frequency > 0):
                raise ConfigError(f"programs[{name!r}]['frequency'] must be above 0; got {shown(frequency)}.")
        declared = common.get("symbols") or {}
        members = {
            name: Traced.of(graph, distributed_config, {**common, **_own_options(graph, own.get(name, {}), declared)})
            for name, graph in graphs.items()
        }
        known = {symbol for member in members.values() for symbol in member.optimization.symbols}
        for symbol in declared:
            if symbol not in known:
                raise ConfigError(f"optimization_config['symbols'] declares {shown(symbol)}, which no graph has.")
        _check_offered(next(iter(members.values())).optimization)
        return cls(members, {name: float(frequency) for name, frequency in frequencies.items()})

    def prepare(self) -> PreparedFamily:
        """Normalize each graph, and find the weights that they share. Raises as :meth:`Traced.prepare`."""
        rules = RuleTable(next(iter(self.members.values())).cluster.mesh)
        prepared = {name: replace(traced.in_normal_form(), rules=rules) for name, traced in self.members.items()}
        without_names = [_without_names(one) for one in prepared.values()]
        same = dict(zip(prepared, equal_weights(without_names), strict=True))
        members, weights = {}, {}
        for name, (excluded, tables) in _in_own_dtype(prepared, same).items():
            members[name], weights[name] = prepared[name].with_storages(excluded, tables)
        stored = {x: y for of_member in weights.values() for x, y in of_member.items()}
        renamed = {
            name: {**equal, **{stored[x]: stored[y] for x, y in equal.items() if x in stored and y in stored}}
            for name, equal in same.items()
        }
        return PreparedFamily(self, members, renamed)


def _check_names(graphs: Mapping[str, FlowGraph], own: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError for a wrong name of a program, or an unknown one or option among those of single programs."""
    if not isinstance(graphs, Mapping) or not graphs:
        raise ConfigError(f"The graphs of a family are a dict by the names of programs; got {shown(graphs)}.")
    for name in graphs:
        if not isinstance(name, str) or PROGRAM_NAME.fullmatch(name) is None:
            raise ConfigError(f"The name of a program must be {PROGRAM_NAME_RULE}; got {shown(name)}.")
    for name, given in own.items():
        if name not in graphs:
            raise ConfigError(f"programs has {shown(name)}; the graphs are {', '.join(graphs)}.")
        for key in given:
            if key not in OWN_KEYS:
                raise ConfigError(
                    f"Unknown key {shown(key)} in programs[{name!r}]; the keys are {', '.join(OWN_KEYS)}."
                )


def _own_options(graph: FlowGraph, own: Mapping[str, Any], declared: Any) -> dict[str, Any]:
    """Select the options of one graph: its own, and of the symbolic sizes ``declared`` for all those that it has."""
    given = {key: value for key, value in own.items() if key != "frequency"}
    if isinstance(graph, FlowGraph) and isinstance(declared, Mapping):
        used = {symbol for x in graph.inputs or [] for symbol in symbols_in(extents_of(x))}
        common_to_all = {symbol: size for symbol, size in declared.items() if symbol in used}
        own_sizes = given.get("symbols") or {}
        given["symbols"] = {**common_to_all, **own_sizes} if isinstance(own_sizes, Mapping) else own_sizes
    return given


def _without_names(prepared: Prepared) -> list[Tensor]:
    """List the weights of a graph that have no name by which other graphs could share them."""
    view, labels = prepared.view, tensor_labels(prepared.view, prepared.names)
    return [view.tensors[name] for name in view.weights if name not in labels]


def _in_own_dtype(
    prepared: Mapping[str, Prepared], same: Mapping[str, Mapping[Tensor, Tensor]]
) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """List the weights of each graph that stay in their own dtype, because a graph that shares them needs it.

    Then list those that graphs look up rows of.
    """
    if next(iter(prepared.values())).traced.optimization.weights.precision is None:
        return {name: ([], []) for name in prepared}
    keys = {name: held_keys(one.view, one.names, same[name]) for name, one in prepared.items()}
    refused: set[Hashable] = set()
    tables: set[Hashable] = set()
    orders: dict[Hashable, bool] = {}
    for name, one in prepared.items():
        storable = storable_weights(one.graph, one.traced.target.record.quantized_dtypes)
        looked_up, nothing_else = tables_of(one.graph)
        for weight, key in keys[name].items():
            x = one.view.tensors[weight]
            if x in looked_up:
                tables.add(key)
            if x in nothing_else:
                continue
            transposed = storable.get(x)
            if transposed is None or orders.setdefault(key, transposed) != transposed:
                refused.add(key)

    def those(name: str, wanted: set[Hashable]) -> list[Tensor]:
        return [prepared[name].view.tensors[weight] for weight, key in keys[name].items() if key in wanted]

    return {name: (those(name, refused), those(name, tables)) for name in prepared}


def _check_offered(optimization: OptimizationConfig) -> None:
    if optimization.mode != "search":
        raise ConfigError(
            f"optimization_config['mode'] = {optimization.mode!r} is for one graph: programs that share weights are "
            "planned together, by a search. Pin the weights' specs instead."
        )


@dataclass(frozen=True, repr=False)
class PreparedFamily:
    """Graphs in normal form, by the names of their programs.

    Attributes
    ----------
    traced: what it was made from.
    members: each graph. They share their rules.
    same: for each graph, its weights that equal weights of earlier graphs, as other tensors.
    """

    traced: TracedFamily
    members: Mapping[str, Prepared]
    same: Mapping[str, Mapping[Any, Any]]

    @property
    def first(self) -> Prepared:
        """The first graph, whose configuration is the common one."""
        return next(iter(self.members.values()))

    @property
    def cluster(self) -> Cluster:
        """The machine."""
        return self.first.cluster

    @property
    def mem_budget(self) -> int | None:
        """The configured memory budget of a device, in bytes, for all programs together; None for its memory."""
        return self.first.mem_budget

    def check_weights(self) -> None:
        """Check that weights by name have data of their shapes and dtypes, and that what is shared is equal.

        Raises
        ------
        WeightsError
            When a weight has no data, or has another shape or dtype; when weights, or values of states before the
            first call, have one name and different elements.
        """
        known: dict[Hashable, tuple[str, Tensor]] = {}
        for program, prepared in self.members.items():
            prepared.check_weights()
            view, same = prepared.view, self.same[program]
            labels = tensor_labels(view, prepared.names)
            for name, key in held_keys(view, prepared.names, same).items():
                tensor = view.tensors[name]
                first, x = known.setdefault(key, (program, tensor))
                if same.get(tensor) is x or (x.dtype, list(x.shape)) != (tensor.dtype, list(tensor.shape)):
                    continue  # they are known to be equal, or planning refuses them
                held = is_state(x)
                if not (same_initial(x, tensor) if held else same_elements(x, tensor, prepared.files)):
                    what = f"{'state' if held else 'weight'} {labels.get(name, name)!r}"
                    raise WeightsError(
                        f"The {what} has other elements in the program {program!r} than in {first!r}. Programs share "
                        "what has one name: give it another name in one of them."
                    )

    def plan_within(self, nbytes: int, progress: Progress | None = None) -> PlannedFamily:
        """Search plans that are predicted to hold at most ``nbytes`` together. Raises as :meth:`plan`."""
        within = replace(self, members={name: one.with_budget(nbytes) for name, one in self.members.items()})
        planned = within.plan(progress)
        members = {name: replace(one, prepared=self.members[name]) for name, one in planned.members.items()}
        return replace(planned, prepared=self, members=members)

    def plan(self, progress: Progress | None = None) -> PlannedFamily:
        """Search the layout of the weights, and a plan for each graph, of least weighted sum of predicted times.

        Raises
        ------
        ConfigError
            When what the configuration asks for is not offered for several graphs, or weights of one name differ.
        InfeasibleError
            When no plans fit the memory budget together.
        SolverError
            When the solver fails, or has no plans within the time limit.
        """
        members, optimization = list(self.members.items()), self.first.traced.optimization
        options = replace(
            self.first.traced.search_options(),
            names=None,
            pins=None,
            input_specs=None,
            output_specs=None,
            symbols={},
            searches_shares=self.first.traced.distributed.searches_shares,
        )
        stages = optimization.pipeline_options() if optimization.given_stages is None else optimization.given_stages
        for _, prepared in members:
            prepared.write_rules()
        found = find_plans(
            [self._member(name, prepared) for name, prepared in members],
            Planning(self.cluster, options, stages),
            rules=self.first.rules,
        )
        plans = zip(members, found.plans, strict=True)
        return PlannedFamily(self, {name: prepared.with_plan(plan) for (name, prepared), plan in plans}, found)

    def _member(self, name: str, prepared: Prepared) -> FamilyMember:
        own = prepared.traced.optimization
        return FamilyMember(
            prepared.graph,
            self.traced.frequencies[name],
            dict(prepared.names),
            own.pins,
            own.input_specs,
            own.output_specs,
            self.same[name],
            own.symbols,
        )


@dataclass(frozen=True, repr=False)
class PlannedFamily:
    """Plans of graphs in which shared weights have one spec each.

    Attributes
    ----------
    prepared: what it was made from.
    members: the plan of each graph.
    found: what the search found: the sum of predicted times, and its bound.
    """

    prepared: PreparedFamily
    members: Mapping[str, Planned]
    found: SearchResult

    @property
    def predicted_seconds(self) -> float:
        """The weighted sum of the predicted times of one run of each program."""
        frequencies = self.prepared.traced.frequencies
        return math.fsum(frequencies[name] * one.plan.makespan_seconds for name, one in self.members.items())

    def partition(self) -> PartitionedFamily:
        """Make the programs of all graphs; a shared weight or state has one name in all of them.

        Raises
        ------
        PlanError, PartitionError, WeightsError
            As :meth:`Planned.partition`.
        """
        parts = {name: planned.partition() for name, planned in self.members.items()}
        counts = {len(part.programs) for part in parts.values()}
        assert len(counts) == 1, "the search gives all graphs the same stages"
        shared: dict[str, list[Any]] = {name: [] for name in parts}
        for number in range(counts.pop()):
            programs = [part.programs[number] for part in parts.values()]
            keys = [self._keys(name, number) for name in parts]
            for name, program in zip(parts, share_storage(programs, keys), strict=True):
                shared[name].append(program)
        return PartitionedFamily(
            self, {name: replace(part, programs=tuple(shared[name])) for name, part in parts.items()}
        )

    def _keys(self, name: str, stage: int) -> dict[str, Hashable]:
        planned = self.members[name]
        return held_keys(planned.proven[stage].view, planned.prepared.names, self.prepared.same[name])


@dataclass(frozen=True, repr=False)
class PartitionedFamily:
    """The programs of several graphs over one storage.

    Attributes
    ----------
    planned: what it was made from.
    members: the programs of each graph.
    """

    planned: PlannedFamily
    members: Mapping[str, Partitioned]

    def of_stage(self, stage: int) -> list[Program]:
        """List the programs of a stage, one for each graph."""
        return [part.programs[stage] for part in self.members.values()]

    def compile(self, progress: Progress | None = None) -> CompiledFamily:
        """Compile the programs. The memory budget is for each of them with the weights of all.

        Raises
        ------
        CompileError, OverBudgetError
            As :meth:`Partitioned.compile`.
        """

        def compiled_with(in_rows: Sequence[Collection[str]]) -> dict[str, Compiled]:
            return {
                name: part.compile(None, progress, self.beside(part), in_rows) for name, part in self.members.items()
            }

        compiled = compiled_with(())
        in_rows = [
            different_layouts(of_stage) for of_stage in zip(*(one.stages for one in compiled.values()), strict=True)
        ]
        if any(in_rows):  # weights that some programs read in panels, and others cannot
            compiled = compiled_with(in_rows)
        return CompiledFamily(self, compiled)

    def beside(self, part: Partitioned) -> list[list[int]]:
        """Compute, for each stage and rank of a member, the bytes of weights and states that only others use."""
        return [
            [held_bytes(self.of_stage(number), rank) - held_bytes([program], rank) for rank in range(program.mesh.size)]
            for number, program in enumerate(part.programs)
        ]


@dataclass(frozen=True, repr=False)
class CompiledFamily:
    """The programs of several graphs as libraries.

    Attributes
    ----------
    partitioned: what it was made from.
    members: the libraries of each graph.
    """

    partitioned: PartitionedFamily
    members: Mapping[str, Compiled]

    def write(self, folder: Path) -> Manifest:
        """Write the artifacts to an empty folder: the weights once, and the programs. Raises ArtifactError."""
        target = self.partitioned.planned.prepared.first.traced.target
        return write_artifacts(folder, {name: compiled.built() for name, compiled in self.members.items()}, target)

    def weight_bytes_per_rank(self) -> list[int]:
        """Compute the bytes of weights that each rank holds, for all programs."""
        first = next(iter(self.members.values()))
        return [
            weight_bytes(self.partitioned.of_stage(number), rank)
            for number, program in enumerate(first.partitioned.programs)
            for rank in range(program.mesh.size)
        ]

    def held_bytes_per_stage(self) -> list[int]:
        """Compute the bytes that a device of each stage holds: what all programs share, and the most of activations."""
        held = []
        for one in self.members.values():
            beside = self.partitioned.beside(one.partitioned)
            held.append([own.held_bytes + max(others) for own, others in zip(one.stages, beside, strict=True)])
        return [max(of_stage) for of_stage in zip(*held, strict=True)]
