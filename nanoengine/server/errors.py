"""Problem: what a client is told instead of an answer, in OpenAI's shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.responses import Response

from nanoengine.errors import (
    EngineClosed,
    EngineDead,
    InvalidPrompt,
    InvalidRequest,
    InvalidSamplingParams,
    NanoEngineError,
    NoTokenLeft,
    StepFailed,
)

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

USER_ERRORS = (InvalidPrompt, InvalidRequest, InvalidSamplingParams, NoTokenLeft)


class Problem(NanoEngineError):
    """A request that is not answered.

    Args:
        status: of HTTP.
        message: for people.
        param: the field at fault, if one is.
        headers: of the response.
    """

    def __init__(self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers

    def body(self) -> bytes:
        """{"error": {...}}."""
        kind = TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, "application/json")


def problem_of(error: BaseException) -> Problem:
    """What a client is told of an exception: all of a mistake of its own, and no more than that of anybody else's."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, StepFailed) and isinstance(error.__cause__, USER_ERRORS):
        error = error.__cause__
    if isinstance(error, USER_ERRORS):
        return Problem(HTTPStatus.BAD_REQUEST, str(error), _field(str(error)))
    if isinstance(error, EngineDead | EngineClosed):
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
