"""What serving a language model takes, predicted without its weights: memory, time, and how many sequences fit.

A step of prompts and a step that decodes are planned together: they share the weights and the pools of keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hidet_dist.errors import ConfigError
from hidet_dist.frontends.configuration import Configuration, offline
from hidet_dist.frontends.pytorch.module import from_torch
from hidet_dist.limits import MOST_BYTES
from hidet_dist.llm.checkpoint import Checkpoint, blaming, module_of
from hidet_dist.llm.loading import name_of
from hidet_dist.llm.options import LoadOptions
from hidet_dist.llm.ragged import RaggedModel, dynamic_shapes, prepare, settle
from hidet_dist.phases.family import TracedFamily
from hidet_dist.phases.values import Planned, Traced
from hidet_dist.spec import Plan
from hidet_dist.spec.plan import TensorPlan
from hidet_dist.view import GraphView

PREFILL, DECODE = "prefill", "decode"
RATES_AT = (1, 8, 64)
"""The numbers of sequences for which tokens a second are predicted."""


@dataclass(frozen=True)
class ServePlan:
    """The plans of both steps, and what is predicted of them. Bytes are of the device that holds most.

    Attributes
    ----------
    name: str
        The name of the model.
    device: str
        The name of a device of the machine.
    devices: int
        Their number.
    context, sequences, step_tokens: int
        Tokens of a sequence; sequences that run at once; tokens of a step of prompts.
    weight_bytes, cache_bytes, other_bytes: int
        Memory of a device: weights; pools for ``sequences`` whole contexts; what the larger step holds besides.
    memory_bytes: int
        The memory of a device that may be used.
    fitting: int
        Sequences of whole contexts for which a device has room, beside weights and a step.
    first_token_seconds: float
        From a prompt of ``step_tokens`` tokens to its first token.
    long_prompt_seconds: float
        The same for a prompt of half the context, in as many steps as it takes.
    token_seconds: float
        A step that decodes a token of each of ``sequences`` sequences with half of their context filled.
    tokens_per_second: mapping of int to float
        Tokens a second of all sequences together, by their number, with half of their context filled.
    gap: float
        The relative gap between the weighted sum of the steps' times and the search's bound.
    plans: mapping of str to Plan
        The plans of ``prefill`` and ``decode``.
    """

    name: str
    device: str
    devices: int
    context: int
    sequences: int
    step_tokens: int
    weight_bytes: int
    cache_bytes: int
    other_bytes: int
    memory_bytes: int
    fitting: int
    first_token_seconds: float
    long_prompt_seconds: float
    token_seconds: float
    tokens_per_second: Mapping[int, float]
    gap: float
    plans: Mapping[str, Plan]


def plan_serving(
    path: Path, options: LoadOptions, distributed: Mapping[str, Any], optimization: Mapping[str, Any]
) -> ServePlan:
    """Plan the steps of a model for a described machine, together, without its weights.

    A step of prompts computes ``step_tokens`` tokens. Each sequence is taken to generate as many tokens as its prompt
    has: so many steps decode a token of each of the sequences as one has prompts, over the number of sequences.

    Parameters
    ----------
    path: Path
        A transformers folder or its ``config.json``, or a GGUF file.
    options: LoadOptions
        The sizes; ``dtype`` is the model's.
    distributed, optimization: mapping
        The configurations of :func:`hidet_dist.auto_parallel`, with the machine and its mesh.

    Raises
    ------
    ConfigError, TraceError, UnsupportedModelError
        When an option is wrong, or the model is not served; the message says why.
    InfeasibleError
        When weights and pools do not fit.
    HidetDistError
        As :func:`hidet_dist.build_family`.
    """
    options.check()
    configuration = Checkpoint.open(path).configuration if path.suffix == ".gguf" else Configuration.of(path)
    context = 0

    def prepared(config: Any) -> None:
        nonlocal context
        context = options.context_of(getattr(config.get_text_config(), "max_position_embeddings", None))
        prepare(config, context)

    with offline():
        module = module_of(configuration, options.dtype, prepared)
        module.tie_weights()  # part of the initialization that is skipped without data
    pages = options.sequences * -(-context // options.page)
    with blaming(configuration):
        settle(module)
        step = RaggedModel(module, pages * options.page, options.page, device="meta")
        graph = from_torch(step, step.inputs(), dynamic_shapes())
    half = max(1, context // (2 * options.page))

    def sizes(tokens: int, sequences: int) -> dict[str, int]:
        return {"tokens": tokens, "sequences": sequences, "pages": half, "wanted": sequences}

    own: dict[str, dict[str, Any]] = {
        PREFILL: {"symbols": sizes(options.step_tokens, 1)},
        DECODE: {
            "symbols": sizes(options.sequences, options.sequences),
            "frequency": options.step_tokens / options.sequences,
        },
    }
    family = TracedFamily.of({PREFILL: graph, DECODE: graph}, distributed, optimization, own)
    planned = family.prepare().plan()
    prefill, decode = (planned.members[name] for name in (PREFILL, DECODE))

    def seconds(like: Planned, tokens: int, sequences: int) -> float:
        """Predict a plan's time for other sizes of a step, whether the device has room for it or not."""
        given = sizes(tokens, sequences)
        whole = {**optimization, "symbols": given, "mem_budget": MOST_BYTES}
        prepared = Traced.of(graph, distributed, whole).prepare()
        return _seconds(prepared.take(_of_sizes(like.plan, prepared.view, given)))

    stages = [one.plan.stages[0] for one in (prefill, decode)]
    reports = [report for one in (prefill, decode) for report in one.reports("")]
    if not any(stage.states for stage in stages):
        raise ConfigError(f"{path} keeps no keys and values: only models that do can be planned for serving.")

    def fitting(rank: int) -> tuple[int, int, int, int, int]:
        """Return the sequences that fit a rank's device, and its bytes: weights, states, others, and the budget."""
        at = stages[0].mesh.coordinate(rank)
        weights = max(stage.weight_bytes_of(rank) for stage in stages)
        cache = max(sum(state.local_nbytes(stage.mesh, at) for state in stage.states) for stage in stages)
        held = max(report.memory.peak_bytes_of(rank) for report in reports)
        budget = reports[0].memory.budget_of(rank)
        other = max(0, held - weights - cache)
        return max(0, (budget - weights - other) * options.sequences // cache), weights, cache, other, budget

    fit, weights, cache, other, budget = min(map(fitting, range(stages[0].mesh.size)), key=lambda one: one[0])
    steps = -(-(context // 2) // options.step_tokens)
    first = _seconds(prefill)
    return ServePlan(
        name_of(path.parent if path.name == "config.json" else path),
        reports[0].machine.device,
        stages[0].mesh.size,
        context,
        options.sequences,
        options.step_tokens,
        weights,
        cache,
        other,
        budget,
        fit,
        first,
        first * max(1, steps),
        _seconds(decode),
        {count: count / seconds(decode, count, count) for count in RATES_AT},
        planned.found.gap,
        {PREFILL: prefill.plan, DECODE: decode.plan},
    )


def _of_sizes(plan: Plan, view: GraphView, sizes: Mapping[str, int]) -> Plan:
    """Return a plan with the shapes of other sizes of the symbolic dims; its specs stay, and its costs are the old."""
    (stage,) = plan.stages

    def sized(tensors: tuple[TensorPlan, ...]) -> tuple[TensorPlan, ...]:
        return tuple(replace(one, shape=view.shape(one.name), nbytes=view.nbytes(one.name)) for one in tensors)

    stage = replace(
        stage,
        symbols=tuple(replace(symbol, size=sizes[symbol.name]) for symbol in stage.symbols),
        weights=sized(stage.weights),
        inputs=sized(stage.inputs),
        outputs=sized(stage.outputs),
        states=sized(stage.states),
    )
    return replace(plan, stages=(stage,))


def _seconds(planned: Planned) -> float:
    return planned.plan.stages[0].makespan_seconds
