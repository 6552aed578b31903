"""The process that renders chat templates, in Jinja's sandbox.

The names that templates use, and how they are rendered, are those of transformers
(https://huggingface.co/docs/transformers/chat_templating).
"""

from __future__ import annotations

import datetime
import functools
import importlib
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hidet_dist.limits import MOST_PROMPT_CHARACTERS
from hidet_dist.llm.confined import MOST_SAID, answer_requests

_WRONG = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, AttributeError, MemoryError)
"""What a template can raise, beside Jinja's own errors."""


def rendered(request: dict[str, Any]) -> dict[str, str]:
    """Render a template with the names of a request; with none, compile it alone.

    The answer has the text, or says what is ``malformed`` in the template, what is ``wrong`` with the names, or which
    library is ``missing``.
    """
    try:
        jinja2 = importlib.import_module("jinja2")
    except ImportError as error:
        return {"missing": error.name or "jinja2"}
    try:
        template = _compiled(request["source"])
    except (jinja2.exceptions.TemplateError, *_WRONG) as error:
        return {"malformed": _line(error)}
    if request["names"] is None:
        return {}
    parts, length = [], 0
    try:
        for part in template.generate(request["names"]):
            length += len(part)
            if length > MOST_PROMPT_CHARACTERS:
                return {"wrong": f"the prompt has more than {MOST_PROMPT_CHARACTERS} characters"}
            parts.append(part)
    except (jinja2.exceptions.TemplateError, *_WRONG) as error:
        return {"wrong": _line(error)}
    return {"text": "".join(parts)}


def _line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:MOST_SAID]


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> Any:
    return _environment().from_string(source)


def _environment() -> Any:
    """Make the environment in which templates run: the sandbox, with the names that transformers gives them."""
    jinja2 = importlib.import_module("jinja2")
    sandbox = importlib.import_module("jinja2.sandbox")
    extension = importlib.import_module("jinja2.ext")

    class Generation(extension.Extension):  # type: ignore[name-defined]
        """The block that marks what an assistant said, for training; its content is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012 - Jinja reads it so

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    class Environment(sandbox.ImmutableSandboxedEnvironment):  # type: ignore[name-defined]
        """The sandbox, which also refuses products that would fill memory."""

        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" and not all(isinstance(x, int | float) and abs(x) < 2**16 for x in (left, right)):
                raise jinja2.exceptions.SecurityError("a power of such numbers")
            for text, count in ((left, right), (right, left)):
                is_repeated = isinstance(text, str | list | tuple) and isinstance(count, int)
                if is_repeated and len(text) * count > MOST_PROMPT_CHARACTERS:
                    raise jinja2.exceptions.SecurityError("a text of more characters than a prompt may have")
            return super().call_binop(context, operator, left, right)

        def handle_exception(self, source: str | None = None) -> None:
            raise  # noqa: PLE0704 - as it is: Jinja compiles code for each frame, which takes minutes for a recursion

    class Namespace(jinja2.utils.Namespace):  # type: ignore[name-defined]
        """Variables that a template assigns within loops; none of the names that Python gives a meaning."""

        def __init__(*args: Any, **values: Any) -> None:
            for name in dict(*args[1:], **values):
                _check_name(name)
            jinja2.utils.Namespace.__init__(*args, **values)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    def _check_name(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a variable {name!r} of a namespace")

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, extension.loopcontrols])
    environment.globals["namespace"] = Namespace
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuser(jinja2.exceptions.TemplateError)
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _refuser(error: type[Exception]) -> Callable[[str], None]:
    def refuse(message: str) -> None:
        raise error(message)

    return refuse


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON. Jinja's own filter writes HTML's entities."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    with suppress(ImportError):  # a request says that it is missing
        _environment()  # imported before a first request comes
    answer_requests(rendered)
