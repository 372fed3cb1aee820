"""Errors of the API, in the format and with the statuses of OpenAI."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from ..workers.link import WorkerGoneError

RETRY = {"Retry-After": "1"}  # seconds
INVALID = "invalid_request_error"
TYPES = {  # of a status, where it is not INVALID
    401: "authentication_error",
    429: "rate_limit_error",
    499: "client_closed",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class ErrorDetail(BaseModel):
    """What is wrong: `param` names the field, `code` is for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of an error."""

    error: ErrorDetail


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        kind = TYPES.get(status, INVALID)
        detail = ErrorDetail(message=message, type=kind, param=param, code=code)
        self.body: dict[str, Any] = {"error": detail.model_dump()}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def bad_field(param: str, why: str, code: str | None = None) -> ApiError:
    return invalid(f"{param}: {why}", param, code)


def overloaded(message: str, status: int = 503) -> ApiError:
    return ApiError(status, message, code="server_overloaded", headers=RETRY)


def engine_gone(message: str = "the engine has ended and is started again") -> ApiError:
    return ApiError(503, message, code="engine_dead", headers=RETRY)


def add_error_handlers(app: FastAPI) -> None:
    """Answer errors of routes and engines, unknown paths and wrong methods in this format."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, WorkerGoneError):
            error = engine_gone()
        if isinstance(error, HTTPException):
            path = request.url.path[:80]
            words = {404: f"there is nothing at {path!r}", 405: "another method is needed"}
            message = words.get(error.status_code, str(error.detail))
            error = ApiError(error.status_code, message, headers=error.headers)
        assert isinstance(error, ApiError)
        return error.response

    for kind in (ApiError, WorkerGoneError, HTTPException):
        app.add_exception_handler(kind, answer)
