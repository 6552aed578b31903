"""``/v1/embeddings``: the vectors of texts, by an encoder."""

from __future__ import annotations

import asyncio
import base64
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from hidet_dist.errors import RequestError
from hidet_dist.llm.engine.embedding import EmbeddingEngine, Vectors
from hidet_dist.llm.server.bodies import EmbeddingBody
from hidet_dist.llm.server.prompts import check_model, encode
from hidet_dist.llm.server.service import Service


async def embed(service: Service, body: EmbeddingBody, http: HttpRequest) -> Response:
    """Answer a request for the vectors of texts.

    Raises
    ------
    RequestError, BusyError, EngineError, Unavailable, UnknownModel
        When it is wrong, or cannot be served.
    """
    check_model(service, body.model)
    engine = service.encoder()
    future, count = await asyncio.to_thread(_submit, engine, body)
    gone = asyncio.ensure_future(_until_gone(http))
    gone.add_done_callback(lambda task: None if task.cancelled() else future.cancel())
    try:
        vectors = await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if not future.cancelled():
            raise
        return Response(status_code=499)  # nobody reads it
    finally:
        gone.cancel()
        future.cancel()
    encoded = _base64 if body.encoding_format == "base64" else _numbers
    data = [
        {"object": "embedding", "index": number, "embedding": encoded(vector)} for number, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return JSONResponse({"object": "list", "data": data, "model": service.name, "usage": usage})


def _submit(engine: EmbeddingEngine, body: EmbeddingBody) -> tuple[Future[Vectors], int]:
    """Submit a request, and return what it will give, and the number of its tokens."""
    size = engine.pooling.size
    if body.dimensions not in (None, size):
        raise RequestError(f"dimensions is {body.dimensions}; this model's vectors have {size}.", "dimensions")
    texts = [encode(engine, text, True, "input") if isinstance(text, str) else text for text in body.texts()]
    return engine.submit(texts), sum(map(len, texts))


async def _until_gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _numbers(vector: NDArray[np.float32]) -> list[Any]:
    return list(map(float, vector))
