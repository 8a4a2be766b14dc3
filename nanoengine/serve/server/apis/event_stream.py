"""EventStream: a streamed response, made from the deltas of a job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.requests import Request as HTTPRequest
from starlette.types import Receive, Scope, Send

from nanoengine.serve.server.apis.json_response import encode
from nanoengine.serve.server.errors import REASON, APIError, api_error_of
from nanoengine.serve.server.jobs import Job
from nanoengine.serve.server.scope import CONNECTION, SENT
from nanoengine.serve.server.served_model import ServedModel

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


class EventStream:
    """Sends the events of a job as they come, and ends the job with the client.

    Args:
        serving: the served model, whose jobs are ended at shutdown.
        job: its deltas become the events.
        events: the bytes of the events.
        failed: makes the last event of a stream that an error ends.
        done: the last bytes.
        ping: sent after `PING_SECONDS` of silence: proxies and some clients give up on a silent stream.
        media_type: of the stream.
    """

    def __init__(
        self,
        serving: ServedModel,
        job: Job,
        events: AsyncIterator[bytes],
        *,
        failed: Callable[[APIError], bytes] = lambda problem: b"data: " + encode(problem.table()) + b"\n\n",
        done: bytes = DONE,
        ping: bytes = COMMENT,
        media_type: bytes = b"text/event-stream; charset=utf-8",
    ):
        self._serving, self._job, self._events = serving, job, events
        self._failed, self._done, self._ping = failed, done, ping
        self._headers = [(b"content-type", media_type), *HEADERS]
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
        async with self._serving.jobs.running(self._job, receive, self._serving.config.request_timeout):
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
                await write(self._failed(problem))
            finally:
                pinging.cancel()
            await write(self._done, more=False)

    async def _keep_alive(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        while True:
            self._was_silent = True
            await asyncio.sleep(PING_SECONDS)
            if self._was_silent:
                await write(self._ping)
