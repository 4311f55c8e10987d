"""What a client is told when something is wrong, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from specedge.errors import ContextLengthError, OptionError, PromptError, SpecEdgeError

UNSUPPORTED = "unsupported_value"


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


def refused(error: Exception, prompt: str) -> ApiError:
    """What was wrong with a request that the pipeline refuses; `prompt` is where its text is."""
    if isinstance(error, ContextLengthError):
        return ApiError(str(error), prompt, "context_length_exceeded")
    if isinstance(error, PromptError):
        return ApiError(str(error), prompt, "invalid_prompt")
    return ApiError(str(error), code="invalid_value")


def failed(error: BaseException) -> ApiError:
    """What went wrong while a request ran."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OptionError):  # clients ask again after a status of 500
        return ApiError(str(error), code="invalid_value")
    said = str(error) if isinstance(error, SpecEdgeError) else "the server failed; its log says how"
    return ApiError(said, code="failed", status=500)
