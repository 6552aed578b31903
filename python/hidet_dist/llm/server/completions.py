"""``/v1/completions``: prompts as texts or tokens, with the echo and log-probabilities that evaluations ask for."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from hidet_dist.errors import RequestError
from hidet_dist.llm.engine import Engine, Request, Stream
from hidet_dist.llm.server.answers import AnswerChoice, CompletionLogprobs, Usage, finish_reason, gather
from hidet_dist.llm.server.bodies import CompletionBody
from hidet_dist.llm.server.prompts import check_model, encode
from hidet_dist.llm.server.sending import DONE, EventResponse, event, watched
from hidet_dist.llm.server.service import Service


@dataclass
class _Submitted:
    """A prompt that was submitted: what is echoed of it, and its request."""

    echo: str
    stream: Stream


async def complete(service: Service, body: CompletionBody, http: HttpRequest) -> Response:
    """Answer a request for completions.

    Raises
    ------
    RequestError, BusyError, EngineError, Unavailable, UnknownModel
        When it is wrong, or cannot be served.
    """
    check_model(service, body.model)
    engine = service.ready()
    asked = await asyncio.to_thread(_submit, engine, body)
    streams = [each.stream for each in asked]
    answer = _Completions(service, engine, body, asked)
    if body.stream:
        return EventResponse(service, streams, answer.chunks())
    with watched(service, http.receive, streams):
        return JSONResponse(await answer.whole())


def _submit(engine: Engine, body: CompletionBody) -> list[_Submitted]:
    """Submit all prompts, or none of them."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError("best_of differs from n; only as many answers are made as are returned.", "best_of")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is for streams alone.", "stream_options")
    requests: list[tuple[str, Request]] = []
    for prompt in body.prompts():
        tokens = encode(engine, prompt, True, "prompt") if isinstance(prompt, str) else prompt
        echo = (prompt if isinstance(prompt, str) else _text_of(engine, prompt)) if body.echo else ""
        request = Request(
            prompt=tuple(tokens),
            max_tokens=body.max_tokens,
            choices=body.n or 1,
            sampling=body.sampling(),
            stop=body.stops(),
            stop_tokens=frozenset(body.stop_token_ids or ()),
            ignore_end=body.ignore_eos,
            special=not body.skip_special_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
            grammar=body.grammar(),
        )
        request.check(engine.sizes)
        requests.append((echo, request))
    asked: list[_Submitted] = []
    try:
        for echo, request in requests:
            asked.append(_Submitted(echo, engine.submit(request)))
    except BaseException:
        for each in asked:
            each.stream.cancel()
        raise
    return asked


def _text_of(engine: Engine, tokens: list[int]) -> str:
    known = [token for token in tokens if token < engine.tokenizer.vocabulary]
    return b"".join(map(engine.tokenizer.piece, known)).decode("utf-8", "replace")


class _Completions:
    """The completions of a request. The answers of prompt p are choices ``p * n`` to ``p * n + n - 1``."""

    def __init__(self, service: Service, engine: Engine, body: CompletionBody, asked: list[_Submitted]):
        self._engine = engine
        self._body = body
        self._asked = asked
        self._usage = Usage()
        self._logprobs = {
            (place, choice): CompletionLogprobs(engine.tokenizer)
            for place, each in enumerate(asked)
            for choice in range(each.stream.request.choices)
        }
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
        }

    async def whole(self) -> dict[str, Any]:
        """Wait for all answers, and return the body of the response."""
        all_events = await asyncio.gather(*(_events(each.stream) for each in self._asked))
        choices = []
        for place, (asked, events) in enumerate(zip(self._asked, all_events, strict=True)):
            for number, choice in sorted(gather(events).items()):
                choices.append(self._choice(place, number, choice, self._echo(asked)))
        return {**self._head, "choices": choices, "usage": self._used()}

    async def chunks(self) -> AsyncIterator[str]:
        """Give the events of the stream."""
        usage = self._body.tells_usage()
        begun: set[tuple[int, int]] = set()
        async for place, events in _merged([each.stream for each in self._asked]):
            text = ""
            for number, choice in gather(events).items():
                first = (place, number) not in begun
                begun.add((place, number))
                before = self._echo(self._asked[place]) if first else AnswerChoice()
                part = self._choice(place, number, choice, before)
                text += event({**self._head, "choices": [part], **self._usage_so_far(usage)})
            yield text
        if usage:
            yield event({**self._head, "choices": [], "usage": self._used()})
        yield event(DONE)

    def _used(self) -> dict[str, Any]:
        used = Usage(generated=self._usage.generated)
        for asked in self._asked:
            used.add(asked.stream)
        return used.object()

    def _usage_so_far(self, at_end: bool) -> dict[str, Any]:
        """Return what an event before the last one tells of the usage."""
        return {"usage": self._used()} if self._body.tells_usage_always() else {"usage": None} if at_end else {}

    def _echo(self, asked: _Submitted) -> AnswerChoice:
        return AnswerChoice(asked.echo, list(asked.stream.prompt or ())) if self._body.echo else AnswerChoice()

    def _choice(self, place: int, number: int, choice: AnswerChoice, before: AnswerChoice) -> dict[str, Any]:
        self._usage.generated += len(choice.tokens)
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._logprobs[place, number].object([*before.tokens, *choice.tokens])
        return {
            "index": place * (self._body.n or 1) + number,
            "text": before.text + choice.text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(choice.finish),
        }


async def _events(stream: Stream) -> list[Any]:
    return [each async for each in stream]


async def _merged(streams: list[Stream]) -> AsyncIterator[tuple[int, list[Any]]]:
    """Give the events of several streams as they come, with the stream's number."""
    if len(streams) == 1:
        async for events in streams[0].batches():
            yield 0, events
        return
    iterators = {number: stream.batches() for number, stream in enumerate(streams)}
    tasks = {asyncio.ensure_future(anext(iterator)): number for number, iterator in iterators.items()}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda each: tasks[each]):
                number = tasks.pop(task)
                try:
                    events = task.result()
                except StopAsyncIteration:
                    continue
                yield number, events
                tasks[asyncio.ensure_future(anext(iterators[number]))] = number
    finally:
        for task in tasks:
            task.cancel()
