"""How answers are sent: in one piece, or as a stream of events."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanoengine.server.errors import problem_of
from nanoengine.server.jobs import Job
from nanoengine.server.serving import Serving
from nanoengine.server.sse import DONE, HEADERS, error_event

logger = logging.getLogger("nanoengine.server")


def json_response(body: bytes) -> Response:
    return Response(body, media_type="application/json")


class EventStream:
    """Sends the events of a job as they come, and ends the job with the client.

    Args:
        serving: watches over the job.
        job: whose answer it is.
        events: makes the answer, from the job's deltas.
    """

    def __init__(self, serving: Serving, job: Job, events: AsyncIterator[bytes]):
        self._serving = serving
        self._job = job
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serving = self._serving
        async with serving.jobs.running(self._job, receive, serving.config.request_timeout):
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            try:
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:  # the status is sent: whatever it was, the stream must say so
                problem = problem_of(error)
                if problem.status >= 500:
                    logger.error("%s: %s", HTTPRequest(scope).url.path, error, exc_info=error)
                await send({"type": "http.response.body", "body": error_event(problem.body()), "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
