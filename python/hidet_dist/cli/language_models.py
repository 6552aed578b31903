"""``hidet-dist serve``, ``generate`` and ``chat``: language models over ranks of this machine."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hidet_dist.cli.quiet import quiet
from hidet_dist.errors import ConfigError, EngineError
from hidet_dist.llm.chat import ChatTemplate
from hidet_dist.llm.loading import ONE_HOST, Hosts, LanguageModel, join, load, name_of
from hidet_dist.llm.options import LoadOptions
from hidet_dist.llm.stored import StoredModel

if TYPE_CHECKING:
    from hidet_dist.llm.engine import Engine
    from hidet_dist.llm.engine.embedding import EmbeddingEngine

KEY_VARIABLE = "HIDET_DIST_API_KEY"
"""The environment variable with the key that requests to the server must bring. Arguments end up in process lists."""


Choosing = Mapping[str, Any]
"""How tokens are chosen: the fields of :class:`hidet_dist.llm.engine.Sampling` that the command has options for."""


@dataclass(frozen=True)
class LoadingOptions:
    """The options of the command line that decide how a model is loaded.

    Attributes
    ----------
    model: Path
        The checkpoint, or the folder of a model that was built.
    cache: Path, optional
        The folder of models that were built.
    given: mapping
        The fields of :class:`LoadOptions`; None for those that were left out.
    machine: str, optional
        The machine that costs are predicted for.
    hosts: Hosts
        The hosts of the ranks. ``given`` has the ranks of each.
    """

    model: Path
    cache: Path | None
    given: Mapping[str, Any]
    machine: str | None = None
    hosts: Hosts = ONE_HOST

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of :func:`hidet_dist.llm.load` that were given."""
        options = {name: value for name, value in self.given.items() if value is not None}
        if "ranks" in options:
            options["ranks"] *= self.hosts.count
        elif self.hosts.count > 1 and not StoredModel.is_in(self.model):
            options["ranks"] = max(self.hosts.count, self.given.get("stages") or 1)
        return options if self.machine is None else {**options, "distributed": {"machine": self.machine}}

    def load(self) -> LanguageModel:
        """Load the model, which is built first if need be.

        Raises
        ------
        ConfigError
            When a library is missing.
        HidetDistError
            As :func:`hidet_dist.llm.load`.
        """
        quiet()
        try:
            return load(self.model, cache=self.cache, hosts=self.hosts, **self.options())
        except ImportError as error:
            raise ConfigError(f"Language models need {error.name}: install hidet_dist[llm].") from error


@dataclass
class _ChatSession:
    """A loaded model, and what was said so far."""

    engine: Engine
    template: ChatTemplate | None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, tokens: list[int], sampling: Choosing, max_tokens: int | None) -> str:
        """Generate an answer to a prompt, print it as it comes, and its figures on stderr."""
        from hidet_dist.llm.engine import Request, Sampling

        begin = time.monotonic()
        stream = self.engine.submit(Request(tuple(tokens), max_tokens, sampling=Sampling(**sampling)))
        text, count = "", 0
        try:
            for event in stream:
                print(event.text, end="", flush=True)
                text += event.text
                count += event.token is not None
        except KeyboardInterrupt:
            stream.cancel()
        end = time.monotonic()
        print(flush=True)
        if stream.first:
            rate = f", then {(count - 1) / (end - stream.first):.1f} tokens/s" if count > 1 else ""
            said = f"{count} tokens; the first after {stream.first - begin:.2f} s{rate}"
            print(f"[{len(tokens)} tokens in the prompt; {said}]", file=sys.stderr, flush=True)
        return text

    def ask(self, message: str, sampling: Choosing, max_tokens: int | None) -> None:
        """Answer a message, after all that was said before."""
        assert self.template is not None
        self.messages.append({"role": "user", "content": message})
        prompt = self.template.render(self.messages)
        text = self.answer(self.engine.tokenizer.encode(prompt, special=False), sampling, max_tokens)
        self.messages.append({"role": "assistant", "content": text})


