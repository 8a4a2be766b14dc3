"""EventStream: a streamed response, made from the deltas of a job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import ClassVar

from starlette.requests import Request as HTTPRequest
from starlette.types import Receive, Scope, Send

from nanoengine.serve.server.apis.json_response import encode
from nanoengine.serve.server.errors import REASON, APIError, api_error_of
from nanoengine.serve.server.jobs import Job, Jobs
from nanoengine.serve.server.scope import CONNECTION, SENT

logger = logging.getLogger("nanoengine.serve.server")

DONE = b"data: [DONE]\n\n"

COMMENT = b": ping\n\n"
"""A line that every reader of server-sent events skips."""

PING_SECONDS = 10
"""Seconds of silence after which a stream sends a ping."""

HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
]


class StreamFormat:
    """The shape of a stream that is no event of an answer. Subclasses are the shapes of interfaces."""

    media_type: ClassVar[bytes] = b"text/event-stream; charset=utf-8"
    ping: ClassVar[bytes] = COMMENT
    """Sent after `PING_SECONDS` of silence: proxies and some clients give up on a silent stream."""
    done: ClassVar[bytes] = b""
    """The last bytes."""

    def failed(self, problem: APIError) -> bytes:
        """The last event of a stream that an error ends."""
        return b"data: " + encode(problem.table()) + b"\n\n"


class EventStream:
    """Sends the events of a job as they come, and ends the job with the client.

    Args:
        jobs: all that run: they are ended at shutdown.
        job: its deltas become the events.
        events: the bytes of the events.
        format: of the stream.
    """

    def __init__(self, jobs: Jobs, job: Job, events: AsyncIterator[bytes], format: StreamFormat):
        self._jobs, self._job, self._events, self._format = jobs, job, events, format
        self._headers = [(b"content-type", format.media_type), *HEADERS]
        self._was_silent = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(body: bytes, more: bool = True) -> None:
            self._was_silent = False
            await send({"type": "http.response.body", "body": body, "more_body": more})

        def write_now(body: bytes) -> bool:
            if not scope[CONNECTION].write_now(body):
                return False
            scope[SENT] += len(body)
            self._was_silent = False
            return True

        if CONNECTION in scope:  # served by BoundedHTTP
            self._job.write_now = write_now
            if scope["http_version"] == "1.0":
                send = scope[CONNECTION].without_chunks(send)
        async with self._jobs.running(self._job, receive):
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            pinging = asyncio.create_task(self._keep_alive(write))
            try:
                async for event in self._events:
                    await write(event)
            except Exception as error:  # the status is sent: whatever it was, the stream must say so
                problem = api_error_of(error)
                scope[REASON] = problem.message
                if problem.status >= 500:
                    trace = None if isinstance(error, APIError) else error
                    logger.error("%s: %s", HTTPRequest(scope).url.path, error, exc_info=trace)
                await write(self._format.failed(problem))
            finally:
                pinging.cancel()
            await write(self._format.done, more=False)

    async def _keep_alive(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        while True:
            self._was_silent = True
            await asyncio.sleep(PING_SECONDS)
            if self._was_silent:
                await write(self._format.ping)
