"""Reading the bodies of requests: with limits, as typed objects, and in a thread if the body is long."""

from __future__ import annotations

import asyncio
import re
from codecs import BOM_UTF8
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest

from nanoengine.depth import MAX_DEPTH
from nanoengine.serve.server.admission.quota import Holding, Quota
from nanoengine.serve.server.admission.text_threads import IS_LONG, TextThreads
from nanoengine.serve.server.bodies.fields import Body, Ignored, without_unknown
from nanoengine.serve.server.config import ServerConfig
from nanoengine.serve.server.errors import TOO_LONG, APIError, body_too_long, context
from nanoengine.serve.server.scope import CLIENT, HELD

SLOW_BYTES = 1 << 13
"""A longer body is parsed and checked in a thread."""

MOST = {"brackets": (b"[{", 1 << 17), "commas": (b",", 1 << 19)}
"""Characters of a body, and the most of each: a value may begin there, and millions of values would hold up all clients."""

TURNS = ("messages", "input")
"""Fields that are conversations if they are lists of tables."""

CHARS_OF_AN_ITEM = 64
"""Added to the characters of each message, tool and document: rendering one takes the time of so many characters."""

OF_PROGRAMS = ("", "application/x-www-form-urlencoded", "application/octet-stream")
"""Content types of programs that set none: curl, and clients of Ollama by Python's requests, httpx and aiohttp."""

BY_BROWSERS = frozenset(("origin", "sec-fetch-site"))
"""Headers of requests from web pages."""

MAX_BODY_SECONDS = 120
"""The time in which a whole body must arrive."""

S = TypeVar("S", bound=Body)
R = TypeVar("R")


class BodyReader:
    """Reads the bodies of requests, within the limits of the server.

    Args:
        config: of the server.
        quota: counts the bytes of all bodies.
        max_model_len: tokens of the longest sequence.
    """

    def __init__(self, config: ServerConfig, quota: Quota, max_model_len: int):
        self._config, self._quota, self._max_model_len = config, quota, max_model_len
        self._ignored = Ignored()

    async def read(self, http: HTTPRequest, kind: type[S], make: Callable[[S], R], threads: TextThreads) -> tuple[S, R]:
        """The body of a request as an object of a type, and the result of a function of it; in a thread if the body is long.

        Raises:
            APIError: no JSON, too long, or not what this endpoint takes.
        """
        check_media_type(http)
        holding = http.scope[HELD].enter_context(self._quota.hold(http.scope[CLIENT]))
        body = await body_of(http, self._config.max_body_bytes, holding)

        def read() -> tuple[S, R]:
            request = parse(body, kind, self._ignored)
            check_size(request, self._max_model_len, self._config.max_text_chars)
            return request, make(request)

        IS_LONG.set(len(body) > SLOW_BYTES)
        return await threads.run(read) if IS_LONG.get() else read()


def check_media_type(http: HTTPRequest) -> None:
    """Raise APIError (400) unless the body of a request is JSON by its headers."""
    content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_form = content_type in OF_PROGRAMS and BY_BROWSERS.isdisjoint(http.headers.keys())
    if content_type != "application/json" and not is_form:  # pages may send forms and plain text to any server
        wanted = "Only 'application/json' is allowed (curl -H 'content-type: application/json')"
        raise APIError(400, f"Unsupported Media Type {content_type[:80]!r}: {wanted}")


async def body_of(http: HTTPRequest, max_bytes: int, holding: Holding) -> bytes:
    """The bytes of a body. Raises APIError: too long, too slow, no room."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(MAX_BODY_SECONDS):
            async for part in http.stream():
                size += len(part)
                if size > max_bytes:
                    raise body_too_long(max_bytes)
                holding.add(len(part))
                parts.append(part)
    except TimeoutError as error:
        raise APIError(
            408, f"the body was not there after {MAX_BODY_SECONDS} s", headers={"connection": "close"}
        ) from error
    except ClientDisconnect as error:
        raise APIError(499, "the client is gone") from error
    return b"".join(parts).removeprefix(BOM_UTF8)


def parse(body: bytes, kind: type[S], ignored: Ignored) -> S:
    """The object that a body is. Raises APIError: it is no JSON, or not of that type."""
    signs_of_body = np.frombuffer(body, np.uint8)  # it counts without the interpreter's lock
    for name, (signs, most) in MOST.items():
        if (count := sum(np.count_nonzero(signs_of_body == sign) for sign in signs)) > most:
            raise APIError(400, f"the body has {count} {name}: at most {most} can be; send less JSON")
    try:
        try:
            request = msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            if "unknown field" not in str(error):
                raise
            request = msgspec.json.decode(without_unknown(body, kind, ignored), type=kind)
    except msgspec.ValidationError as error:
        message = re.sub(r"(?s)([`'])(.{77}).*\1", r"\1\2...\1", str(error))  # it may quote a name or a value
        raise APIError(400, message, _param(message)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise APIError(400, f"the body is no JSON: {error}") from error
    except RecursionError as error:
        message = f"the body has too many tables and lists inside each other; a schema may have {MAX_DEPTH}"
        raise APIError(400, message) from error
    request.check()
    return request


def check_size(request: msgspec.Struct, max_model_len: int, max_chars: int) -> None:
    """Refuse conversations, tools and schemas that are too large, before they are rendered.

    Raises:
        APIError: more messages than the model's context has tokens, or more characters in all tables.
    """
    size = 0
    for field in request.__struct_fields__:
        value = getattr(request, field)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            if field in TURNS and len(value) > max_model_len:
                message = f"{field}: the prompt is too long: {context(max_model_len)}"
                more = f"(max_model_len), and each of its {len(value)} messages has one at least; send fewer"
                raise APIError(400, f"{message} {more}", field, code=TOO_LONG)
            size += CHARS_OF_AN_ITEM * len(value)
        elif field == "names" or not isinstance(value, dict | msgspec.Struct):  # `names` are the server's
            continue
        size = _with_chars(value, size, max_chars)
        if size > max_chars:
            message = f"{field} and what is before it have {size} characters or more, each message and tool counting "
            message += f"for {CHARS_OF_AN_ITEM} beside its own: this server renders {max_chars} (max_text_chars)"
            if field not in TURNS:
                raise APIError(400, f"{message}; send less", field)
            message += f", so the prompt is too long, and {context(max_model_len)}; send less"
            raise APIError(400, message, field, code=TOO_LONG)


def _with_chars(value: Any, size: int, most: int) -> int:
    """A size plus the characters and values of a table or list; counting stops beyond `most`."""
    waiting = [value]
    while waiting and size <= most:
        item = waiting.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, dict | list):
            size += 2 * len(item)
            if size <= most:
                waiting += item
                waiting += item.values() if isinstance(item, dict) else ()
        elif isinstance(item, msgspec.Struct):
            waiting += msgspec.structs.astuple(item)
    return size


def _param(message: str) -> str | None:
    """The field that a message of msgspec's is about: "... - at `$.messages[0]`", "... unknown field `x`"."""
    match = re.search(r"at `\$\.([A-Za-z_0-9]+)", message) or re.search(r"field `([^`]+)`", message)
    return None if match is None else match[1]
