"""The distributed and the optimization configuration of ``auto_parallel``, checked before work starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hidet_dist.checks import is_list, shown
from hidet_dist.compile import Backend, backend_of
from hidet_dist.errors import ConfigError, SpecError
from hidet_dist.machine import Cluster, Device, builtin, load_machine
from hidet_dist.options.option import (
    default_of,
    one_of,
    options_of,
    parse_options,
    read_options,
    refuse_unknown,
    taken_from,
)
from hidet_dist.options.planning import (
    BYTES,
    BuildOptions,
    DistributedOptions,
    PlanningOptions,
    StageOptions,
    TargetOptions,
)
from hidet_dist.pipeline import GivenStage, PipelineOptions, StageConstraint, parse_stages
from hidet_dist.search.formulation.labels import parse_names
from hidet_dist.search.formulation.pins import parse_pins
from hidet_dist.search.options import SearchOptions
from hidet_dist.search.shares import AUTO, parse_shares
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.objectives import DEFAULT
from hidet_dist.targets import DEFAULT_TARGET, TARGETS, targets_with

_DEFAULT_MACHINE = TARGETS[DEFAULT_TARGET].machine


@dataclass(frozen=True)
class DistributedConfig:
    """The device mesh of the program, and the machine for which costs are predicted.

    Its keys are :class:`hidet_dist.options.planning.DistributedOptions`.
    """

    mesh: DeviceMesh
    cluster: Cluster
    searches_shares: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, Any], default_machine: str = _DEFAULT_MACHINE) -> DistributedConfig:
        """Parse the user's dict. Raises ConfigError for unknown keys and unfit values."""
        refuse_unknown("distributed_config", given, tuple(options_of(DistributedOptions)))
        shape, names = given.get("mesh_shape"), given.get("mesh_axis_names")
        if not is_list(shape):
            raise ConfigError(
                f"distributed_config['mesh_shape'] must be a list of ints such as [2]; got {shown(shape)}."
            )
        if names is not None and not (is_list(names) and all(isinstance(name, str) for name in names)):
            raise ConfigError(
                f"distributed_config['mesh_axis_names'] must be a list of names such as ['gpu']; got {shown(names)}."
            )
        try:
            mesh = DeviceMesh(tuple(shape), tuple(names or ()))
            given_shares = given.get("shares")
            searches = isinstance(given_shares, str) and given_shares == AUTO
            shares = () if searches else parse_shares(given_shares, mesh, "distributed_config['shares']")
            mesh = DeviceMesh(mesh.shape, mesh.axis_names, shares)
        except SpecError as error:
            raise ConfigError(f"distributed_config does not describe a mesh: {error}") from error
        machine = given.get("machine", default_machine)
        if isinstance(machine, Path) or (isinstance(machine, str) and machine.endswith(".json")):
            return cls(mesh, load_machine(machine, mesh), searches)
        if isinstance(machine, str):
            return cls(mesh, builtin(machine, mesh), searches)
        if not isinstance(machine, Cluster):
            raise ConfigError(f"distributed_config['machine'] must be a name or a Cluster; got {shown(machine)}.")
        if "shares" in given and machine.mesh == machine.mesh.without_shares():
            machine = replace(machine, mesh=DeviceMesh(machine.mesh.shape, machine.mesh.axis_names, shares))
        if names is None and machine.mesh.shape == mesh.shape and "shares" not in given:
            mesh = machine.mesh  # with the machine's names of the axes
        if machine.mesh != mesh:
            raise ConfigError(f"The machine has the mesh {machine.mesh} but distributed_config asks for {mesh}.")
        return cls(mesh, machine, searches)


