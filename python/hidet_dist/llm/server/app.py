"""The application: its routes, and who may call them."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Callable, Coroutine
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.requests import Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hidet_dist.errors import RequestError
from hidet_dist.files import parse_json
from hidet_dist.limits import MOST_BODY_BYTES, MOST_BODY_VALUES
from hidet_dist.llm.server.answers import token_text
from hidet_dist.llm.server.bodies import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from hidet_dist.llm.server.chats import chat
from hidet_dist.llm.server.completions import complete
from hidet_dist.llm.server.embeddings import embed
from hidet_dist.llm.server.errors import add_handlers, error_object, response
from hidet_dist.llm.server.metrics import CONTENT_TYPE, Metrics
from hidet_dist.llm.server.prompts import chat_prompt, check_model, encode
from hidet_dist.llm.server.responses import (
    ChatCompletion,
    Completion,
    Detokenized,
    Embeddings,
    Health,
    Model,
    Models,
    Tokens,
    describe_as,
    told,
)
from hidet_dist.llm.server.service import Service

_OPEN_PATHS = ("/health",)
_MOST_TOLD = 2**20  # tokens in one answer, of about 10 MB


class _BoundedRequest(Request):
    """A request whose body is bounded in bytes, and in the levels of its JSON."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            parts: list[bytes] = []
            size = 0
            length = self.headers.get("content-length", "")
            if length.isdecimal():  # one that is too large is refused before it takes memory
                _check_size(int(length))
            async for part in self.stream():
                size += len(part)
                _check_size(size)
                parts.append(part)
            self._body = b"".join(parts)
        return self._body

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            try:
                self._json = parse_json(await self.body(), MOST_BODY_VALUES)
            except ValueError as error:
                raise HTTPException(400, f"The body is no JSON that can be read: {error}.") from error
        return self._json


def _check_size(nbytes: int) -> None:
    if nbytes > MOST_BODY_BYTES:
        raise HTTPException(413, f"The body has more than {MOST_BODY_BYTES} bytes.")


class _BoundedRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            return await handle(_BoundedRequest(request.scope, request.receive))

        return bounded


class _Gate:
    """Lets requests in that bring the API key; without a key, those that name a loopback host. It counts responses.

    A page in a browser can have a name that resolves to this machine's loopback address; its requests name that host.
    """

    def __init__(self, app: ASGIApp, service: Service, metrics: Metrics):
        self._app = app
        self._service = service
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                self._metrics.count(getattr(route, "path", "other"), message["status"])
            await send(message)

        refused = None if scope["path"] in _OPEN_PATHS else self._refusal(Headers(scope=scope))
        await (self._app if refused is None else refused)(scope, receive, counted)

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        key = self._service.api_key
        if key is None:
            host = headers.get("host", "")
            if is_loopback(host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host):
                return None
            message = "Without an API key, this server answers requests to localhost alone. Start it with one."
            return response(403, error_object(message, "invalid_request_error", None, "host_not_allowed"))
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode()):
            return None
        message = "The API key is missing or wrong. Give it as the header 'Authorization: Bearer KEY'."
        return response(401, error_object(message, "invalid_request_error", None, "invalid_api_key"))


def is_loopback(host: str) -> bool:
    """Whether a host, by name or address, is this machine's loopback interface."""
    host = host.strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def create_app(service: Service) -> FastAPI:
    """Return the application that serves a model."""
    app = FastAPI(
        title="hidet_dist",
        summary="Language models by OpenAI's interface.",
        version=version("hidet_dist"),
        docs_url=None,  # these pages would fetch scripts from the network
        redoc_url=None,
    )
    app.router.route_class = _BoundedRoute
    metrics = Metrics(service)
    service.observe = metrics.observe
    app.add_middleware(_Gate, service=service, metrics=metrics)
    add_handlers(app, service)
    describe_as(app, service.name)

    @app.get("/health", responses={200: {"model": Health}, 503: {"model": Health, "description": "They are not."}})
    async def health() -> JSONResponse:
        """Say whether requests are taken: not while the model loads, the server stops, or after a failure."""
        status = service.status
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    @app.get("/metrics", response_class=PlainTextResponse, responses=told(None, ()))
    async def show_metrics() -> Response:
        """Return metrics in the text format of Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    def model() -> dict[str, Any]:
        about = {"id": service.name, "object": "model", "created": service.created, "owned_by": "hidet_dist"}
        return about if service.engine is None else {**about, "max_model_len": service.engine.sizes.context}

    @app.get("/v1/models", responses=told(Models, ()))
    async def models() -> JSONResponse:
        """List the models."""
        return JSONResponse({"object": "list", "data": [model()]})

    @app.get("/v1/models/{name:path}", responses=told(Model, (404,)))
    async def one_model(name: str) -> JSONResponse:
        """Describe a model."""
        check_model(service, name)
        return JSONResponse(model())

    @app.post("/v1/completions", responses=told(Completion, streams=True))
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Go on with prompts."""
        return await complete(service, body, request)

    @app.post("/v1/chat/completions", responses=told(ChatCompletion, streams=True))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer the messages of a chat."""
        return await chat(service, body, request)

    @app.post("/v1/embeddings", responses=told(Embeddings))
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        """Return the vectors of texts."""
        return await embed(service, body, request)

    @app.post("/tokenize", responses=told(Tokens))
    async def tokenize(body: TokenizeBody) -> JSONResponse:
        """Return the tokens of a text, or of the messages of a chat."""
        return JSONResponse(await asyncio.to_thread(_tokens, service, body))

    @app.post("/detokenize", responses=told(Detokenized))
    async def detokenize(body: DetokenizeBody) -> JSONResponse:
        """Return the text of tokens."""
        return JSONResponse(await asyncio.to_thread(_text, service, body))

    return app


def _tokens(service: Service, body: TokenizeBody) -> dict[str, Any]:
    check_model(service, body.model)
    engine = service.loaded()
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give a prompt, or messages.", "prompt")
    if body.prompt is not None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        tokens = encode(engine, body.prompt, special, "prompt")
        if len(tokens) > _MOST_TOLD:
            raise RequestError(f"The prompt has {len(tokens)} tokens; at most {_MOST_TOLD} are told.", "prompt")
    else:
        assert body.messages is not None
        tokens = chat_prompt(service, body.messages, body.tools, body.add_generation_prompt, body.chat_template_kwargs)
    texts = [token_text(engine.tokenizer, token) for token in tokens]
    return {"count": len(tokens), "max_model_len": engine.sizes.context, "tokens": tokens, "token_strs": texts}


def _text(service: Service, body: DetokenizeBody) -> dict[str, Any]:
    check_model(service, body.model)
    tokenizer = service.loaded().tokenizer
    for token in body.tokens:
        if token >= tokenizer.vocabulary:
            raise RequestError(f"There is no token {token}; there are 0 to {tokenizer.vocabulary - 1}.", "tokens")
    return {"prompt": tokenizer.decode(body.tokens)}
