"""The bodies of requests, with OpenAI's names and defaults, and what other servers add to them.

A parameter that is not known is refused: to leave it out silently would give another answer than the one asked for.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from hidet_dist.errors import RequestError
from hidet_dist.llm.engine import Grammar, Sampling
from hidet_dist.llm.engine.request import MOST_STOPS

_MOST_PROMPTS = 1024
_MOST_MESSAGES = 65536
_MOST_ENTRIES = 1024  # of a bias, or of metadata
_JSON_OBJECT = json.dumps({"type": "object"})


def _few_entries(value: Any) -> Any:
    """Refuse a large object before its entries are checked: each that is wrong takes a kilobyte."""
    if isinstance(value, dict) and len(value) > _MOST_ENTRIES:
        raise PydanticCustomError(
            "too_long", "It has {count} entries; give at most {most}", {"count": len(value), "most": _MOST_ENTRIES}
        )
    return value


# Of a list, the first entry that is wrong is told alone: of all of them, a body would make gigabytes.
Token = Annotated[int, Field(ge=0)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Texts = (
    str
    | Tokens
    | Annotated[list[str], Field(min_length=1, max_length=_MOST_PROMPTS, fail_fast=True)]
    | Annotated[list[Tokens], Field(min_length=1, max_length=_MOST_PROMPTS, fail_fast=True)]
)
"""One text or several, each as a text or as tokens."""


def _each(texts: Any) -> list[str | list[int]]:
    return [texts] if isinstance(texts, str) or isinstance(texts[0], int) else list(texts)


class Body(BaseModel):
    """A body of JSON. Values of other types are refused: false is no number, and "1" neither."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, value: Any) -> Any:
        """Leave one of the parameters that are not known: each of them would be an error of a kilobyte."""
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if isinstance(value, dict) and len(value) > len(known):
            unknown = next(name for name in value if name not in known)
            value = {**{name: entry for name, entry in value.items() if name in known}, unknown: None}
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _has_characters(cls, value: Any) -> Any:
        """Refuse halves of surrogate pairs, which are no characters: no tokenizer takes them."""
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ValueError("it has a half of a surrogate pair, which is no character") from error
        return value


class JsonSchema(Body):
    """A schema that an answer must follow."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form that an answer must have; ``regex`` and ``lark`` go beyond OpenAI's interface."""

    type: Literal["text", "json_object", "json_schema", "regex", "lark"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    lark: str | None = None

    def grammar(self) -> Grammar | None:
        """Return what the answer must match.

        Raises
        ------
        RequestError
            When the type asks for a field that is missing.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Grammar("json_schema", _JSON_OBJECT)
        value = getattr(self, self.type)
        if value is None:
            raise RequestError(
                f"response_format has the type {self.type}, and no {self.type}.", f"response_format.{self.type}"
            )
        return Grammar(self.type, json.dumps(value.schema_) if isinstance(value, JsonSchema) else value)


class StreamOptions(Body):
    """What a stream tells beside the answer."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False  # beyond OpenAI's interface, as load generators ask for it


class GenerationBody(Body):
    """What completions and chats have in common."""

    model: str
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_few_entries)] = None
    max_tokens: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    response_format: ResponseFormat | None = None
    user: str | None = None
    # Beyond OpenAI's interface, by the names that other servers use.
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    stop_token_ids: Annotated[list[Token], Field(fail_fast=True)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def sampling(self) -> Sampling:
        """Return how tokens are chosen.

        Raises
        ------
        RequestError
            When the bias names no token.
        """
        try:
            bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        except ValueError:
            raise RequestError("logit_bias has a key that is no token: give numbers, as texts.", "logit_bias") from None
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            bias=bias,
            seed=self.seed,
        )

    def tells_usage(self) -> bool:
        """Whether a stream tells the usage at its end."""
        return self.stream_options is not None and self.stream_options.include_usage

    def tells_usage_always(self) -> bool:
        """Whether each event of a stream tells the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def stops(self) -> tuple[str, ...]:
        """Return the texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def grammar(self) -> Grammar | None:
        """Return what an answer must match."""
        return self.response_format.grammar() if self.response_format is not None else None


class CompletionBody(GenerationBody):
    """The body of ``/v1/completions``."""

    prompt: Texts
    best_of: int | None = Field(None, ge=1)
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=128)
    max_tokens: int | None = Field(16, ge=0)
    suffix: Literal[""] | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each as a text or as tokens."""
        return _each(self.prompt)


class ChatBody(GenerationBody):
    """The body of ``/v1/chat/completions``."""

    messages: Objects = Field(min_length=1, max_length=_MOST_MESSAGES)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    max_completion_tokens: int | None = Field(None, ge=0)
    tools: Objects | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_few_entries)] = None
    store: Literal[False] | None = None
    # Beyond OpenAI's interface, by the names that other servers use.
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingBody(Body):
    """The body of ``/v1/embeddings``."""

    model: str
    input: Texts
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None

    def texts(self) -> list[str | list[int]]:
        """Return the texts, each as a text or as tokens."""
        return _each(self.input)


class TokenizeBody(Body):
    """The body of ``/tokenize``: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = Field(None, min_length=1, max_length=_MOST_MESSAGES)
    tools: Objects | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: Annotated[list[Token], Field(fail_fast=True)]
