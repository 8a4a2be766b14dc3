"""Problem: what a client is told instead of an answer, in the shape of the interface that it has called."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
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
from nanoengine.sizes import told

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    408: "TimeoutError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    429: "RateLimitError",
    413: "RequestTooLargeError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

REASON = "nanoengine.reason"
"""Where the scope of a request says why it was not answered."""

TOO_LONG = "context_length_exceeded"
"""The code of a prompt that the model's context does not hold; clients and agents look for it."""

LONG_WORD = re.compile(r"(\S{38})\S{5,}(\S{37})")
"""Of a client's own: no message repeats more of it."""

USER_ERRORS = (InvalidPrompt, InvalidRequest, InvalidSamplingParams, NoTokenLeft)


class Problem(NanoEngineError):
    """A request that is not answered.

    Args:
        status: of HTTP.
        message: for people.
        param: the field at fault, if one is.
        headers: of the response.
        code: what programs know the problem by, in OpenAI's or Anthropic's words; None: the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        code: str | None = None,
    ):
        message = LONG_WORD.sub(r"\1 ... \2", message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers
        self.code = code

    def table(self, path: str = "") -> dict[str, Any]:
        """What the client of a path is told."""
        if path.startswith("/v1/messages"):
            kind = ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            details = {"details": {"error_code": self.code}} if self.code else {}
            return {"type": "error", "error": {"type": kind, "message": self.message, **details}}
        if path.startswith("/api/"):
            return {"error": self.message}
        kind = TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code or self.status}}

    def response(self, scope: MutableMapping[str, Any]) -> Response:
        """The whole answer to the request of a scope, which is told of the reason."""
        scope[REASON] = self.message
        body = msgspec.json.encode(self.table(scope["path"]))
        return Response(body, self.status, self.headers, "application/json")


def context(max_model_len: int) -> str:
    """In the words that clients look for where a prompt is too long."""
    return f"this model's maximum context length is {max_model_len} tokens"


def body_too_long(limit: int, headers: Mapping[str, str] | None = None) -> Problem:
    return Problem(413, f"the body has more than {told(limit)}: shorten it, or raise max_body_bytes", headers=headers)


def problem_of(error: BaseException) -> Problem:
    """What a client is told of an exception: all of a mistake of its own, and no more than that of anybody else's."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, StepFailed) and isinstance(error.__cause__, USER_ERRORS):
        error = error.__cause__
    if isinstance(error, PromptTooLong):
        return Problem(HTTPStatus.BAD_REQUEST, str(error), "prompt", code=TOO_LONG)
    if isinstance(error, USER_ERRORS):
        return Problem(HTTPStatus.BAD_REQUEST, str(error), _field(str(error)))
    if isinstance(error, EngineDead | EngineClosed | GrammarsUnavailable):
        return Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
    if isinstance(error, NanoEngineError):  # such as StepFailed: its message says what has happened
        return Problem(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
    return Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "the server has met an error of its own; its log says which")


def _field(message: str) -> str | None:
    """The field that a message begins with: the engine's errors name it first, prompts aside."""
    word = re.match(r"[a-z]+(_[a-z]+)*", message)
    if word is None or word[0] in ("the", "a", "bad"):
        return "prompt" if message.startswith("the prompt") else None
    return word[0]
