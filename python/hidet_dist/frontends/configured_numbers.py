"""Numbers of a configuration that make no sense, although transformers makes a model of them.

transformers takes the numbers of rotary embeddings and of normalisations as they are, and warns at most. With a scaling
by -3 the positions of a model run backwards; with an epsilon below 0 its results are NaN.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hidet_dist.checks import is_finite, is_list, is_whole

Problem = Callable[[Any], str]
"""Says what is wrong with a value, as the end of "which ..."; empty if nothing is."""


def problem_of_number(names: Sequence[str], value: Any) -> str:
    """Say what is wrong with a field of a configuration, as the end of "which ..."; empty if nothing is.

    None stands for a field that is not given.

    Parameters
    ----------
    names: sequence of str
        The names of the field, the outermost first.
    value: Any
        Its value.
    """
    if value is None:
        return ""
    if any(name in _ROTARY for name in names[:-1]) and (check := _OF_ROTARY.get(names[-1])) is not None:
        return check(value)
    return next((check(value) for pattern, check in _ANYWHERE if pattern.fullmatch(names[-1])), "")


def _positive(value: Any) -> str:
    return "" if is_finite(value) and value > 0 else "must be a finite number above 0"


def _not_negative(value: Any) -> str:
    return "" if is_finite(value) and value >= 0 else "must be a finite number from 0 on"


def _count(value: Any) -> str:
    return "" if is_whole(value, 1) else "must be a whole number from 1 on"


def _fraction(value: Any) -> str:
    return "" if is_finite(value) and 0 <= value <= 1 else "must be a number from 0 to 1"


def _positives(value: Any) -> str:
    if is_list(value) and value and not any(map(_positive, value)):
        return ""
    return "must be a list of finite numbers above 0"


_ROTARY = ("rope_parameters", "rope_scaling")
_OF_ROTARY: Mapping[str, Problem] = {
    **dict.fromkeys(("factor", "rope_theta", "original_max_position_embeddings", "attention_factor"), _positive),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), _positive),
    # 0 stands for the default of these.
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), _not_negative),
    **dict.fromkeys(("long_factor", "short_factor"), _positives),
    "partial_rotary_factor": _fraction,
}
"""The numbers of rotary embeddings, in an object of that name or in those of layers' kinds within it."""
_ANYWHERE: tuple[tuple[re.Pattern[str], Problem], ...] = (
    (re.compile(r"((global|local|compress)_)?rope_theta|rotary_emb_base|rope_local_base_freq"), _positive),
    (re.compile(r"partial_rotary_factor|rotary_pct"), _fraction),
    (re.compile(r"(.*_)?(eps|epsilon)"), _not_negative),
    (re.compile(r"sliding_window"), _count),  # of positions: from none of them attention would take a mean
    (re.compile(r"(final|attn)_logit_softcapping|query_pre_attn_scalar"), _positive),
)
"""Numbers that mean the same in all models, by their names."""
