"""Reading what clients send: bounded, typed, and beside the event loop where it is long."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest

from nanoengine.depth import MAX_DEPTH
from nanoengine.server.budget import Holding
from nanoengine.server.errors import Problem
from nanoengine.server.text import TextThreads

SLOW_BYTES = 1 << 16
"""A longer body is parsed in a thread."""

MAX_BRACKETS = 1 << 18
"""In a body: each may open a list or an object, and making millions of those would hold up everybody else."""

MAX_BODY_SECONDS = 120
"""A request that is not there by then is given up."""

S = TypeVar("S", bound=msgspec.Struct)


async def read(http: HTTPRequest, kind: type[S], threads: TextThreads, max_bytes: int, holding: Holding) -> S:
    """The body of a request.

    Args:
        http: the request.
        kind: what it should be.
        threads: for long ones.
        max_bytes: of the body.
        holding: counts its bytes.

    Raises:
        Problem: no JSON, too long, or not what this endpoint takes.
    """
    content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":  # a page of another site may send forms and plain text without being asked
        wanted = "Only 'application/json' is allowed (curl -H 'content-type: application/json')"
        raise Problem(400, f"Unsupported Media Type {content_type!r}: {wanted}")
    body = await _body(http, max_bytes, holding)
    return _parse(body, kind) if len(body) <= SLOW_BYTES else await threads.run(_parse, body, kind)


async def _body(http: HTTPRequest, max_bytes: int, holding: Holding) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(MAX_BODY_SECONDS):
            async for part in http.stream():
                size += len(part)
                if size > max_bytes:
                    raise Problem(413, f"the body has more than {max_bytes} bytes: shorten it, or raise max_body_bytes")
                holding.add(len(part))
                parts.append(part)
    except TimeoutError as error:
        raise Problem(
            408, f"the body was not there after {MAX_BODY_SECONDS} s", headers={"connection": "close"}
        ) from error
    except ClientDisconnect as error:
        raise Problem(499, "the client is gone") from error
    return b"".join(parts)


def _parse(body: bytes, kind: type[S]) -> S:
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise Problem(400, f"the body has more than {MAX_BRACKETS} brackets: send less JSON")
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise Problem(400, str(error), _param(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem(400, f"the body is no JSON: {error}") from error
    except RecursionError as error:
        message = f"the body has too many tables and lists inside each other; a schema may have {MAX_DEPTH}"
        raise Problem(400, message) from error
    check = getattr(request, "check", None)
    if check is not None:
        check()
    return request


def _param(message: str) -> str | None:
    """The field that a message of msgspec's is about: "... - at `$.messages[0]`", "... unknown field `x`"."""
    found = re.search(r"at `\$\.([A-Za-z_0-9]+)", message) or re.search(r"field `([^`]+)`", message)
    return None if found is None else found[1]
