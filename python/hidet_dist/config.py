"""The distributed and the optimization configuration of ``auto_parallel``, checked before work starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from hidet_dist.checks import is_list, is_whole, shown
from hidet_dist.compile import Backend, backend_of
from hidet_dist.errors import ConfigError, SpecError
from hidet_dist.limits import MOST_MICRO_BATCHES
from hidet_dist.machine import Cluster, Device, builtin, load_machine
from hidet_dist.normalize.precision import PRECISIONS
from hidet_dist.options.option import options_of, parse_options, refuse_unknown
from hidet_dist.pipeline import GivenStage, PipelineOptions, StageConstraint, parse_stages
from hidet_dist.search.formulation.labels import parse_names
from hidet_dist.search.formulation.pins import parse_pins
from hidet_dist.search.limits import MEMORY_LIMIT_BYTES, TIME_LIMIT_SECONDS
from hidet_dist.search.options import REQUIREMENTS, SearchOptions, check_option
from hidet_dist.search.shares import AUTO, parse_shares
from hidet_dist.spec import DeviceMesh, TensorShardSpec
from hidet_dist.spec.pipeline import ALL, OBJECTIVES, RESULTS
from hidet_dist.spec.symbols import SymbolSize
from hidet_dist.targets import DEFAULT_TARGET, TARGETS, targets_with

_DEFAULT_MACHINE = TARGETS[DEFAULT_TARGET].machine
_INT32_MAX = 2**31 - 1  # hidet's runtime holds the sizes of symbolic dims as int32

# The keys of the configuration that are options of the search, by the options' names.
_SEARCH_KEYS = {
    **{name: name for name in ("mem_budget", "input_specs", "output_specs", "pins", "names", "symbols", "mode")},
    "refine_mesh": "refine_mesh",
    "solver": "solver",
    "gap": "solver_gap",
    "time_limit_seconds": "solver_time_limit_seconds",
    "memory_limit_bytes": "solver_memory_limit_bytes",
    "threads": "solver_threads",
}


def _are_paths(value: Any) -> bool:
    paths = value if is_list(value) else [value]
    return bool(paths) and all(isinstance(path, str | Path) and path and "\0" not in str(path) for path in paths)


@dataclass(frozen=True)
class DistributedConfig:
    """The device mesh of the program, and the machine for which costs are predicted."""

    KEYS: ClassVar[Mapping[str, str]] = {
        "mesh_shape": "Devices along each mesh axis, such as ``[2]`` or ``[2, 4]``. Required.",
        "mesh_axis_names": "A name for each mesh axis, such as ``['node', 'gpu']``; by default ``axis0`` and so on.",
        "shares": (
            "The parts of a split dim that each device along an axis gets, by the name of the axis, such as "
            "``{'gpu': [11, 5]}`` for a device that is about twice as fast as the other. Other axes split evenly. For "
            "the target ``cpu`` and graphs of fixed sizes. A searched stage of a pipeline has the shares of its "
            "devices; stages that are given whole have their own. ``'auto'`` searches shares of the first axis, of the "
            "mesh or of each stage's, that suit the rates of the machine's ``groups`` of devices, and the even split."
        ),
        "machine": (
            "The machine for which costs are predicted: the name of a built-in one (``hidet-dist machines``), the "
            "path of a machine file (ends in ``.json``), or a :class:`hidet_dist.machine.Cluster`. By default ``cpu``, "
            "or for the target ``cuda`` a machine with GPUs of the ``arch`` that is given."
        ),
    }
    """The keys, each with its meaning."""

    mesh: DeviceMesh
    cluster: Cluster
    searches_shares: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, Any], default_machine: str = _DEFAULT_MACHINE) -> DistributedConfig:
        """Parse the user's dict. Raises ConfigError for unknown keys and unfit values."""
        refuse_unknown("distributed_config", given, tuple(cls.KEYS))
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
            searches = given.get("shares") == AUTO
            shares = () if searches else parse_shares(given.get("shares"), mesh, "distributed_config['shares']")
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
class OptimizationConfig:
    """The options of planning and compiling.

    Attributes
    ----------
    target: str
        The target: ``cpu`` or ``cuda``. Compiling for GPUs needs no GPU. Options that only one target has are in a dict
        under its name, such as ``{"target": "cuda", "cuda": {"space": 2}}``.
    arch: str, optional
        For the target ``cuda``, the architecture of the GPUs, such as ``sm_90``; ``auto``, the default, is that of the
        described machine. If ``arch`` is given and no machine, costs are predicted for a machine with such GPUs.
        For the target ``cpu``, the level of x86-64 whose instructions kernels use: ``x86-64``, ``x86-64-v2``,
        ``x86-64-v3`` or ``x86-64-v4``; ``native``, the default, is the best level of the running machine. Processors of
        a lower level refuse the artifacts.
    precision: str, optional
        ``float16`` or ``bfloat16`` to compute a float32 graph in half precision where that is safe, with weights stored
        in it; see :mod:`hidet_dist.normalize.precision`. Inputs and outputs keep their dtypes. For the target ``cuda``.
    mem_budget: int, optional
        The memory budget of a device in bytes: weights, graph inputs and outputs, and live activations; by default the
        device's memory.
    input_specs, output_specs: tuple of TensorShardSpec or None, optional
        The specs in which graph inputs arrive and outputs are delivered, or their text; replicated by default.
    pins: dict of text, optional
        The specs that weights, inputs, outputs, activations and operators must have, by name, such as
        ``{"w0": "(R, S0)", "t5.0": "(?, S0)", "op:7": "(S0, R), ? -> (S0, R)"}``; ``?`` is free. See
        :class:`hidet_dist.search.formulation.pins.Pin`.
    names: Module or dict of tensors, optional
        The user's names of tensors of the graph, in pins and in the plan.
    mode: str
        ``search`` for the plan of least predicted time; ``propagate`` to derive the plan from pins without a search.
    solver: str
        ``highs`` or ``cbc``.
    solver_time_limit_seconds: float, optional
        The time limit of planning as a whole in seconds. When it is reached, planning ends with the best plan so far
        and a warning; the report has the plan's gap. 60 by default; None for no limit.
    solver_memory_limit_bytes: int
        The memory limit of planning's tables and integer programs in bytes; 4 GiB by default. A graph that needs more
        is planned by coarser methods, or refused.
    solver_gap: float
        The relative gap to the optimum at which the solver may stop. It is of the sum of seconds, without overlap.
    solver_threads: int
        Threads of the solver; with one, the default, the same graph gets the same plan.
    symbols: mapping of str to SymbolSize
        The declaration of each symbolic dim: the size for which costs are predicted, and a divisor of all sizes, such
        as ``{"batch": {"expected": 16, "multiple_of": 8}, "seq": 128}``.
    refine_mesh: bool
        Whether to plan for a finer mesh, too, if the graph has fewer heads than a mesh axis has devices (two heads of
        keys and values on four devices), and take the better plan. See :mod:`hidet_dist.search.refine`.
    weights: path or sequence of paths, optional
        The files with the data of the graph's weights, by name: safetensors files, an index of them, or a folder.
    objective: str, optional
        ``latency``, ``throughput`` or ``batch`` to search for a pipeline: stages, the devices and the sharding of each,
        and micro-batches, together; one stage is among the candidates. By default there is one stage. See
        :class:`hidet_dist.pipeline.PipelineOptions`.
    stages: int or sequence of dict, optional
        The stages of a pipeline, in order, on disjoint devices. Given whole, such as
        ``[{"operators": [0, 12], "mesh_shape": [2]}, {"operators": [12, 30], "mesh_shape": [2], "pins": {...}}]``,
        where one stage has operators 0 to 11, each is searched, with its pins and shares: see
        :class:`hidet_dist.pipeline.GivenStage`. Given in part, the rest is searched by the ``objective`` (``latency``
        if none is named): their number, or for each any of ``ranks`` (``[0, 4]`` for ranks 0 to 3), ``operators`` and
        ``weights`` (names, with ``*``): see :class:`hidet_dist.pipeline.StageConstraint`.
    micro_batches: int, optional
        The number of equal parts of a call's batch, on which the stages of a pipeline work at the same time. By default
        it is searched for the objectives ``throughput`` and ``batch``, and 1 otherwise.
    outputs: str
        The ranks on which a call of a pipeline returns outputs: ``all``, or ``last`` for those of the last stage.
    recompile: bool
        Whether to replace an out_dir that is not empty and does not hold artifacts.
    target_options: object
        The options of the target, an object of its class; by default the target's defaults.
    """

    target: str = DEFAULT_TARGET
    arch: str | None = None
    precision: str | None = None
    mem_budget: int | None = None
    input_specs: tuple[TensorShardSpec | None, ...] | None = None
    output_specs: tuple[TensorShardSpec | None, ...] | None = None
    pins: Mapping[str, Any] | None = None
    names: Any = None
    mode: str = "search"
    solver: str = "highs"
    solver_time_limit_seconds: float | None = TIME_LIMIT_SECONDS
    solver_memory_limit_bytes: int = MEMORY_LIMIT_BYTES
    solver_gap: float = 1e-3
    solver_threads: int = 1
    symbols: Mapping[str, SymbolSize] = field(default_factory=dict)
    refine_mesh: bool = True
    weights: str | Path | Sequence[str | Path] | None = None
    objective: str | None = None
    stages: int | tuple[GivenStage, ...] | tuple[StageConstraint, ...] | None = None
    micro_batches: int | None = None
    outputs: str = ALL
    recompile: bool = False
    target_options: Any = None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> OptimizationConfig:
        """Parse the user's dict. Raises ConfigError for unknown keys and unfit values."""
        _refuse_moved(given)
        refuse_unknown("optimization_config", given, cls.keys())
        values = {key: value for key, value in given.items() if key not in TARGETS}
        for key in ("input_specs", "output_specs"):
            if values.get(key) is not None:
                values[key] = _specs(key, values[key])
        if "symbols" in values:
            values["symbols"] = _symbols(values["symbols"])
        if values.get("stages") is not None:
            values["stages"] = _stages(values["stages"])
        parse_pins(values.get("pins"), "optimization_config['pins']")
        values["names"] = parse_names(values.get("names"))
        config = cls(**values)
        for name, key in _SEARCH_KEYS.items():
            if name in REQUIREMENTS:
                check_option(name, getattr(config, key), f"optimization_config[{key!r}]")
        if config.weights is not None and not _are_paths(config.weights):
            raise ConfigError(
                "optimization_config['weights'] must be the path of a safetensors file, an index or a folder, or a "
                f"list of paths; got {shown(config.weights)}."
            )
        if not isinstance(config.recompile, bool):
            raise ConfigError(f"optimization_config['recompile'] must be True or False; got {shown(config.recompile)}.")
        config._check_target()
        config._check_pipeline()
        for name in TARGETS:
            if name in given and name != config.target:
                raise ConfigError(
                    f"optimization_config[{name!r}] has options of the target {name!r}; the target is "
                    f"{config.target!r}."
                )
        of_target = given.get(config.target, {})
        return replace(
            config,
            target_options=parse_options(
                backend_of(config.target).options, of_target, f"optimization_config[{config.target!r}]"
            ),
        )

    @classmethod
    def keys(cls) -> list[str]:
        """List the keys: the fields, and the names of targets that have options, which are in a dict each."""
        return [*(field.name for field in fields(cls) if field.name != "target_options"), *target_options()]

    def search_options(self) -> SearchOptions:
        """Return the options of the search."""
        return SearchOptions(**{name: getattr(self, key) for name, key in _SEARCH_KEYS.items()})

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
        return PipelineOptions(self.objective or "latency", self.micro_batches, self.outputs, constraints)

    def _check_pipeline(self) -> None:
        _choice("outputs", self.outputs, RESULTS)
        if self.objective is not None:
            _choice("objective", self.objective, OBJECTIVES)
        if self.micro_batches is not None and not is_whole(self.micro_batches, 1, MOST_MICRO_BATCHES):
            raise ConfigError(
                "optimization_config['micro_batches'] must be a whole number from 1 to "
                f"{MOST_MICRO_BATCHES}; got {shown(self.micro_batches)}."
            )
        if self.stages is None and self.objective is None:
            for key in ("micro_batches", "outputs"):
                if getattr(self, key) != _DEFAULTS[key]:
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
        _choice("target", self.target, tuple(TARGETS))
        chosen = TARGETS[self.target]
        if self.precision is not None:
            _choice("precision", self.precision, PRECISIONS)
            if self.precision not in chosen.precisions:
                raise ConfigError(
                    f"optimization_config['precision'] = {self.precision!r} is for the target "
                    f"{targets_with('precisions')!r}; the target is {self.target!r}."
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
        _choice("arch", self.arch, archs[self.target])

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


_DEFAULTS = {each.name: each.default for each in fields(OptimizationConfig)}


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


def _choice(key: str, value: Any, choices: Sequence[str | int]) -> None:
    """Raise ConfigError unless a value is one of the choices, of the same type."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ConfigError(
            f"optimization_config[{key!r}] must be one of {', '.join(map(str, choices))}; got {shown(value)}."
        )


def _stages(given: Any) -> int | tuple[GivenStage, ...] | tuple[StageConstraint, ...] | None:
    what = "optimization_config['stages']"
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


def _symbols(given: Any) -> dict[str, SymbolSize]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"optimization_config['symbols'] must be a dict such as {{'batch': 16}}; got {shown(given)}.")
    symbols = {}
    for name, value in given.items():
        what = f"optimization_config['symbols'][{shown(name)}]"
        if not isinstance(name, str):
            raise ConfigError(f"optimization_config['symbols'] has the key {shown(name)}; the keys are names of dims.")
        if isinstance(value, SymbolSize):
            declared: Mapping[str, Any] = {"expected": value.expected, "multiple_of": value.multiple_of}
        else:
            declared = value if isinstance(value, Mapping) else {"expected": value}
        refuse_unknown(what, declared, ("expected", "multiple_of"))
        if "expected" not in declared:
            raise ConfigError(f"{what} lacks 'expected', the size that costs are predicted for; got {shown(declared)}.")
        size = SymbolSize(declared["expected"], declared.get("multiple_of", 1))
        for key in ("expected", "multiple_of"):
            number = getattr(size, key)
            if not is_whole(number, 1, _INT32_MAX):
                raise ConfigError(f"{what}: {key!r} must be a whole number from 1 to 2**31 - 1; got {shown(number)}.")
        if size.expected % size.multiple_of:
            raise ConfigError(f"{what}: 'expected' = {size.expected} is no multiple of {size.multiple_of}.")
        symbols[name] = size
    return symbols


def _specs(key: str, given: Any) -> tuple[TensorShardSpec | None, ...]:
    if not is_list(given):
        raise ConfigError(
            f"optimization_config[{key!r}] must be a list with one spec (or None) a tensor; got {shown(given)}."
        )
    specs: list[TensorShardSpec | None] = []
    for spec in given:
        if spec is None or isinstance(spec, TensorShardSpec):
            specs.append(spec)
        elif isinstance(spec, str):
            try:
                specs.append(TensorShardSpec.parse(spec))
            except SpecError as error:
                raise ConfigError(f"optimization_config[{key!r}]: {error}") from error
        else:
            raise ConfigError(f"optimization_config[{key!r}] has {shown(spec)}; write a spec as '(S0, R)'.")
    return tuple(specs)
