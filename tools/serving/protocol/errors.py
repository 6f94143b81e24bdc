"""Error responses: OpenAI's error object and the HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrt.engines.errors import SpecrtError

INVALID_REQUEST, SERVER_ERROR = "invalid_request_error", "server_error"

# Options of the runtime that have another name in requests
_PARAMS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "banned_token_ids": "stop_token_ids",  # with min_tokens, all ids are excluded
}
CHAT_PARAMS = {
    **dict.fromkeys(("prompt", "chat template"), "messages"),
    "chat_template_name": "chat_template_kwargs.chat_template_name",
}


@dataclass(eq=False)
class ApiError(Exception):
    """``param`` is the invalid field, as a path such as ``messages[0].role``; ``retry_after`` is in s."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    kind: str = INVALID_REQUEST
    retry_after: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """The body of the response."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response in addition to its content type."""
        retry = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return {**retry, "WWW-Authenticate": "Bearer"} if self.status == 401 else retry


def invalid(param: str | None, problem: str, code: str | None = None) -> ApiError:
    """A 400 for the field ``param``."""
    return ApiError(400, problem if param is None else f"{param}: {problem}", param, code)


def unavailable(reason: str) -> ApiError:
    """A 503, for a server that is loading, draining or stopped."""
    return ApiError(503, f"the server is {reason}; try again later", None, reason, SERVER_ERROR, retry_after=1)


def too_busy() -> ApiError:
    """A 429, for a full queue."""
    message = "the server is busy and its queue is full; try again later"
    return ApiError(429, message, None, "queue_full", "rate_limit_error", retry_after=1)


def timed_out(seconds: float) -> ApiError:
    """A 504, for a request that passed its deadline."""
    message = f"the request took longer than {seconds:g} s; ask for less, or start the server with --request-timeout"
    return ApiError(504, message, None, "timeout", "timeout_error")


def internal(error: BaseException) -> ApiError:
    """A 500, for an error of the server. The log has the details."""
    return ApiError(500, f"the server failed: {type(error).__name__}", None, "internal_error", SERVER_ERROR)


def refused(error: SpecrtError, names: Mapping[str, str] | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field that the runtime refused.

    ``names`` maps what messages begin with, mostly the names of options, to names of fields.
    """
    option, _, reason = str(error).partition(": ")
    fields = {**_PARAMS, **(names or {})}
    if not reason or not (option in fields or option.isidentifier()):
        return invalid(None, str(error), code)
    return invalid(fields.get(option, option), reason, code)
