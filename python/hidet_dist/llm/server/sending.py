"""Answers on their way to a client that may read slowly, or be gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hidet_dist.llm.engine import Stream
from hidet_dist.llm.server.errors import describe
from hidet_dist.llm.server.service import Service

DONE = "[DONE]"


@contextmanager
def watched(service: Service, receive: Receive, streams: list[Stream]) -> Iterator[None]:
    """Cancel requests when the client is gone, or when the block ends before they did."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        _cancel(streams)

    gone = asyncio.get_running_loop().create_task(until_gone())
    try:
        yield
    finally:
        gone.cancel()
        _cancel(streams)
        for stream in streams:
            service.observe(stream)


def _cancel(streams: list[Stream]) -> None:
    for stream in streams:
        if not stream.ended:
            stream.cancel()


class EventResponse(Response):
    """A stream of server-sent events.

    Parameters
    ----------
    service: Service
        What is served. It says how long the client may take to read what it was sent.
    streams: list of Stream
        The requests that the events are of. They are cancelled when the client is gone, or does not read.
    chunks: async iterator of str
        What to send: each chunk is one or several events.
    """

    media_type = "text/event-stream"

    def __init__(self, service: Service, streams: list[Stream], chunks: AsyncIterator[str]):
        self.background = None
        self.body = b""
        self.status_code = 200
        self.init_headers({"cache-control": "no-store"})
        self.raw_headers = [(key, value) for key, value in self.raw_headers if key != b"content-length"]
        self._streams = streams
        self._chunks = chunks
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""

        async def give(message: dict[str, Any]) -> None:
            await asyncio.wait_for(send(message), self._service.send_seconds)

        with watched(self._service, receive, self._streams):
            try:
                await give({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                try:
                    async for chunk in self._chunks:
                        await give(_body(chunk))
                except (OSError, asyncio.TimeoutError):
                    raise
                except Exception as error:
                    await give(_body(event(describe(error, self._service.status)[1])))
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except (OSError, asyncio.TimeoutError):
                return  # the client is gone, or does not read


def _body(text: str) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}


def event(data: dict[str, Any] | str) -> str:
    """Return a server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"
