"""APIError: an error response, in the shape of the interface that the client has called."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from nanoengine.errors import (
    EngineClosed,
    EngineDead,
    GrammarsUnavailable,
    InvalidPrompt,
    InvalidRequest,
    InvalidSamplingParams,
    NanoEngineError,
    NoTokenLeft,
    PromptTooLong,
    StepFailed,
)
from nanoengine.sizes import format_bytes

TYPES = {
    400: ("BadRequestError", "invalid_request_error"),
    401: ("AuthenticationError", "authentication_error"),
    403: ("PermissionDeniedError", "permission_error"),
    404: ("NotFoundError", "not_found_error"),
    405: ("MethodNotAllowedError", "invalid_request_error"),
    408: ("TimeoutError", "invalid_request_error"),
    413: ("RequestTooLargeError", "request_too_large"),
    429: ("RateLimitError", "rate_limit_error"),
    500: ("InternalServerError", "api_error"),
    503: ("ServiceUnavailableError", "overloaded_error"),
    504: ("TimeoutError", "timeout_error"),
}
"""OpenAI's and Anthropic's names of the kinds of errors, by status; others are like 400 and 500."""

RETRY_AFTER = {"retry-after": "1"}
"""The header with the seconds after which a client that was refused may try again."""

REASON = "nanoengine.reason"
"""The key of the ASGI scope with the message of the error, for the log."""

TOO_LONG = "context_length_exceeded"
"""The code of a prompt that is longer than the model's context; clients and agents look for it."""

LONG_WORD = re.compile(r"(\S{38})\S{5,}(\S{37})")
"""A long word of the client's: a message has its beginning and its end."""

CUT_OFF = "the server is shutting down, and the answer is not whole: ask again"

USER_ERRORS = (InvalidPrompt, InvalidRequest, InvalidSamplingParams, NoTokenLeft)


@dataclass(eq=False)
class APIError(NanoEngineError):
    """An error response.

    Args:
        status: of HTTP.
        message: for people.
        param: the field at fault, if one is.
        headers: of the response.
        code: for programs, one of OpenAI's or Anthropic's; None: the status.
    """

    status: int
    message: str
    param: str | None = None
    headers: Mapping[str, str] | None = None
    code: str | None = None

    def __post_init__(self) -> None:
        self.message = LONG_WORD.sub(r"\1 ... \2", self.message)
        super().__init__(self.message)

    def table(self, path: str = "") -> dict[str, Any]:
        """The JSON of the error, for a client of a path."""
        of_openai, of_anthropic = TYPES.get(self.status, TYPES[500 if self.status >= 500 else 400])
        if path.startswith("/v1/messages"):
            details = {"details": {"error_code": self.code}} if self.code else {}
            return {"type": "error", "error": {"type": of_anthropic, "message": self.message, **details}}
        if path.startswith("/api/"):
            return {"error": self.message}
        code = self.code or self.status
        return {"error": {"message": self.message, "type": of_openai, "param": self.param, "code": code}}

    def response(self, scope: MutableMapping[str, Any]) -> Response:
        """The response to the request of a scope; the message is noted there for the log."""
        scope[REASON] = self.message
        body = msgspec.json.encode(self.table(scope["path"]))
        return Response(body, self.status, self.headers, "application/json")


def context(max_model_len: int) -> str:
    """The words that clients look for when a prompt is too long."""
    return f"this model's maximum context length is {max_model_len} tokens"


def body_too_long(limit: int, headers: Mapping[str, str] | None = None) -> APIError:
    return APIError(
        413, f"the body has more than {format_bytes(limit)}: shorten it, or raise max_body_bytes", headers=headers
    )


def api_error_of(error: BaseException) -> APIError:
    """The error for a client. The message of an unexpected exception is for the log alone."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, StepFailed) and isinstance(error.__cause__, USER_ERRORS):
        error = error.__cause__
    if isinstance(error, USER_ERRORS):
        default = "prompt" if isinstance(error, InvalidPrompt) else ""
        field = re.match(r"\w+", default if error.field is None else error.field)
        code = TOO_LONG if isinstance(error, PromptTooLong) else None
        return APIError(HTTPStatus.BAD_REQUEST, str(error), field and field[0], code=code)
    if isinstance(error, EngineDead | EngineClosed | GrammarsUnavailable):
        return APIError(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
    if isinstance(error, NanoEngineError):  # such as StepFailed: its message says what has happened
        return APIError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
    return APIError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server has met an error of its own; its log says which")
