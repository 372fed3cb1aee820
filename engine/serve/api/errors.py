"""Errors of the API, in the format and with the statuses of OpenAI."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

INVALID = "invalid_request_error"
RETRY = "1"  # seconds


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
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.detail = ErrorDetail(message=message, type=kind, param=param, code=code)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": self.detail.model_dump()}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The client's mistake."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    """A field that means something elsewhere, and nothing here."""
    return invalid(f"{param}: {why}", param, "unsupported_parameter")


def overloaded(message: str, status: int = 503) -> ApiError:
    """Come again later."""
    return ApiError(
        status,
        message,
        code="server_overloaded",
        kind="server_error" if status == 503 else "rate_limit_error",
        headers={"Retry-After": RETRY},
    )


def engine_gone(message: str = "the engine has ended and is started again") -> ApiError:
    """The error while no engine runs."""
    return ApiError(
        503, message, code="engine_dead", kind="server_error", headers={"Retry-After": RETRY}
    )
