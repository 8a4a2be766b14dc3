"""Keys of the ASGI scope: facts about a request that the server adds."""

from __future__ import annotations

from starlette.requests import Request as HTTPRequest

CLIENT = "nanoengine.client"
"""The client that has sent the request: its key by a number, or its address."""

CLIENT_HEADER = b"x-nanoengine-client"
"""The header in which the front of several models passes CLIENT to the server of one."""

ADMIN = "admin"
"""The client that has the admin key."""

REQUEST_HEADER = b"x-nanoengine-request"
"""The header in which it passes REQUEST_ID: `x-request-id` is that of the client."""

REQUEST_ID = "nanoengine.request_id"
"""The id of the request: in the log, and in a header of the answer."""

HELD = "nanoengine.held"
"""An ExitStack of what the request takes from budgets; it is closed when the answer was sent."""

SENT = "nanoengine.sent"
"""The number of bytes of the answer's body that were sent."""

ADAPTER = "nanoengine.adapter"
"""The adapter that the request names as its model, if it names one."""

CONNECTION = "nanoengine.connection"
"""The key of the ASGI scope with the `BoundedHTTP` of the request."""


def new_id(prefix: str, http: HTTPRequest, request_id: str | None) -> str:
    """An id for an answer: the prefix, and the id of the request: of its header, of its body, or ours."""
    server_id = http.scope[REQUEST_ID]
    return f"{prefix}{server_id if 'x-request-id' in http.headers else request_id or server_id}"