@contextmanager
def _opened(loading: LoadingOptions) -> Iterator[_ChatSession]:
    model = loading.load()
    tokenizer = model.tokenizer
    try:
        if model.pooling is not None:
            raise ConfigError(f"{loading.model} is an encoder, which generates no text; `hidet-dist serve` serves it.")
        template = tokenizer.chat_template
        made = ChatTemplate(template, tokenizer.special_texts) if template is not None else None
        from hidet_dist.llm.engine import Engine  # it was imported while the model was loaded

        engine = Engine(model, tokenizer)
    except BaseException:
        model.close()
        raise
    with engine:
        yield _ChatSession(engine, made)


def generate(loading: LoadingOptions, prompt: str, raw: bool, sampling: Choosing, max_tokens: int | None) -> None:
    """Answer a prompt, and print the tokens as they come.

    A model that has a chat template gets the prompt as a user's message, unless ``raw`` is asked for.

    Raises
    ------
    HidetDistError
        As :func:`hidet_dist.llm.load`, and when the request is wrong or the model fails.
    """
    with _opened(loading) as session:
        if session.template is not None and not raw:
            session.ask(prompt, sampling, max_tokens)
        else:
            session.answer(session.engine.tokenizer.encode(prompt), sampling, max_tokens)


def chat(loading: LoadingOptions, system: str | None, sampling: Choosing, max_tokens: int | None) -> None:
    """Answer lines of the standard input, until it ends.

    Raises
    ------
    ConfigError
        When the model has no chat template.
    HidetDistError
        As :func:`generate`.
    """
    with _opened(loading) as session:
        if session.template is None:
            raise ConfigError(f"{loading.model} has no chat template; `hidet-dist generate` completes texts.")
        if system is not None:
            session.messages.append({"role": "system", "content": system})
        while (line := _line()) is not None:
            if line.strip():
                session.ask(line, sampling, max_tokens)


def _line() -> str | None:
    """Read a line; None at the end of the standard input."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def join_hosts(loading: LoadingOptions) -> int:
    """Be the ranks of another host than that of the server, and return the exit status.

    Raises
    ------
    HidetDistError
        As :func:`hidet_dist.llm.loading.join`.
    """
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        return join(loading.model, loading.hosts, cache=loading.cache, **loading.options())
    except ImportError as error:
        raise ConfigError(f"Language models need {error.name}: install hidet_dist[llm].") from error
    except KeyboardInterrupt:
        return 1


def _interrupted(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt


def serve(loading: LoadingOptions, name: str | None, host: str, port: int, drain_seconds: float, queue: int) -> int:
    """Serve a model over HTTP until a signal to stop, and return the exit status.

    On another host than the first one, its ranks follow those of the first host, until the server there ends.

    Raises
    ------
    ConfigError
        When an option is wrong, or the address cannot be listened on.
    """
    try:
        if loading.hosts.number:
            return join_hosts(loading)
        from hidet_dist.llm.server.run import ServerOptions
        from hidet_dist.llm.server.run import serve as run
    except ImportError as error:
        raise ConfigError(f"The server needs {error.name}: install hidet_dist[llm,serve].") from error
    from hidet_dist.llm.engine import Engine, EngineOptions
    from hidet_dist.llm.engine.embedding import EmbeddingEngine

    options = EngineOptions(queue=queue)
    options.check()
    checked = LoadOptions(**loading.options())
    checked.check()
    loading.hosts.place_of(checked)

    def start(failed: Callable[[BaseException], None]) -> Engine | EmbeddingEngine:
        model = loading.load()
        model.on_death = lambda rank, status: failed(EngineError(f"Rank {rank} ended with status {status}."))
        if model.pooling is not None:
            return EmbeddingEngine(model, model.tokenizer, model.pooling, options, failed)
        return Engine(model, model.tokenizer, options, failed)

    def listening(host: str, port: int) -> None:
        address = f"[{host}]" if ":" in host else host
        print(f"Listening on http://{address}:{port}", flush=True)

    settings = ServerOptions(host, port, os.environ.get(KEY_VARIABLE), drain_seconds)
    return run(name or name_of(loading.model), start, settings, listening)
