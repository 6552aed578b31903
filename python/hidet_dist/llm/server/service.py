"""What the routes of a server share: the engine once it is there, the tokenizer, the chat template."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hidet_dist.errors import RequestError
from hidet_dist.llm.chat import ChatTemplate
from hidet_dist.llm.engine import Engine, Stream
from hidet_dist.llm.engine.embedding import EmbeddingEngine


@dataclass
class Service:
    """A model that is served.

    Attributes
    ----------
    name: str
        The name that requests call it by.
    api_key: str, optional
        What requests must bring.
    engine: Engine or EmbeddingEngine, optional
        The engine; None while the model loads.
    template: ChatTemplate, optional
        The chat template, where the model has one.
    created: int
        When the service started, in seconds since 1970.
    send_seconds: float
        How long a client may take to read what it was sent, before it counts as gone.
    observe: function
        What is told of each request that ended.
    """

    name: str
    api_key: str | None = None
    engine: Engine | EmbeddingEngine | None = None
    template: ChatTemplate | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    send_seconds: float = 120.0
    observe: Callable[[Stream], None] = lambda stream: None

    @property
    def status(self) -> str:
        """``loading``, ``ready``, ``draining``, ``failed`` or ``closed``."""
        return self.engine.status if self.engine is not None else "loading"

    def start(self, engine: Engine | EmbeddingEngine) -> None:
        """Serve an engine from now on.

        Raises
        ------
        ConfigError
            When the chat template of its tokenizer is malformed.
        """
        tokenizer = engine.tokenizer
        if tokenizer.chat_template is not None:
            self.template = ChatTemplate(tokenizer.chat_template, tokenizer.special_texts)
        self.engine = engine

    def loaded(self) -> Engine | EmbeddingEngine:
        """Return the engine, of whatever kind.

        Raises
        ------
        Unavailable
            When the model still loads.
        """
        if self.engine is None:
            raise Unavailable(f"The model {self.name} is loading. Make the request again later.")
        return self.engine

    def ready(self) -> Engine:
        """Return the engine of a model that generates texts.

        Raises
        ------
        Unavailable
            When the model still loads.
        RequestError
            When it is an encoder.
        """
        engine = self.loaded()
        if not isinstance(engine, Engine):
            raise RequestError(f"{self.name} is an encoder, which generates no text: use /v1/embeddings.", "model")
        return engine

    def encoder(self) -> EmbeddingEngine:
        """Return the engine of an encoder.

        Raises
        ------
        Unavailable
            When the model still loads.
        RequestError
            When it generates texts.
        """
        engine = self.loaded()
        if not isinstance(engine, EmbeddingEngine):
            raise RequestError(f"{self.name} generates texts, and is no encoder: use /v1/completions.", "model")
        return engine


class Unavailable(Exception):
    """The service takes no requests now."""


class UnknownModel(Exception):
    """A request names another model."""
