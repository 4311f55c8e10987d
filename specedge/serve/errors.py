"""Errors of the API, in OpenAI's format."""

from __future__ import annotations

import logging
from typing import Any

from specedge.errors import ContextLengthError, PromptError, SpecEdgeError

UNSUPPORTED = "unsupported_value"
RETRY_AFTER = 1  # seconds; a slot is free again when the shortest of its texts ends


class ApiError(Exception):
    """An error with a status. `param` is the field that is wrong, if it is one."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.message, self.param, self.code = message, param, code
        self.status, self.headers = status, headers or {}

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def busy(why: str, **headers: str) -> ApiError:
    """There is no room now, but there will be."""
    return ApiError(
        f"{why}; try again later",
        code="rate_limit_exceeded",
        status=429,
        headers={"Retry-After": str(RETRY_AFTER)} | headers,
    )


def prompt_error(error: PromptError, field: str) -> ApiError:
    """Return the client's error for a prompt in a field."""
    is_long = isinstance(error, ContextLengthError)
    return ApiError(str(error), field, "context_length_exceeded" if is_long else "invalid_prompt")


def failed(error: BaseException) -> ApiError:
    """Return the error that a client gets, and log it if it is the server's fault."""
    if not isinstance(error, ApiError):
        logging.getLogger("specedge").error("a request failed", exc_info=error)
    return shown_to_client(error)


def shown_to_client(error: BaseException) -> ApiError:
    """Return the error that a client gets: of a fault inside the server no more than its status."""
    if isinstance(error, ApiError):
        return error
    said = str(error) if isinstance(error, SpecEdgeError) else "the server failed; its log says how"
    return ApiError(said, code="failed", status=500)
