"""``/v1/chat/completions``: the messages of a chat, answered."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from hidet_dist.errors import RequestError
from hidet_dist.llm.engine import Engine, Request, Stream
from hidet_dist.llm.server.answers import AnswerChoice, Usage, chat_logprobs, finish_reason, gather
from hidet_dist.llm.server.bodies import ChatBody
from hidet_dist.llm.server.prompts import chat_prompt, check_model
from hidet_dist.llm.server.sending import DONE, EventResponse, event, watched
from hidet_dist.llm.server.service import Service


async def chat(service: Service, body: ChatBody, http: HttpRequest) -> Response:
    """Answer a request for the next message of a chat.

    Raises
    ------
    RequestError, BusyError, EngineError, Unavailable, UnknownModel
        When it is wrong, or cannot be served.
    """
    check_model(service, body.model)
    engine = service.ready()
    stream = await asyncio.to_thread(_submit, service, engine, body)
    answer = _Chat(service, engine, body, stream)
    if body.stream:
        return EventResponse(service, [stream], answer.chunks())
    with watched(service, http.receive, [stream]):
        return JSONResponse(await answer.whole())


def _submit(service: Service, engine: Engine, body: ChatBody) -> Stream:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is for streams alone.", "stream_options")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
    limits = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(limits) > 1:
        raise RequestError("max_tokens and max_completion_tokens differ; give one of them.", "max_tokens")
    tools = None if body.tool_choice == "none" else body.tools
    prompt = chat_prompt(service, body.messages, tools, body.add_generation_prompt, body.chat_template_kwargs)
    return engine.submit(
        Request(
            prompt=tuple(prompt),
            max_tokens=next(iter(limits), None),
            choices=body.n or 1,
            sampling=body.sampling(),
            stop=body.stops(),
            stop_tokens=frozenset(body.stop_token_ids or ()),
            ignore_end=body.ignore_eos,
            special=not body.skip_special_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=body.grammar(),
        )
    )


class _Chat:
    """The answers of a request."""

    def __init__(self, service: Service, engine: Engine, body: ChatBody, stream: Stream):
        self._engine = engine
        self._body = body
        self._stream = stream
        self._usage = Usage()
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = service.name

    async def whole(self) -> dict[str, Any]:
        """Wait for all answers, and return the body of the response."""
        choices = gather([each async for each in self._stream])
        told = []
        for number, choice in sorted(choices.items()):
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            told.append({"index": number, "message": message, **self._end(choice)})
        return {**self._head("chat.completion"), "choices": told, "usage": self._used()}

    async def chunks(self) -> AsyncIterator[str]:
        """Give the events of the stream."""
        usage = self._body.tells_usage()
        head: dict[str, Any] = {**self._head("chat.completion.chunk"), **({"usage": None} if usage else {})}
        begun: set[int] = set()
        async for events in self._stream.batches():
            text = ""
            for number, choice in gather(events).items():
                if number not in begun:
                    begun.add(number)
                    delta: dict[str, Any] = {"role": "assistant", "content": ""}
                    text += event({**head, "choices": [{"index": number, "delta": delta, **self._end(AnswerChoice())}]})
                delta = {"content": choice.text} if choice.text or choice.tokens else {}
                choices = [{"index": number, "delta": delta, **self._end(choice)}]
                told = {"usage": self._used()} if self._body.tells_usage_always() else {}
                text += event({**head, "choices": choices, **told})
            yield text
        if usage:
            yield event({**head, "choices": [], "usage": self._used()})
        yield event(DONE)

    def _end(self, choice: AnswerChoice) -> dict[str, Any]:
        """Return the log-probabilities of tokens, and why an answer ended."""
        self._usage.generated += len(choice.tokens)
        wanted = self._body.logprobs and choice.tokens
        logprobs = chat_logprobs(self._engine.tokenizer, choice.tokens) if wanted else None
        return {"logprobs": logprobs, "finish_reason": finish_reason(choice.finish)}

    def _used(self) -> dict[str, Any]:
        used = Usage(generated=self._usage.generated)
        used.add(self._stream)
        return used.object()

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}