@dataclass(frozen=True)
class OptimizationConfig(BuildOptions, StageOptions, PlanningOptions, TargetOptions):
    """The options of planning and compiling (:mod:`hidet_dist.options.planning`).

    ``target_options`` are those of the target, an object of its class; by default the target's defaults.
    ``device_budgets`` are the bytes of each device, by rank, where ``mem_budget`` is given as a list.
    """

    target_options: Any = None
    device_budgets: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> OptimizationConfig:
        """Parse the user's dict. Raises ConfigError for unknown keys and unfit values."""
        what = "optimization_config"
        _refuse_moved(given)
        refuse_unknown(what, given, cls.keys())
        read = {"names": None, **{key: value for key, value in given.items() if key not in TARGETS}}
        budgets: tuple[int, ...] | None = None
        if is_list(read.get("mem_budget")):
            budgets = _budgets(f"{what}['mem_budget']", read.pop("mem_budget"))
        for key, parse in _READERS.items():
            if key in read:
                read[key] = parse(f"{what}[{key!r}]", read[key])
        config = read_options(cls, read, what)
        config._check_target()
        config._check_pipeline()
        for name in TARGETS:
            if name in given and name != config.target:
                raise ConfigError(
                    f"{what}[{name!r}] has options of the target {name!r}; the target is {config.target!r}."
                )
        options = backend_of(config.target).options
        of_target: Any = parse_options(options, given.get(config.target, {}), f"{what}[{config.target!r}]")
        return replace(config, target_options=of_target, device_budgets=budgets)

    @classmethod
    def keys(cls) -> list[str]:
        """List the keys: the fields, and the names of targets that have options, which are in a dict each."""
        return [*options_of(cls), *target_options()]

    def search_options(self) -> SearchOptions:
        """Return the options of the search."""
        return taken_from(SearchOptions, self)

    @property
    def given_stages(self) -> tuple[GivenStage, ...] | None:
        """The stages, if they are given whole; else None."""
        if not isinstance(self.stages, tuple):
            return None
        return tuple(one for one in self.stages if isinstance(one, GivenStage)) or None

    def pipeline_options(self) -> PipelineOptions | None:
        """Return the options of the search for a pipeline; None if no pipeline is to be searched."""
        if self.given_stages is not None or (self.objective is None and self.stages is None):
            return None
        constraints: int | tuple[StageConstraint, ...] | None = None
        if isinstance(self.stages, tuple):
            constraints = tuple(one for one in self.stages if isinstance(one, StageConstraint))
        else:
            constraints = self.stages
        return taken_from(PipelineOptions, self, objective=self.objective or DEFAULT, stages=constraints)

    def with_stages(self, stages: Sequence[Mapping[str, Any]]) -> OptimizationConfig:
        """Return the same options with stages that are given. Raises ConfigError for unfit ones."""
        config = replace(self, stages=_stages("optimization_config['stages']", stages))
        config._check_pipeline()
        return config

    def _check_pipeline(self) -> None:
        if self.stages is None and self.objective is None:
            for key in ("micro_batches", "outputs"):
                if getattr(self, key) != default_of(StageOptions, key):
                    raise ConfigError(
                        f"optimization_config[{key!r}] is for pipelines: give an 'objective' or 'stages' as well."
                    )
            return
        if self.given_stages is not None:
            if self.objective is not None:
                raise ConfigError(
                    "optimization_config['objective'] is for a search of stages, but the stages are given whole. Leave "
                    "it out, or give the stages in part."
                )
            for key in ("pins", "input_specs", "output_specs"):
                if getattr(self, key):
                    raise ConfigError(
                        f"optimization_config[{key!r}] is not for a graph that is cut into stages: pin the tensors of "
                        "each stage in 'stages'."
                    )
        if not TARGETS[self.target].symbolic_pipelines and self.symbols:
            raise ConfigError(
                "Pipelines of graphs with symbolic dims are so far for the target "
                f"{targets_with('symbolic_pipelines')!r}, not for {self.target!r}: "
                "leave 'stages' and 'objective' out, or trace the graph for one size."
            )

    def _check_target(self) -> None:
        one_of(tuple(TARGETS))("optimization_config['target']", self.target)
        chosen = TARGETS[self.target]
        if self.precision is not None and self.precision not in chosen.precisions:
            able = ", ".join(name for name, target in TARGETS.items() if self.precision in target.precisions)
            raise ConfigError(
                f"optimization_config['precision'] = {self.precision!r} is for the target {able!r}; the target is "
                f"{self.target!r}."
            )
        if self.arch is None:
            return
        archs = {name: backend_of(name).archs for name in TARGETS}
        for name, others in archs.items():
            if isinstance(self.arch, str) and self.arch in others and self.arch not in archs[self.target]:
                raise ConfigError(
                    f"optimization_config['arch'] = {self.arch!r} is for the target {name!r}; the target is "
                    f"{self.target!r}."
                )
        one_of(archs[self.target])("optimization_config['arch']", self.arch)

    @property
    def default_machine(self) -> str:
        """The machine for which costs are predicted if none is named."""
        target = TARGETS[self.target]
        return target.machines.get(self.arch or "", target.machine)

    def target_on(self, device: Device) -> Backend:
        """Make the target to compile for on a machine of such devices.

        Raises
        ------
        ConfigError
            When the device cannot run code for the target, or for the architecture.
        """
        backend = backend_of(self.target)
        options = backend.options() if self.target_options is None else self.target_options
        return backend.configured(self.arch, options, device)


def target_options() -> dict[str, type]:
    """Return the classes of options of all targets that have some, by the target's name."""
    kinds = {name: backend_of(name).options for name in TARGETS}
    return {name: kind for name, kind in kinds.items() if options_of(kind)}


def _refuse_moved(given: Any) -> None:
    """Raise ConfigError for an option of a target that is not in the target's dict."""
    for name, kind in target_options().items():
        for key in options_of(kind):
            if isinstance(given, Mapping) and key in given:
                raise ConfigError(
                    f"optimization_config[{key!r}] is an option of the target {name!r}: give it in a dict under the "
                    f"target's name, as {{'target': {name!r}, {name!r}: {{{key!r}: ...}}}}."
                )


def _stages(what: str, given: Any) -> int | tuple[GivenStage, ...] | tuple[StageConstraint, ...] | None:
    if not is_list(given):
        return parse_stages(given, what)
    whole = [isinstance(one, GivenStage) or (isinstance(one, Mapping) and "mesh_shape" in one) for one in given]
    if not any(whole):
        return parse_stages(given, what)
    if not all(whole):
        raise ConfigError(
            f"{what}[{whole.index(False)}] is given in part, and {what}[{whole.index(True)}] whole, with mesh_shape: "
            "give all stages whole (operators, mesh_shape), or all in part (ranks, operators, weights)."
        )
    return tuple(
        one if isinstance(one, GivenStage) else GivenStage.parse(one, f"{what}[{number}]")
        for number, one in enumerate(given)
    )


def _budgets(what: str, given: Sequence[Any]) -> tuple[int, ...]:
    if not given:
        raise ConfigError(f"{what} must be whole bytes, or a list with those of each device; got {shown(given)}.")
    for number, nbytes in enumerate(given):
        BYTES(f"{what}[{number}]", nbytes)
    return tuple(given)


def _pins(what: str, given: Any) -> Any:
    parse_pins(given, what)
    return given


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "pins": _pins,
    "names": lambda _, given: parse_names(given),
    "stages": _stages,
}
"""What makes the values of options that are read by the packages that use them."""
