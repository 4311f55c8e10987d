"""API errors in OpenAI's format."""

from __future__ import annotations

import logging
from typing import Any

from specedge.errors import ContextLengthError, PromptError, SpecEdgeError

UNSUPPORTED = "unsupported_value"
RETRY_AFTER = 1  # seconds


class ApiError(Exception):
    """Error with an HTTP response; `param` names the invalid field of the request, if any."""

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
        """Return the JSON body of the response."""
        error_type = "invalid_request_error" if self.status < 500 else "server_error"
        error_type = "rate_limit_error" if self.status == 429 else error_type
        return {
            "error": {
                "message": self.message,
                "type": error_type,
                "param": self.param,
                "code": self.code,
            }
        }


def busy_error(reason: str, **headers: str) -> ApiError:
    """Return a 429 error with a Retry-After header."""
    return ApiError(
        f"{reason}; try again later",
        code="rate_limit_exceeded",
        status=429,
        headers={"Retry-After": str(RETRY_AFTER)} | headers,
    )


def timeout_error(seconds: float) -> ApiError:
    """Return the API error for a request that takes longer than the server allows."""
    return ApiError(
        f"the request exceeded the server's timeout of {seconds:g} seconds, which includes the "
        "wait for a slot",
        code="timeout",
        status=504,
        headers={"x-should-retry": "false"},  # OpenAI's clients retry on status 504
    )


def prompt_error(error: PromptError, field: str) -> ApiError:
    """Return the API error for an invalid prompt in a field."""
    is_long = isinstance(error, ContextLengthError)
    return ApiError(str(error), field, "context_length_exceeded" if is_long else "invalid_prompt")


def logged_error(error: BaseException) -> ApiError:
    """Return the API error for an exception, which is logged if it is unexpected."""
    if not isinstance(error, ApiError):
        logging.getLogger("specedge").error("request failed", exc_info=error)
    return client_error(error)


def client_error(error: BaseException) -> ApiError:
    """Return the API error for an exception, without details of internal errors."""
    if isinstance(error, ApiError):
        return error
    internal = "internal server error; see the server's log"
    message = str(error) if isinstance(error, SpecEdgeError) else internal
    return ApiError(message, code="failed", status=500)
