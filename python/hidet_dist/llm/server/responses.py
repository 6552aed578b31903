"""The forms of answers, for the description of the interface at ``/openapi.json``."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict

Finish = Literal["stop", "length"]


class JsonForm(BaseModel):
    """A JSON object with these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class ErrorFields(JsonForm):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(JsonForm):
    """An error."""

    error: ErrorFields


class Health(JsonForm):
    """Whether requests are taken."""

    status: Literal["loading", "ready", "draining", "failed", "closed"]


class Model(JsonForm):
    """A model that is served. ``max_model_len`` is there once it is loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = 0


class Models(JsonForm):
    """The models that are served."""

    object: Literal["list"]
    data: list[Model]


class CachedTokens(JsonForm):
    """Tokens of prompts that were in the pages already."""

    cached_tokens: int


class UsageFields(JsonForm):
    """The tokens that a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TokenLogprobs(JsonForm):
    """Log-probabilities of the tokens of a completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(JsonForm):
    """One answer to one prompt."""

    index: int
    text: str
    logprobs: TokenLogprobs | None
    finish_reason: Finish | None


class Completion(JsonForm):
    """Answers to prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageFields


class TopLogprob(JsonForm):
    """A token that was probable."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    """A token of an answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(JsonForm):
    """Log-probabilities of the tokens of a message."""

    content: list[ContentLogprob]
    refusal: None


class ChatMessage(JsonForm):
    """The next message of a chat."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(JsonForm):
    """One answer in a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatCompletion(JsonForm):
    """Answers in a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageFields


class EmbeddingUsage(JsonForm):
    """The tokens of texts."""

    prompt_tokens: int
    total_tokens: int


class Embedding(JsonForm):
    """The vector of a text, as numbers, or its float32 elements in little endian and base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(JsonForm):
    """The vectors of texts."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Tokens(JsonForm):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str]


class Detokenized(JsonForm):
    """The text of tokens."""

    prompt: str


_STREAM: dict[str, Any] = {"text/event-stream": {}}
_WRONG = {
    400: "The request is wrong.",
    401: "The API key is missing or wrong.",
    403: "The host that the request names is not served without an API key.",
}
_FAILED = {
    404: "The model is not served here.",
    413: "The body is too large.",
    429: "Too many requests wait.",
    500: "The answer failed.",
    503: "The model loads, or the server stops.",
}


def told(
    form: type[JsonForm] | None, errors: Container[int] = _FAILED, streams: bool = False
) -> dict[int | str, dict[str, Any]]:
    """Describe the responses of a route.

    Parameters
    ----------
    form: class, optional
        The form of a success; None for plain text.
    errors: container of int
        Statuses of errors beside those that every route has; by default those of routes that compute.
    streams: bool
        Whether the answer may be a stream of events.
    """
    texts = {**_WRONG, **{status: text for status, text in _FAILED.items() if status in errors}}
    described: dict[int | str, dict[str, Any]] = {
        status: {"model": Error, "description": text} for status, text in texts.items()
    }
    if form is not None:
        described[200] = {"model": form, **({"content": _STREAM} if streams else {})}
    return described


def describe_as(app: FastAPI, name: str) -> None:
    """Have ``/openapi.json`` say that there is one model, and no status 422, which FastAPI has for wrong requests."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            for operations in schema["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
            forms = schema["components"]["schemas"]
            for unused in ("HTTPValidationError", "ValidationError"):
                forms.pop(unused, None)
            for form in forms.values():
                model = form.get("properties", {}).get("model")
                for text in () if model is None else (model, *model.get("anyOf", ())):
                    if text.get("type") == "string":
                        text["enum"] = [name]
            app.openapi_schema = schema
        return app.openapi_schema

    app.__dict__["openapi"] = openapi
