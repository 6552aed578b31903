"""Prompts as tokens: texts, tokens, and the messages of a chat by the model's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hidet_dist.checks import shown
from hidet_dist.errors import InputError, RequestError
from hidet_dist.llm.engine import Engine
from hidet_dist.llm.engine.embedding import EmbeddingEngine
from hidet_dist.llm.server.service import Service, UnknownModel

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def check_model(service: Service, name: str | None) -> None:
    """Check that a request names the model that is served.

    Raises
    ------
    UnknownModel
        When it names another one.
    """
    if name is not None and name != service.name:
        raise UnknownModel(f"The model {shown(name)} is not served here; {service.name!r} is.")


def encode(engine: Engine | EmbeddingEngine, text: str, special: bool, parameter: str) -> list[int]:
    """Return the tokens of a text.

    Raises
    ------
    RequestError
        When it is no text that the tokenizer takes.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{parameter} has a half of a surrogate pair, which is no character.", parameter) from None
    try:
        return engine.tokenizer.encode(text, special=special)
    except InputError as error:
        raise RequestError(str(error), parameter) from error


def chat_prompt(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    answers: bool,
    options: Mapping[str, Any] | None,
) -> list[int]:
    """Return the tokens of a chat, by the model's template.

    Raises
    ------
    RequestError
        When a message is malformed, or the template does not take them.
    """
    engine = service.ready()
    if service.template is None:
        raise RequestError(f"The model {service.name} has no chat template; use /v1/completions.", "messages")
    plain = [_plain(number, message) for number, message in enumerate(messages)]
    try:
        text = service.template.render(plain, tools, answers, options)
    except InputError as error:
        raise RequestError(str(error), "messages") from error
    return encode(engine, text, False, "messages")


def _plain(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its content as one text: most templates know no parts."""
    where = f"messages.{number}"
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(f"{where}.role is {shown(role)}; give one of {', '.join(_ROLES)}.", f"{where}.role")
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
            if not isinstance(text, str):
                raise RequestError(
                    f"{where}.content has a part that is no text; this model reads texts alone.", f"{where}.content"
                )
            texts.append(text)
        content = "\n".join(texts)
    if not (isinstance(content, str) or (content is None and role == "assistant")):
        raise RequestError(f"{where}.content is no text.", f"{where}.content")
    return {**message, "content": content}
