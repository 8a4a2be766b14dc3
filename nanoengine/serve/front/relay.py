"""Relay: passes a request on to the process of its model, and the answer back, piece by piece."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
from starlette.types import Receive, Scope, Send

from nanoengine.serve.front.child import Child
from nanoengine.serve.front.model import Model
from nanoengine.serve.front.shapes import last_event, media_type, ping
from nanoengine.serve.front.upstream import HOP_BY_HOP, Headers, NoAnswer, request
from nanoengine.serve.server.apis.event_stream import HEADERS, PING_SECONDS
from nanoengine.serve.server.errors import REASON, RETRY_AFTER, APIError
from nanoengine.serve.server.jobs import disconnected
from nanoengine.serve.server.scope import CLIENT, CLIENT_HEADER, CONNECTION, REQUEST_HEADER, REQUEST_ID, SENT

if TYPE_CHECKING:
    from nanoengine.serve.front.front import Front

NOT_PASSED_ON = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"authorization", b"x-api-key"}
NOT_PASSED_ON |= {CLIENT_HEADER, REQUEST_HEADER, b"proxy-authorization", b"proxy-connection"}
"""Headers of a request that the front has read, or writes itself."""

NOT_PASSED_BACK = frozenset((b"x-request-id", b"date", b"server"))
"""Headers of an answer that the front writes itself."""


ENDED_SECONDS = 1.0
"""In which the end of a process is known after that of its connections."""


def headers_for_child(scope: Scope) -> Headers:
    """Those of a client's request, and who it is."""
    headers = [header for header in scope["headers"] if header[0] not in NOT_PASSED_ON]
    client, request_id = scope[CLIENT].encode("latin-1"), scope[REQUEST_ID].encode()
    return [*headers, (CLIENT_HEADER, client), (REQUEST_HEADER, request_id)]


@dataclass
class Relay:
    """The answer to one request, as an ASGI application.

    Args:
        front: of all models.
        model: that the request names.
        body: of the request.
        is_stream: the answer is a stream: it has pings while the model loads.
        keep_alive: seconds, see `Loader.using`.
        changes_names: the request loads or unloads an adapter.
    """

    front: Front
    model: Model
    body: bytes
    is_stream: bool = False
    keep_alive: float | None = None
    changes_names: bool = False
    _has_begun: bool = field(default=False, init=False)  # the head of the answer was sent
    _is_chunked: bool = field(default=False, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._send, path = scope, send, scope["path"]
        work, gone = (asyncio.ensure_future(one) for one in (self._answer(path), disconnected(receive)))
        gone.add_done_callback(lambda _: work.cancel())
        try:
            await work
        except (APIError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError):
                if not gone.done():  # the server ends
                    raise
                error = APIError(499, "the client is gone")
            if not self._has_begun:
                raise error from None
            scope[REASON] = error.message
            if self.is_stream:  # otherwise uvicorn closes the connection: the answer is not whole
                await self._write(last_event(path, error.table(path)), more=False)
        finally:
            gone.cancel()

    async def _answer(self, path: str) -> None:
        self.front.check_open()
        with self.front.loader.using(self.model, self.keep_alive):
            child = await self._child(path)
            try:
                await self._relay(child, path)
            except NoAnswer as error:
                await asyncio.wait({child.ended}, timeout=ENDED_SECONDS)
                reason = child.reason if child.ended.done() else str(error)
                message = f"the model {self.model.name} does not answer: {reason}; ask again"
                raise APIError(503, message, headers=RETRY_AFTER) from error

    async def _child(self, path: str) -> Child:
        """The process of the model, once it is loaded. Raises APIError: it cannot be, or not in time."""
        limit = self.front.limits.load_timeout
        seconds = PING_SECONDS if self.is_stream else limit
        loading = asyncio.ensure_future(self.front.loader.loaded(self.model))
        try:
            while not (await asyncio.wait({loading}, timeout=seconds))[0]:
                if not self.is_stream:
                    message = f"the model {self.model.name} was not loaded after {limit:g} s (load_timeout)"
                    raise APIError(503, f"{message}: try again later", headers=RETRY_AFTER)
                if not self._has_begun:
                    await self._begin(HTTPStatus.OK, [(b"content-type", media_type(path)), *HEADERS])
                await self._write(ping(path))
            return loading.result()
        finally:
            loading.cancel()

    async def _relay(self, child: Child, path: str) -> None:
        query = self._scope["query_string"].decode("latin-1")
        target = quote(path) + (f"?{query}" if query else "")
        method = self._scope["method"].replace("HEAD", "GET")  # the server leaves the body of an answer to HEAD out
        async with request(child.socket, method, target, headers_for_child(self._scope), self.body) as answer:
            if self.changes_names:  # before the client has the answer, after which it may use the name
                self.model.served = await child.ready()
            if not self._has_begun:
                await self._begin(answer.status, [one for one in answer.headers if one[0] not in NOT_PASSED_BACK])
            elif answer.status != HTTPStatus.OK:
                event = last_event(path, APIError(answer.status, f"status {answer.status}").table(path))
                with suppress(msgspec.DecodeError, KeyError, TypeError):  # of a server that is broken
                    event = last_event(path, msgspec.json.decode(await answer.body()))
                await self._write(event, more=False)
                return
            answer.write_now = self._write_now
            async for piece in answer.pieces():
                await self._write(piece)
        await self._write(b"", more=False)

    # ---- to the client

    async def _begin(self, status: int, headers: Headers) -> None:
        self._is_chunked = all(name != b"content-length" for name, _ in headers)
        if self._scope["http_version"] == "1.0" and self._is_chunked:
            self._send = self._scope[CONNECTION].without_chunks(self._send)
        self._has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _write_now(self, body: bytes) -> bool:
        """Write a piece of a stream at once; False: it was not written, because the client does not read so fast."""
        if not (self._is_chunked and self._scope[CONNECTION].write_now(body)):
            return False
        self._scope[SENT] += len(body)
        return True

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
