"""The options of planning and building: a row for each, in a class for what they steer.

To add an option is to add a row. It is then a key of a configuration, a field of the options of what it steers, a flag
of ``hidet-dist plan`` and ``build`` if it has one, and on the page of the configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hidet_dist.checks import is_finite, is_whole
from hidet_dist.limits import MOST_BYTES, MOST_MICRO_BATCHES, MOST_SECONDS, MOST_SOLVER_THREADS
from hidet_dist.machine.builtin import MACHINES
from hidet_dist.options.option import BOOL, COUNT, REQUIRED, Check, Flag, one_of, option, or_none
from hidet_dist.options.reading import WeightsOption, read_specs, read_symbols, read_weights
from hidet_dist.options.texts import parse_budgets, parse_mesh, parse_pins, parse_shares
from hidet_dist.spec import TensorShardSpec
from hidet_dist.spec.objectives import OBJECTIVES
from hidet_dist.spec.pipeline import ALL, RESULTS
from hidet_dist.spec.symbols import SymbolSize
from hidet_dist.targets import DEFAULT_TARGET, TARGETS

MODES = ("search", "propagate")
SOLVERS = ("highs", "cbc")
TIME_LIMIT_SECONDS = 60.0
MEMORY_LIMIT_BYTES = 4 * 2**30

APART, JOINED = "apart", "joined"
EXPERTS = (APART, JOINED)
"""How layers of experts are planned: as products, or as one operator each."""

_PRECISIONS = tuple(dict.fromkeys(name for target in TARGETS.values() for name in target.precisions))
_FILLING = tuple(name for name, one in OBJECTIVES.items() if one.fills)
"""The objectives of pipelines whose stages work at the same time."""


def _listed(names: Iterable[str], quote: str, last: str) -> str:
    """Write two names or more in a text, each in quotes, with a word before the last one."""
    *others, end = (f"{quote}{name}{quote}" for name in names)
    return f"{', '.join(others)} {last} {end}"


BYTES = Check(lambda value: is_whole(value, 1, MOST_BYTES), "whole bytes above 0", MOST_BYTES)


@dataclass(frozen=True)
class DistributedOptions:
    """The device mesh of the program, and the machine for which costs are predicted."""

    mesh_shape: Any = option(
        REQUIRED,
        "list of int",
        "Devices along each mesh axis, such as ``[2]`` or ``[2, 4]``.",
        flag=Flag("Devices along each mesh axis, such as 8 or 2x8.", name="mesh", read=parse_mesh),
    )
    mesh_axis_names: Any = option(
        None,
        "list of str, optional",
        "A name for each mesh axis, such as ``['node', 'gpu']``; by default ``axis0`` and so on.",
    )
    machine: Any = option(
        None,
        "str, path or Cluster, optional",
        "The machine for which costs are predicted: the name of a built-in one (``hidet-dist machines``), the path of "
        "a machine file (ends in ``.json``), or a :class:`hidet_dist.machine.Cluster`. By default ``cpu``, or for the "
        "target ``cuda`` a machine with GPUs of the ``arch`` that is given.",
        flag=Flag("A machine of `hidet-dist machines`, or a machine file (.json).", completions=lambda: MACHINES),
    )
    shares: Any = option(
        None,
        "dict or str, optional",
        "The parts of a split dim that each device along an axis gets, by the name of the axis, such as "
        "``{'gpu': [11, 5]}`` for a device that is about twice as fast as the other. Other axes split evenly. "
        "Symbolic dims are not split so. A searched stage of a pipeline has the shares of its devices; "
        "stages that are given whole have their own. ``'auto'`` searches shares of the first axis, of the mesh or of "
        "each stage's, that suit the rates or the memory of the machine's ``groups`` of devices, and the even split.",
        flag=Flag(
            "Parts of a split dim for each device along an axis, such as axis0=11:5; auto to search them.",
            read=parse_shares,
        ),
    )


@dataclass(frozen=True)
class TargetOptions:
    """What programs are compiled for."""

    target: str = option(
        DEFAULT_TARGET,
        "str",
        "The target: ``cpu`` or ``cuda``. Compiling for GPUs needs no GPU. Options that only one target has are in a "
        'dict under its name, such as ``{"target": "cuda", "cuda": {"space": 2}}``.',
        one_of(TARGETS.keys()),
        flag=Flag(f"What programs are compiled for, {' or '.join(TARGETS)}; {DEFAULT_TARGET} by default."),
    )
    arch: str | None = option(
        None,
        "str, optional",
        "For the target ``cuda``, the architecture of the GPUs, such as ``sm_90``; ``auto``, the default, is that of "
        "the described machine. If ``arch`` is given and no machine, costs are predicted for a machine with such GPUs. "
        "For the target ``cpu``, the level of x86-64 whose instructions kernels use: ``x86-64``, ``x86-64-v2``, "
        "``x86-64-v3`` or ``x86-64-v4``; ``native``, the default, is the best level of the running machine. Processors "
        "of a lower level refuse the artifacts.",
        flag=Flag("The architecture of GPUs, such as sm_90, or the level of processors, such as x86-64-v3."),
    )
    precision: str | None = option(
        None,
        "str, optional",
        "``float16`` or ``bfloat16`` to compute a float32 graph in half precision where that is safe, with weights "
        "stored in it; see :mod:`hidet_dist.normalize.precision`. Inputs and outputs keep their dtypes. ``float16`` is "
        "for the target ``cuda``.",
        or_none(one_of(_PRECISIONS)),
        flag=Flag(f"The dtype in which a float32 model is computed where that is safe: {' or '.join(_PRECISIONS)}."),
    )


@dataclass(frozen=True)
class SolverOptions:
    """What the solvers of the search take."""

    solver: str = option("highs", "str", "The solver of integer programs, ``highs`` or ``cbc``.", one_of(SOLVERS))
    solver_gap: float = option(
        1e-3,
        "float",
        "The relative gap between the plan and the proven bound at which the search may stop. It is of the sum of "
        "seconds, without overlap.",
        Check(lambda value: is_finite(value) and 0 <= value < 1, "in [0, 1)"),
    )
    solver_threads: int = option(
        1,
        "int",
        "Threads of the solver. With one, and unless the time limit is reached, the same graph gets the same plan.",
        Check(lambda value: is_whole(value, 1, MOST_SOLVER_THREADS), f"an int from 1 to {MOST_SOLVER_THREADS}"),
    )


@dataclass(frozen=True)
class PlanningOptions(SolverOptions):
    """What the search for a plan takes."""

    mem_budget: int | None = option(
        None,
        "int or list of int, optional",
        "The memory budget of a device in bytes, at any time: weights, graph inputs and outputs, and live activations; "
        "by default the memory of each device. A list has the budget of each device, in the order of ranks. Devices at "
        "the same coordinate of the first mesh axis keep to the least of theirs.",
        or_none(BYTES),
        flag=Flag(
            "Memory that a device may hold, such as 60GiB, or of each device, such as 24GiB,12GiB.",
            name="budget",
            read=parse_budgets,
        ),
    )
    input_specs: Sequence[TensorShardSpec | None] | None = option(
        None,
        "list of TensorShardSpec or None, optional",
        "The specs in which graph inputs arrive, or their text; replicated by default.",
        read=read_specs,
        flag=Flag(
            "The spec of an input, such as '(S0, R)', in their order; repeatable, for all of them.",
            list,
            name="input_spec",
            metavar="SPEC",
        ),
        by_plan=True,
    )
    output_specs: Sequence[TensorShardSpec | None] | None = option(
        None,
        "list of TensorShardSpec or None, optional",
        "The specs in which graph outputs are delivered, or their text; replicated by default.",
        read=read_specs,
        flag=Flag(
            "The spec of an output, such as '(S0, R)', in their order; repeatable, for all of them.",
            list,
            name="output_spec",
            metavar="SPEC",
        ),
        by_plan=True,
    )
    pins: Mapping[str, Any] | None = option(
        None,
        "dict of text, optional",
        "The specs that weights, inputs, outputs, activations and operators must have, by name, such as "
        '``{"w0": "(R, S0)", "t5.0": "(?, S0)", "op:7": "(S0, R), ? -> (S0, R)"}``; ``?`` is free. See '
        ":class:`hidet_dist.search.formulation.pins.Pin`.",
        flag=Flag(
            "The spec of a tensor or an operator by its name in the plan, such as 'w0=(S0, R)'; repeatable.",
            list,
            name="pin",
            read=parse_pins,
            metavar="NAME=SPEC",
        ),
        by_plan=True,
    )
    names: Any = option(
        None,
        "Module or dict of tensors, optional",
        "The user's names of tensors of the graph, in pins and in the plan.",
    )
    symbols: Mapping[str, SymbolSize] = option(
        dict,
        "dict of SymbolSize",
        "The declaration of each symbolic dim: the size for which costs are predicted, a divisor of all sizes, and the "
        "least and the greatest one, such as "
        '``{"batch": {"expected": 16, "multiple_of": 8, "least": 8, "most": 64}, "seq": 128}``.',
        read=read_symbols,
    )
    mode: str = option(
        "search",
        "str",
        "``search`` for the plan of least predicted time; ``propagate`` to derive the plan from pins and given specs "
        "without a search (:mod:`hidet_dist.search.propagate`): fast, and only as good as the pins.",
        one_of(MODES),
        by_plan=True,
    )
    experts: str = option(
        APART,
        "str",
        "``joined`` to plan each layer of experts as one operator. It can be split by experts alone, and its tokens be "
        "dispatched to the devices of their experts, but nothing is converted between its products. ``apart`` to plan "
        "its products. See :mod:`hidet_dist.normalize.expert_layers`.",
        one_of(EXPERTS),
        flag=Flag(f"How layers of experts are planned: {' or '.join(EXPERTS)}, as one operator each.", metavar="HOW"),
    )
    refine_mesh: bool = option(
        True,
        "bool",
        "Whether to plan for a finer mesh, too, if the graph has fewer heads than a mesh axis has devices (two heads "
        "of keys and values on four devices), and take the better plan. Its mesh may have more axes than the given "
        "one, with the same ranks. Pins, which name the axes of the given mesh, and symbolic dims turn this off. See "
        ":mod:`hidet_dist.search.refine`.",
        BOOL,
    )
    solver_time_limit_seconds: float | None = option(
        TIME_LIMIT_SECONDS,
        "float, optional",
        "The time limit of planning as a whole in seconds. When it is reached, planning ends with the best plan so far "
        "and a warning; the report has the plan's gap. None for no limit.",
        or_none(
            Check(lambda value: is_finite(value) and 0 < value <= MOST_SECONDS, "seconds above 0", MOST_SECONDS),
        ),
        flag=Flag("The time limit of the search in seconds; 60 by default.", float, name="time_limit"),
    )
    solver_memory_limit_bytes: int = option(
        MEMORY_LIMIT_BYTES,
        "int",
        "The memory limit of planning's tables and integer programs in bytes. A graph that needs more is planned by "
        "coarser methods, or refused.",
        BYTES,
    )


@dataclass(frozen=True)
class StageOptions:
    """What the search for a pipeline takes."""

    objective: str | None = option(
        None,
        "str, optional",
        f"{_listed(OBJECTIVES, '``', 'or')} to search for a pipeline: stages, the devices and the sharding of each, "
        "and micro-batches, together; one stage is among the candidates. By default there is one stage. See "
        ":class:`hidet_dist.pipeline.PipelineOptions`.",
        or_none(one_of(tuple(OBJECTIVES))),
        flag=Flag(
            f"Search for a pipeline of stages by {_listed(OBJECTIVES, '', 'or')} (a call of micro-batches).",
            completions=lambda: tuple(OBJECTIVES),
        ),
        by_plan=True,
    )
    micro_batches: int | None = option(
        None,
        "int, optional",
        "The number of equal parts of a call's batch, on which the stages of a pipeline work at the same time. By "
        f"default it is searched for the objectives {_listed(_FILLING, '``', 'and')}, and 1 otherwise.",
        or_none(
            Check(lambda value: is_whole(value, 1, MOST_MICRO_BATCHES), f"1 to {MOST_MICRO_BATCHES}, a whole number")
        ),
        flag=Flag("The number of micro-batches of a call; searched by default.", int),
    )
    outputs: str = option(
        ALL,
        "str",
        "The ranks on which a call of a pipeline returns outputs: ``all``, or ``last`` for those of the last stage.",
        one_of(RESULTS),
    )
    stages: Any = option(
        None,
        "int or list of dict, optional",
        'The stages of a pipeline, in order, on disjoint devices. Given whole, such as ``[{"operators": [0, 12], '
        '"mesh_shape": [2]}, {"operators": [12, 30], "mesh_shape": [2], "pins": {...}}]``, where one stage has '
        "operators 0 to 11, each is searched, with its pins and shares: see :class:`hidet_dist.pipeline.GivenStage`. "
        "Given in part, the rest is searched by the ``objective`` (``latency`` if none is named): their number, or for "
        "each any of ``ranks`` (``[0, 4]`` for ranks 0 to 3), ``operators`` and ``weights`` (names, with ``*``): see "
        ":class:`hidet_dist.pipeline.StageConstraint`.",
        flag=Flag("The number of stages of the pipeline; searched by default.", int, check=COUNT),
        by_plan=True,
    )


@dataclass(frozen=True)
class BuildOptions:
    """What building takes."""

    weights: WeightsOption = option(
        WeightsOption,
        "path, list of paths or dict, optional",
        "The files with the data of the graph's weights, by name: safetensors files, an index of them, or a folder. A "
        "dict has them as ``files``. Its ``precision`` is the one in which weights of products are stored: ``int8`` or "
        "``int4``, and on CPUs, of float32 ones, ``float16``, ``bfloat16`` or ``uint4`` as well. With few bits, "
        "``group`` (32, 64 or 128; 32 by default) rows of a column have one scale; on CPUs, products round their left "
        "operand to 8 bits in the same groups. Embeddings, norms and routers stay as they are. ``stored`` keeps, on "
        "CPUs, the elements and scales of weights that their file has in few bits.",
        read=read_weights,
    )
    recompile: bool = option(
        False, "bool", "Whether to replace an out_dir that is not empty and does not hold artifacts.", BOOL
    )


OPTIMIZATION = (TargetOptions, PlanningOptions, StageOptions, BuildOptions)
"""The classes of which the optimization configuration consists."""
