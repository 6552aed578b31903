"""A server's life: it listens while the model loads, serves, drains at a signal, and ends."""

from __future__ import annotations

import logging
import math
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn

from hidet_dist.errors import ConfigError, HidetDistError
from hidet_dist.llm.engine import Engine
from hidet_dist.llm.engine.embedding import EmbeddingEngine
from hidet_dist.llm.server.app import create_app, is_loopback
from hidet_dist.llm.server.protocol import bounded_protocol
from hidet_dist.llm.server.service import Service

_BACKLOG = 2048
_log = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class ServerOptions:
    """Where a server listens, and how it ends.

    Attributes
    ----------
    host, port: str, int
        The address; port 0 takes a free one.
    api_key: str, optional
        What requests must bring. It may be left out on loopback addresses alone.
    drain_seconds: float
        How long requests that run may take after a signal to stop.
    send_seconds: float
        How long a client may take to read what it was sent.
    receive_seconds: float
        How long a request may take to arrive.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    drain_seconds: float = 30.0
    send_seconds: float = 120.0
    receive_seconds: float = 60.0

    def check(self) -> None:
        """Check the values.

        Raises
        ------
        ConfigError
            When one is wrong, or others than this machine could call the server without a key.
        """
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port is {self.port}; give 0 to 65535.")
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("The API key is empty.")
        if self.api_key is None and not is_loopback(self.host):
            raise ConfigError(
                f"{self.host} is no loopback address, so that other machines can call the server: give an API key, "
                "or listen on 127.0.0.1."
            )
        for name in ("drain_seconds", "send_seconds", "receive_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; give seconds from 0 on.")


class _DrainingServer(uvicorn.Server):
    """The HTTP server. At the first signal it drains, and goes on to answer: clients hear why they are refused."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float):
        super().__init__(config)
        self._service = service
        self._drain_seconds = drain_seconds
        self._draining = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal; stop at once at the next one."""
        if self._draining or self._service.engine is None:
            self.should_exit = True
            self.force_exit = self._draining
            return
        self._draining = True
        _log.info("%s: running requests may take %g s more", signal.Signals(sig).name, self._drain_seconds)
        threading.Thread(target=self._drain, args=(self._service.engine,), daemon=True).start()

    def _drain(self, engine: Engine | EmbeddingEngine) -> None:
        engine.drain(self._drain_seconds)
        self.should_exit = True


def serve(
    name: str,
    load: Callable[[Callable[[BaseException], None]], Engine | EmbeddingEngine],
    options: ServerOptions,
    on_listening: Callable[[str, int], None] | None = None,
) -> int:
    """Serve a model until a signal to stop, or until it fails.

    Parameters
    ----------
    name: str
        The name that requests call the model by.
    load: function
        Loads the model, and returns its engine, which is to call the function that ``load`` is given when the model
        fails. It runs in another thread, while the server answers that the model loads.
    options: ServerOptions
        Where to listen, and how to end.
    on_listening: function, optional
        What is told of the address and the port once the server listens.

    Returns
    -------
    int
        The exit status: 0, or 1 when the model could not be loaded, or failed.

    Raises
    ------
    ConfigError
        When an option is wrong, or the address cannot be listened on.
    """
    options.check()
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        listener = socket.create_server((options.host, options.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"Port {options.port} of {options.host} cannot be listened on: {error}.") from error
    service = Service(name, options.api_key, send_seconds=options.send_seconds)
    config = uvicorn.Config(
        create_app(service),
        access_log=False,
        lifespan="off",
        server_header=False,
        http=bounded_protocol(options.receive_seconds),
        ws="none",
        timeout_graceful_shutdown=math.ceil(options.drain_seconds) + 1,
    )
    server = _DrainingServer(config, service, options.drain_seconds)
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        _log.error("The model failed: %s", error)
        server.should_exit = True

    def start() -> None:
        try:
            engine = load(failed)
            try:
                service.start(engine)
            except BaseException:
                engine.close()
                raise
        except BaseException as error:
            failures.append(error)
            said = str(error) if isinstance(error, HidetDistError) else traceback.format_exc()
            _log.error("The model could not be loaded: %s", said)
            server.should_exit = True
        else:
            _log.info("%s is ready", name)

    with listener:
        if on_listening is not None:
            on_listening(options.host, listener.getsockname()[1])
        loading = threading.Thread(target=start, name="hidet_dist loading", daemon=True)
        loading.start()
        server.run(sockets=[listener])
    if service.engine is not None:
        service.engine.close()
    return 1 if failures else 0
