"""HTTP/1.1 with bounds of how large a request's head may be, and how long a request may take to arrive.

uvicorn has neither: a client that sends a byte a minute keeps its connection, and headers without end fill the memory.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from hidet_dist.limits import MOST_HEAD_BYTES
from hidet_dist.llm.server.errors import error_object


def bounded_protocol(receive_seconds: float) -> type[asyncio.Protocol]:
    """Return the protocol of connections whose requests may each take so many seconds to arrive."""
    return type("BoundedProtocol", (_BoundedProtocol,), {"receive_seconds": receive_seconds})


_STEPS = 60
"""The steps in which the time of a request is counted. Bytes that have come are read between them."""


class _BoundedProtocol(HttpToolsProtocol):
    """A connection.

    A request is in its head, then in its body, and then it has arrived. While one is answered, the next one may wait
    with its bytes unread, and no time counts. Nor does time in which this process has no processor, or is stopped: each
    step counts as long as it was meant to last, however late it ends.
    """

    receive_seconds: float

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._part = "head"
        self._unused = 0  # bytes that came since the head began, or since the last ones of the body
        self._has_bytes = False
        self._timer: asyncio.TimerHandle | None = None
        self._steps = 0  # that have passed since the request began

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._has_bytes = True
        self._unused += len(data)
        super().data_received(data)
        if self._part and self._unused > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"The headers have more than {MOST_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part = "head"
        self._unused = 0
        self._start()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part == "head":  # others are behind the body, and mean nothing here
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._part = "body"
        self._unused = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unused = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._part = ""
        self._stop()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _start(self) -> None:
        self._stop()
        self._steps = 0
        self._wait()

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self.receive_seconds / _STEPS, self._pass)

    def _pass(self) -> None:
        """Count a step, unless the request's bytes wait here to be read."""
        self._steps += not self.flow.read_paused
        if self._steps < _STEPS:
            self._wait()
        else:
            self._late()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self.pipeline or (self._part == "head" and is_answering):
            self._start()
        elif self._has_bytes:
            self._refuse(408, f"The request did not arrive within {self.receive_seconds:g} s.")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """End the connection, with an error unless an answer has begun."""
        self._stop()
        is_answering = self.cycle is not None and not self.cycle.response_complete
        is_open = not self.cycle.response_started if self._part == "body" else not is_answering
        if is_open and not self.pipeline:
            body = json.dumps(error_object(message, "invalid_request_error")).encode()
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()
