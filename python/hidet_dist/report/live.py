"""A server of a report on loopback, whose page pins weights and searches the plan again.

Only the user's browser has access:

* The server binds to 127.0.0.1, and its address contains a random token.
* It refuses requests with another host name (DNS rebinding) or from another page (the Origin and Sec-Fetch-Site
  headers, Fetch Metadata Request Headers).
* The page cannot connect elsewhere (its Content Security Policy).
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hidet_dist.errors import HidetDistError
from hidet_dist.files import parse_json
from hidet_dist.report.data import Report
from hidet_dist.report.html import render
from hidet_dist.report.pack import pack
from hidet_dist.search.limits import Clock

HOST = "127.0.0.1"
_MOST_BODY_BYTES = 2**20
_TOKEN_BYTES = 16
_REQUEST_SECONDS = 30  # the time limit for receiving a request

_OWN_SITES = (None, "none", "same-origin")  # no browser, the user's address bar, or the page itself
_LOOK_SECONDS = 0.2  # between two looks at whether a client still waits for its turn

Search = Callable[[Mapping[str, str], Clock], Report]
"""A function that searches a plan with pins of weights (specs by name), and returns its report. Its clock, in seconds,
jumps to infinity once nobody waits for the report: a search with a time limit then ends."""


class _ReportServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, report: Report, search: Search):
        super().__init__((HOST, 0), _Handler)
        self.page = render(report, live=True).encode()
        self.search = search
        self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        self.one_at_a_time = threading.Lock()
        self.ending = threading.Event()

    def end(self) -> None:
        """Serve no longer. A search ends first: native code must not outlast the interpreter."""
        self.ending.set()
        self.shutdown()
        self.server_close()
        with self.one_at_a_time:
            pass

    @property
    def names(self) -> tuple[str, str]:
        """The Host headers of requests for this server."""
        return f"{HOST}:{self.server_port}", f"localhost:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: _ReportServer
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        """Send the page."""
        if self._is_allowed("/"):
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)

    def do_POST(self) -> None:
        """Search a plan with the pins in the body."""
        if not self._is_allowed("/plan"):
            return
        try:
            length = int(self.headers.get("Content-Length", ""))
            if not 0 <= length <= _MOST_BODY_BYTES:
                raise ValueError(f"a body has at most {_MOST_BODY_BYTES} bytes")
            pins = parse_json(self.rfile.read(length))
            if not isinstance(pins, dict) or not all(isinstance(spec, str) for spec in pins.values()):
                raise ValueError("pins map names to specs")
        except ValueError as error:
            self._send_json(HTTPStatus.BAD_REQUEST, {"error": str(error)})
            return
        while not self.server.one_at_a_time.acquire(timeout=_LOOK_SECONDS):
            if not self._is_awaited():
                return
        try:
            status, answer = self._planned(pins)
        finally:
            self.server.one_at_a_time.release()
        if self._is_awaited():
            self._send_json(status, answer)

    def _planned(self, pins: Mapping[str, str]) -> tuple[HTTPStatus, dict[str, Any]]:
        """Search a plan with pins, as long as the client waits for it."""
        try:
            return HTTPStatus.OK, {"report": pack(self.server.search(pins, self._clock))}
        except HidetDistError as error:
            return HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)}

    def _clock(self) -> float:
        return time.perf_counter() if self._is_awaited() else math.inf

    def _is_awaited(self) -> bool:
        """Whether the client still waits for the answer, and the server goes on."""
        if self.server.ending.is_set():
            return False
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        return not poll.poll(0)

    def _is_allowed(self, path: str) -> bool:
        """Whether the request is for this server, from its page, and has the token; otherwise refuse it."""
        origin = self.headers.get("Origin")
        has_site = self.headers.get("Sec-Fetch-Site") in _OWN_SITES
        has_host = self.headers.get("Host") in self.server.names
        has_origin = origin is None or origin in [f"http://{name}" for name in self.server.names]
        has_token = hmac.compare_digest(self.path.encode(), f"/{self.server.token}{path}".encode())
        if not (has_host and has_origin and has_site and has_token):
            self._send(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"There is nothing here.\n")
            return False
        return True

    def _send_json(self, status: HTTPStatus, value: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),  # a referrer would reveal the token
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the address contains the token."""


@contextmanager
def serving(report: Report, search: Search) -> Iterator[str]:
    """Serve a report until the block ends; yield its address."""
    server = _ReportServer(report, search)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}/{server.token}/"
    finally:
        server.end()
        thread.join()
