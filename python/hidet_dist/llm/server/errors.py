"""Errors as OpenAI's interface has them: an object with a message, a type, a parameter and a code, and a status."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from hidet_dist.errors import BusyError, EngineError, InputError, RequestError
from hidet_dist.llm.server.service import Service, Unavailable, UnknownModel

_RETRY_SECONDS = 1
_MOST_NAME = 200  # characters of the name of a parameter in an error
_INVALID = "invalid_request_error"


def error_object(message: str, kind: str, parameter: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error as a JSON object."""
    texts = {"message": message, "type": kind, "param": parameter, "code": code}
    # What it quotes may have halves of surrogate pairs, which UTF-8 does not.
    return {"error": {key: text and text.encode("utf-8", "backslashreplace").decode() for key, text in texts.items()}}


def describe(error: BaseException, status: str) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the object of an error, for an engine of the given status."""
    if isinstance(error, UnknownModel):
        return 404, error_object(str(error), _INVALID, "model", "model_not_found")
    if isinstance(error, RequestError):
        return 400, error_object(str(error), _INVALID, error.parameter or None, "invalid_value")
    if isinstance(error, InputError):
        return 400, error_object(str(error), _INVALID, None, "invalid_value")
    if isinstance(error, BusyError):
        return 429, error_object(str(error), "rate_limit_error", None, "queue_full")
    if isinstance(error, Unavailable) or (isinstance(error, EngineError) and status != "ready"):
        return 503, error_object(str(error), "service_unavailable_error", None, status)
    if isinstance(error, EngineError):
        return 500, error_object(str(error), "server_error", None, "generation_failed")
    return 500, error_object("The server failed; its log says why.", "server_error", None, "internal_error")


def response(status: int, body: dict[str, Any]) -> JSONResponse:
    """Return an error as a response. One that may pass says when to come again."""
    headers = {"retry-after": str(_RETRY_SECONDS)} if status in {429, 503} else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(body, status, headers)


_KIND = re.compile(r"str|int|float|bool|list\[.*\]|dict\[.*\]|(constrained|function)-.*")


def _field_of(problem: Mapping[str, Any]) -> list[str]:
    """Return the path of the field that a problem is about: without the body, and the kinds of value it may have."""
    return [str(part) for part in problem["loc"] if part != "body" and not _KIND.fullmatch(str(part))]


def _telling(problems: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Choose the problem to name: the first, or of a field that may have several kinds of value the one of its kind.

    There is a problem for each kind, most of which say that the value is of another one.
    """
    first = problems[0]
    field = list(itertools.takewhile(lambda part: not _KIND.fullmatch(str(part)), first["loc"]))
    if len(field) == len(first["loc"]):
        return first
    same = [problem for problem in problems if list(problem["loc"][: len(field)]) == field]
    return max(same, key=lambda problem: (not problem["type"].endswith("_type"), len(problem["loc"])))


def add_handlers(app: FastAPI, service: Service) -> None:
    """Have an application answer each error by its object."""

    def known(_: Request, error: Exception) -> JSONResponse:
        return response(*describe(error, service.status))

    def malformed(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = _telling(error.errors())
        where = _field_of(first)
        if first["type"] == "json_invalid":
            message, parameter = f"The body is no JSON: {first.get('ctx', {}).get('error', first['msg'])}.", None
        else:
            parameter = ".".join(where)[:_MOST_NAME] or None
            message = f"{parameter or 'The body'} is wrong: {first['msg']}."
        code = "unknown_parameter" if first["type"] == "extra_forbidden" else "invalid_value"
        return response(400, error_object(message, _INVALID, parameter, code))

    def http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, StarletteHTTPException)
        answer = response(error.status_code, error_object(str(error.detail), _INVALID))
        answer.headers.update(error.headers or {})
        return answer

    for kind in (RequestError, InputError, BusyError, EngineError, Unavailable, UnknownModel, Exception):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(StarletteHTTPException, http)
