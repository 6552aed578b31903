"""``hidet-dist plan MODEL --serve``: what serving a language model takes on a described machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hidet_dist.cli.facts import Facts
from hidet_dist.cli.quantities import bytes_text, seconds_text
from hidet_dist.cli.quiet import quiet
from hidet_dist.cli.request import PlanRequest
from hidet_dist.errors import ConfigError
from hidet_dist.progress import report_console

_OTHER = ("batch", "seq", "dynamic", "dims", "architecture", "objective", "symbols")
"""Options of a plan that mean nothing for the steps of a language model, or another one."""


def plan(request: PlanRequest, sizes: Mapping[str, int | None], files: Mapping[str, Any], as_json: bool) -> None:
    """Plan the steps of a language model, and print what is predicted.

    Raises
    ------
    ConfigError
        When an option does not go with ``--serve``, or is wrong.
    HidetDistError
        As :func:`hidet_dist.llm.serve_plan.plan_serving`.
    """
    if given := [name for name in _OTHER if name in request.given]:
        raise ConfigError(f"--{given[0]} does not go with --serve, which has sizes of its own.")
    if written := [name for name, path in files.items() if path is not None]:
        raise ConfigError(f"{written[0]} does not go with --serve, which makes two plans.")
    distributed, optimization = request.configurations()
    quiet()
    from hidet_dist.llm.options import LoadOptions
    from hidet_dist.llm.serve_plan import RATES_AT, ServePlan, plan_serving

    given_sizes: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    options = LoadOptions(dtype=request.value("dtype", "bfloat16"), **given_sizes)
    found: ServePlan = plan_serving(request.model, options, distributed, optimization)
    if as_json:
        told = {name: value for name, value in vars(found).items() if name != "plans"}
        print(json.dumps({**told, "dtype": options.dtype}, indent=1))
        return
    devices = f"{found.devices} x {found.device}" if found.devices > 1 else found.device
    facts = Facts(f"{found.name}, {options.dtype}, served on {devices}")
    whole = found.weight_bytes + found.cache_bytes + found.other_bytes
    rows = {
        "memory a device": f"{bytes_text(whole)} of {bytes_text(found.memory_bytes)}",
        "  weights": bytes_text(found.weight_bytes),
        "  keys and values": f"{bytes_text(found.cache_bytes)}: {found.sequences} sequences of {found.context} tokens",
        "  a step": bytes_text(found.other_bytes),
        "sequences that fit": f"{found.fitting} of {found.context} tokens",
        "time to first token": f"{seconds_text(found.first_token_seconds)} for a prompt of {found.step_tokens} tokens, "
        f"{seconds_text(found.long_prompt_seconds)} for {max(found.context // 2, 1)}",
        "time a token": f"{seconds_text(found.token_seconds)} with {found.sequences} sequences, half full",
        "tokens/s": ", ".join(
            f"{found.tokens_per_second[count]:.0f} with {count}{'' if count <= found.fitting else ' (no room)'}"
            for count in RATES_AT
        ),
        "distance from bound": f"at most {found.gap:.2%}",
    }
    for name, text in rows.items():
        facts.add(name, text)
    facts.print(report_console())
