"""ClientMiddleware: identifies the client of each request, checks its access, and logs the request."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoengine.serve.server.admission.text_threads import CURRENT_CLIENT
from nanoengine.serve.server.admission.work_share import WorkShare
from nanoengine.serve.server.bodies.protocol import MAX_ID_CHARS
from nanoengine.serve.server.config import ServerConfig
from nanoengine.serve.server.errors import CUT_OFF, REASON, APIError, api_error_of, body_too_long
from nanoengine.serve.server.http.connections import client_of
from nanoengine.serve.server.http.endpoint import Access, Endpoint
from nanoengine.serve.server.http.page import FILES
from nanoengine.serve.server.scope import ADMIN, CLIENT, CLIENT_HEADER, HELD, REQUEST_HEADER, REQUEST_ID, SENT

logger = logging.getLogger("nanoengine.serve.server")
access_logger = logging.getLogger("nanoengine.access")


ONCE = (b"host", b"authorization", b"x-api-key", b"origin", b"content-length")
"""Headers that decide who may do what."""

ACCESS = 'request_id=%(request_id)s client=%(client)s method=%(method)s path="%(path)s" '
ACCESS += "status=%(status)d bytes=%(bytes)d seconds=%(seconds).3f"

MAX_REASON_CHARS = 300
"""The longest error message in the log: messages quote values of clients."""


class ClientMiddleware:
    """Gives each request an id and a client, which is its key or its address. The log has both, the answer has the id.

    Args:
        app: the next application.
        config: keys, hosts, origins, and whether each request is logged.
        endpoints: of the server, with their rules of access. Any other path, but a file of the page, is for clients with a key.
        work_share: when the next request of a client is read.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, endpoints: Collection[Endpoint], work_share: WorkShare):
        self._app, self._config, self._work_share = app, config, work_share
        keys = config.api_key
        self._is_behind_front = config.front_socket is not None
        self._hosts, self._max_bytes, self._origins = config.hosts, config.max_body_bytes, config.cors_origin or ()
        self._admin = None if config.admin_key is None else _digest(config.admin_key.encode())
        self._digests = None if keys is None else [_digest(key.encode()) for key in keys]
        self._access = {each.path: each.access for each in endpoints} | dict.fromkeys(FILES.values(), Access.OPEN)
        self._polled = {each.path for each in endpoints if each.is_polled}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        headers = dict(scope["headers"])
        request_id = (
            _printable(headers.get(REQUEST_HEADER if self._is_behind_front else b"x-request-id", b""))
            or uuid.uuid4().hex
        )
        peer = scope.get("client")
        scope[CLIENT] = client_of(peer[0]) if peer else "local"
        scope[REQUEST_ID] = request_id
        scope[SENT] = status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            elif message["type"] == "http.response.body":
                scope[SENT] += len(message.get("body", b""))
            await send(message)

        try:
            problem = self._problem(scope, headers)
            CURRENT_CLIENT.set(scope[CLIENT])
            with ExitStack() as scope[HELD]:
                app = self._app if problem is None else problem.response(scope)
                if scope["method"] == "POST":
                    num_bytes = min(int(headers.get(b"content-length", b"0")), self._max_bytes)
                    async with self._work_share.turn(scope[CLIENT], num_bytes):
                        work: Any = app(scope, receive, send_with_id)
                        await self._work_share.measured(scope[CLIENT], work)
                    if status in (429, 503):
                        self._work_share.refused(scope[CLIENT])
                else:
                    await app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server ends while a request is read, or a text is encoded
            if status:
                raise
            await APIError(503, CUT_OFF).response(scope)(scope, receive, send_with_id)
        except Exception as error:  # an error of one request must not end any other
            logger.exception("request %s", request_id)
            if not status:
                await api_error_of(error).response(scope)(scope, receive, send_with_id)
        finally:
            if self._config.access_log and not (status == 200 and scope["path"] in self._polled):
                fields = {"request_id": request_id, "client": scope[CLIENT], "method": scope["method"]}
                fields |= {"path": _quoted(scope["path"]), "status": status, "bytes": scope[SENT]}
                fields["seconds"], reason = round(time.perf_counter() - start, 6), ""
                if REASON in scope:
                    fields["reason"], reason = _quoted(scope[REASON][:MAX_REASON_CHARS]), ' reason="%(reason)s"'
                access_logger.info(ACCESS + reason, fields)

    def _problem(self, scope: Scope, headers: dict[bytes, bytes]) -> APIError | None:
        """The error of a request that is refused; None: it is let in. A request with a key belongs to the client of the key."""
        if self._is_behind_front:
            scope[CLIENT] = headers.get(CLIENT_HEADER, b"local").decode("latin-1")
            return None
        if not scope["path"].isprintable():  # to a route, one with the end of a line behind it is the same path
            return APIError(400, "the path holds characters that cannot be printed")
        counts = Counter(name for name, _ in scope["headers"] if name in ONCE)
        if counts.total() > len(counts):  # of two, a proxy may have read the other
            twice = next(name for name, count in counts.items() if count > 1).decode()
            return APIError(400, f"there are several {twice} headers: send one")
        host = re.sub(r":\d*$", "", headers.get(b"host", b"").decode("latin-1")).lower()
        if not host and (b"host" in headers or scope["http_version"] == "1.1"):
            return APIError(400, "there is no Host header with a name: HTTP/1.1 asks for one")
        if headers.get(b"expect", b"100-continue").lower() != b"100-continue":
            return APIError(417, "the header Expect must be 100-continue, or not be there")
        if int(headers.get(b"content-length", b"0")) > self._max_bytes:
            close = {"connection": "close"} if b"expect" in headers else None  # a body that does not come has no end
            return body_too_long(self._max_bytes, close)
        if host and self._hosts is not None and host not in self._hosts:
            return APIError(403, f"the host {host[:80]!r} is not a name of this server: see allowed_host")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            # A browser says where a page is from, and others say nothing.
            is_same = origin.partition("://")[2].encode("latin-1") == headers.get(b"host")
            if not is_same and origin not in self._origins and "*" not in self._origins:
                return APIError(403, "a page of another site may not send this: see cors_origin")
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")  # as Anthropic's clients send it
        digest = _digest(key.strip())
        access = Access.OPEN if scope["method"] == "OPTIONS" else self._access.get(scope["path"], Access.CLIENT)
        if self._admin is not None:
            if secrets.compare_digest(digest, self._admin):
                scope[CLIENT] = ADMIN
                return None
            if access in (Access.ADMIN, Access.ONLY_ADMIN):
                return _unknown("this needs the admin key (admin_key)")
        elif access is Access.ONLY_ADMIN:
            return APIError(403, "only an admin may do this, and this server has none: start it with --admin-key")
        if self._digests is None or access is Access.OPEN:
            return None
        matches = [secrets.compare_digest(digest, each) for each in self._digests]  # all of them: time tells nothing
        if not any(matches):
            return _unknown("the API key is missing or wrong")
        scope[CLIENT] = f"key-{matches.index(True)}"
        return None


def _unknown(message: str) -> APIError:
    message += ": send the header Authorization: Bearer KEY, or x-api-key: KEY"
    return APIError(401, message, headers={"www-authenticate": "Bearer"})


def _quoted(text: str) -> str:
    """A text on one line of a log, between quotes."""
    return text.encode("unicode_escape").decode().replace('"', '\\"')


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _printable(value: bytes) -> str | None:
    """The client's id of its request; None if it has characters that could forge a header or a line of the log."""
    text = value.decode("latin-1")
    return text if len(text) <= MAX_ID_CHARS and re.fullmatch(r"[\w.:@/+-]+", text, re.ASCII) else None
