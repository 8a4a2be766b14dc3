"""Endpoint: a method of a path, with its handler, body type and access."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

Handler = Callable[[HTTPRequest, Any], Awaitable[Response | ASGIApp]]
"""The second argument is the `ServedModel` of one model, or the `Front` of several (serve/front)."""

EVENTS, LINES = "text/event-stream", "application/x-ndjson"
"""Media types of streams: server-sent events, and a JSON object on each line."""


class Access(Enum):
    """The clients that may call an endpoint."""

    OPEN = auto()
    """Everybody, without a key: load balancers, dashboards, and programs that generate clients."""
    CLIENT = auto()
    """Every client that has a key, if the server has keys."""
    ADMIN = auto()
    """If there is an admin key, only the admin: the endpoint shows the requests of all clients, or slows them down."""
    ONLY_ADMIN = auto()
    """Only the admin, and nobody if there is no admin key: the server reads files of its machine, and its models change."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method of a path.

    Args:
        method: of HTTP.
        path: as Starlette writes it: "{name}" is one part of a path, "{name:path}" is all that follows.
        handler: makes the answer; the first line of its documentation is the summary in /openapi.json.
        body: the type that the body of a request is read as; None: there is no body.
        stream: the media type of an answer that is streamed; empty: it is never streamed.
        access: who may call it.
        is_polled: it is called every second or more often: calls that are answered with 200 are not logged.
    """

    method: str
    path: str
    handler: Handler
    body: type[msgspec.Struct] | None = None
    stream: str = ""
    access: Access = Access.CLIENT
    is_polled: bool = False

    @property
    def summary(self) -> str:
        """What it does."""
        return str(self.handler.__doc__).partition("\n")[0]

    def route(self, serving: Any) -> Route:
        """The route of an application; `serving` is the second argument of its handlers."""

        async def answer(http: HTTPRequest) -> Response | ASGIApp:
            return await self.handler(http, serving)

        return Route(self.path, answer, methods=[self.method])
