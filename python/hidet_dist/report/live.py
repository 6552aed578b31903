"""A server of a report on loopback, whose page pins weights and searches the plan again.

Only the user's browser has access:

* The server binds to 127.0.0.1, and its address contains a random token.
* It refuses requests with another host name (DNS rebinding) or from another page (the Origin header).
* The page cannot connect elsewhere (its Content Security Policy).
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
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

HOST = "127.0.0.1"
_MOST_BODY_BYTES = 2**20
_TOKEN_BYTES = 16
_REQUEST_SECONDS = 30  # the time limit for receiving a request

Search = Callable[[Mapping[str, str]], Report]
"""A function that searches a plan with pins of weights (specs by name) and returns its report."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, report: Report, search: Search):
        super().__init__((HOST, 0), _Handler)
        self.page = render(report, live=True).encode()
        self.search = search
        self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        self.one_at_a_time = threading.Lock()

    @property
    def names(self) -> tuple[str, str]:
        """The Host headers of requests for this server."""
        return f"{HOST}:{self.server_port}", f"localhost:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: _Server
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
        try:
            with self.server.one_at_a_time:
                report = self.server.search(pins)
        except HidetDistError as error:
            self._send_json(HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)})
            return
        self._send_json(HTTPStatus.OK, {"report": pack(report)})

    def _is_allowed(self, path: str) -> bool:
        """Whether the request is for this server, from its page, and has the token; otherwise refuse it."""
        origin = self.headers.get("Origin")
        has_host = self.headers.get("Host") in self.server.names
        has_origin = origin is None or origin in [f"http://{name}" for name in self.server.names]
        has_token = hmac.compare_digest(self.path.encode(), f"/{self.server.token}{path}".encode())
        if not (has_host and has_origin and has_token):
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
    server = _Server(report, search)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}/{server.token}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
