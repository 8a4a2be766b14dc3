"""Job: the engine's work for one HTTP request. It ends with its answer, its client, its time limit or the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.types import Receive

from nanoengine.core.sequence import Request
from nanoengine.serve.aio.async_llm_engine import AsyncLLMEngine
from nanoengine.serve.aio.request_stream import Delta
from nanoengine.serve.server.errors import APIError

R = TypeVar("R")

MOST_AT_ONCE = 64
"""Deltas that are handled before other tasks of the event loop run: a slow reader may have thousands."""

LAST_EVENT_SECONDS = 2
"""Seconds after a job was aborted, in which a slow client may read the last event. Then the connection is closed."""


class Job:
    """The engine's requests for one HTTP request.

    Args:
        job_id: the id of the answer.
        engine: computes them.
        requests: one for each prompt.
        interval: see `RequestStream`.
        begun: called with each request when one of its completions has begun.
    """

    def __init__(
        self,
        job_id: str,
        engine: AsyncLLMEngine,
        requests: Sequence[Request],
        interval: int | None,
        begun: Callable[[Request], object],
    ):
        self.job_id = job_id
        self.problem: APIError | None = None  # the error that ends the answer
        # Writes bytes to the client at once; False: its socket is full
        self.write_now: Callable[[bytes], bool] = lambda _: False
        self._engine = engine
        self.requests = list(requests)
        self._streams = [engine.submit(request, interval, partial(begun, request)) for request in requests]

    def take_now(self, take: Callable[[list[Delta]], bool]) -> None:
        """See `RequestStream.take_now`; of one prompt, since those of several wait for each other."""
        if len(self._streams) == 1:
            self._streams[0].take_now = take

    @property
    def num_cached_tokens(self) -> int:
        """The number of prompt tokens that were in the prefix cache, of the sequences that have begun."""
        return sum(request.sequences[0].num_cached_tokens or 0 for request in self.requests)

    def abort(self, problem: APIError | None = None) -> None:
        """End what still runs; without a problem, the client gets what there is, with the finish reason "abort"."""
        self.problem = self.problem or problem
        for stream in self._streams:
            self._engine.cancel(stream)

    def fail(self, problem: APIError) -> None:
        """End with an error that the client gets at once, although the step that runs may take long."""
        self.abort(problem)
        for stream in self._streams:
            stream.deliver([], True, problem)

    async def end(self) -> None:
        """Wait until all requests have ended; `requests` then hold the results.

        Raises:
            StepFailed, EngineDead: see `RequestStream.end`.
            APIError: what it was aborted with.
        """
        for stream in self._streams:
            await stream.end()
        if self.problem is not None:
            raise self.problem

    async def deltas(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """Lists of deltas since the last list, each delta with the number of its prompt. Raises as `end`."""
        async for news in self._news():
            for start in range(0, len(news), MOST_AT_ONCE):
                yield news[start : start + MOST_AT_ONCE]
                if len(news) > MOST_AT_ONCE:
                    await asyncio.sleep(0)
        if self.problem is not None:
            raise self.problem

    async def _news(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        if len(self._streams) == 1:
            async for deltas in self._streams[0]:
                yield [(0, delta) for delta in deltas]
            return
        waiting = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(self._streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                news: list[tuple[int, Delta]] = []
                for task in done:
                    number = waiting.pop(task)
                    with contextlib.suppress(StopAsyncIteration):
                        news += [(number, delta) for delta in task.result()]
                        waiting[asyncio.ensure_future(anext(self._streams[number]))] = number
                yield news
        finally:
            for task in waiting:
                task.cancel()


class Jobs:
    """All jobs that run.

    Args:
        timeout: seconds that a request may take; None: as long as it takes.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = timeout
        self._jobs: dict[Job, asyncio.Task[None] | None] = {}  # the task that makes the answer
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return len(self._jobs)

    @asynccontextmanager
    async def running(self, job: Job, receive: Receive) -> AsyncIterator[None]:
        """The context in which the answer of a job is made.

        The job is aborted when its client hangs up, when its time is over, and when the context is left.
        """
        self._jobs[job] = asyncio.current_task()
        self._none.clear()
        loop = asyncio.get_running_loop()
        client = loop.create_task(disconnected(receive))
        client.add_done_callback(
            lambda task: None if task.cancelled() else job.abort(APIError(499, "the client is gone"))
        )
        clock = None
        if self._timeout is not None:
            clock = loop.call_later(self._timeout, self._end, job, overdue(self._timeout))
        try:
            yield
        finally:
            if clock is not None:
                clock.cancel()
            client.cancel()
            job.abort()
            del self._jobs[job]
            if not self._jobs:
                self._none.set()

    async def while_connected(self, receive: Receive, work: Coroutine[Any, Any, R]) -> R:
        """The result of work before there is a job. It is cancelled when the client hangs up, and when its time is over.

        Raises:
            APIError: the client is gone, or the time is over.
        """
        making, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
        try:
            timeout = self._timeout
            await asyncio.wait((making, gone), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if making.done():
                return making.result()
            raise APIError(499, "the client is gone") if timeout is None or gone.done() else overdue(timeout)
        finally:
            gone.cancel()
            making.cancel()

    def abort(
        self, job_ids: Sequence[str] | None = None, client: str | None = None, problem: APIError | None = None
    ) -> int:
        """Abort jobs, and return their number.

        Args:
            job_ids: ids of answers or of the engine's requests; None: all jobs.
            client: jobs of this client alone; None: of all clients.
            problem: see `Job.fail`; None: see `Job.abort`.
        """
        wanted = None if job_ids is None else set(job_ids)
        matching = [
            job
            for job in self._jobs
            if (wanted is None or not wanted.isdisjoint((job.job_id, *(r.request_id for r in job.requests))))
            and client in (None, job.requests[0].client)
        ]
        for job in matching:
            job.abort() if problem is None else job.fail(problem)
        return len(matching)

    def cut_off(self, *jobs: Job) -> None:
        """Cancel the tasks that make answers, although their clients do not read; without arguments those of all jobs."""
        for job in jobs or list(self._jobs):
            if (task := self._jobs.get(job)) is not None:
                job.abort()
                task.cancel()

    def _end(self, job: Job, problem: APIError) -> None:
        job.fail(problem)
        asyncio.get_running_loop().call_later(LAST_EVENT_SECONDS, self.cut_off, job)

    async def none_left(self) -> None:
        """Wait until no job runs."""
        await self._none.wait()


def overdue(timeout: float) -> APIError:
    """The error of a request that has reached its time limit, in seconds."""
    return APIError(
        504, f"the request has taken {timeout:g} s, which is its limit: ask for fewer tokens, or raise request_timeout"
    )


async def disconnected(receive: Receive) -> None:
    """Wait until the client has hung up; its request was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
