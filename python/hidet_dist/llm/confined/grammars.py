"""The process that tries grammars of answers, with bounds that llguidance's own compilation lacks.

It takes no end of time for some intersections of regular expressions, and overflows its stack for long chains of rules.
"""

from __future__ import annotations

import functools
from typing import Any

from hidet_dist.llm.confined import answer_requests

KINDS = ("json_schema", "regex", "lark")
_LIMITS = {"precompute_large_lexemes": False, "initial_lexer_fuel": 200_000, "verbose_errors": False}
"""llguidance's bounds of compilation. The fuel takes 4 ms; messages say nothing of its state, which may be long."""


def compiled(kind: str, text: str, tokenizer: Any) -> Any:
    """Return llguidance's matcher of a grammar, which may be in an error state.

    Raises
    ------
    ValueError
        When the grammar is malformed.
    """
    import llguidance

    form = {
        "json_schema": llguidance.LLMatcher.grammar_from_json_schema,
        "regex": llguidance.LLMatcher.grammar_from_regex,
        "lark": llguidance.LLMatcher.grammar_from_lark,
    }[kind]
    limits = llguidance.LLParserLimits(**_LIMITS)
    return llguidance.LLMatcher(tokenizer, form(text), log_level=0, limits=limits)


def problem(request: dict[str, str]) -> str:
    """Say what is wrong with a grammar of a kind; nothing if it compiles, and some answer can begin."""
    try:
        matcher = compiled(request["kind"], request["text"], _bytes())
    except ValueError as error:
        return str(error)
    matcher.compute_bitmask()
    return str(matcher.get_error()) if matcher.is_error() else ""


@functools.cache
def _bytes() -> Any:
    """Return a tokenizer with a token for each byte: what a grammar takes depends little on the vocabulary."""
    import llguidance

    return llguidance.LLTokenizer("byte")


if __name__ == "__main__":
    answer_requests(problem)
