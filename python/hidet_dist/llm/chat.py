"""Chat templates: prompts made of messages by the Jinja template of a checkpoint, in Jinja's sandbox.

The names that templates use, and how they are rendered, are those of transformers
(https://huggingface.co/docs/transformers/chat_templating).
"""

from __future__ import annotations

import datetime
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hidet_dist.checks import shown
from hidet_dist.errors import ConfigError, InputError
from hidet_dist.limits import MOST_PROMPT_CHARACTERS


class ChatTemplate:
    """A compiled chat template.

    Parameters
    ----------
    source: str
        The template. It is data from outside: it reaches nothing but the values that it is given.
    special_texts: mapping
        Texts of special tokens by name, such as ``bos_token``.

    Raises
    ------
    ConfigError
        When the template is malformed.
    """

    def __init__(self, source: str, special_texts: Mapping[str, str]):
        jinja2 = importlib.import_module("jinja2")
        environment = _environment()
        self._errors: tuple[type[Exception], ...] = (
            *(jinja2.exceptions.TemplateError, ArithmeticError, LookupError),
            *(RecursionError, TypeError, ValueError, AttributeError, MemoryError),
        )
        try:
            self._template = environment.from_string(source)
        except (jinja2.exceptions.TemplateError, RecursionError, ValueError, MemoryError) as error:
            raise ConfigError(f"The chat template of the model is malformed: {error}.") from error
        self._special_texts = dict(special_texts)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        answers: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Make the prompt of messages.

        Parameters
        ----------
        messages: sequence of mapping
            Messages with ``role`` and ``content``, oldest first; values of JSON.
        tools: sequence of mapping, optional
            Descriptions of functions that the model may call, as OpenAI's API has them.
        answers: bool
            Whether the prompt ends where the model's answer begins.
        options: mapping, optional
            Other names that the template knows, such as ``enable_thinking``.

        Raises
        ------
        InputError
            When the template refuses the messages, fails for them, or makes a prompt that is too long.
        """
        names = {
            **self._special_texts,
            **_plain(options or {}),
            "messages": _plain(messages),
            "tools": _plain(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": answers,
        }
        parts, length = [], 0
        try:
            for part in self._template.generate(names):
                length += len(part)
                if length > MOST_PROMPT_CHARACTERS:
                    raise InputError(f"The prompt has more than {MOST_PROMPT_CHARACTERS} characters.")
                parts.append(part)
        except InputError:
            raise
        except self._errors as error:
            said = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"The chat template of the model does not take these messages: {said}") from error
        return "".join(parts)


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


def _plain(value: Any) -> Any:
    """Copy values of JSON, so that a template reaches no object of this process. Raises InputError for others."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    raise InputError(f"Messages and tools must be values of JSON; got {shown(value)}.")
