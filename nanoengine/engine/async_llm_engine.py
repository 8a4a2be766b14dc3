"""AsyncLLMEngine: the loop in a thread of its own, for many callers on an event loop.

Whatever they want of the engine (submit, abort, read counters) goes into an inbox, which the thread empties between two steps:
nothing in the engine needs a lock. What a step brings goes back in one call for all its requests, so that a loop is woken once
a step, however many streams there are.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.metrics import EngineMetrics
from nanoengine.engine.request import Request
from nanoengine.engine.request_stream import RequestStream, failure_of
from nanoengine.errors import EngineClosed, EngineDead, InvalidRequest, InvalidSamplingParams
from nanoengine.outputs import Delta
from nanoengine.sampling_params import SamplingParams

logger = logging.getLogger("nanoengine")

T = TypeVar("T")

MOST_MESSAGES = 256
"""Messages that are handled between two steps: whoever asks without a pause must not keep the others from theirs."""

News = tuple[RequestStream, list[Delta], bool, Exception | None]
"""What a step brought a stream: its deltas, whether it is over, and what went wrong."""


@dataclass(frozen=True, slots=True)
class _Submit:
    stream: RequestStream


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str
    stream: RequestStream | None = None  # whose request it must be: a refused one may have the id of another


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[LLMEngine], Any]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class _Close:
    pass


Message = _Submit | _Abort | _Call | _Close


class AsyncLLMEngine:
    """An engine that steps while others wait for what they asked for.

    Args:
        make: makes the engine, (`build_async_engine` has one); nobody else may call it. It is made in the thread
            that it will live in: torch keeps a team of threads for every thread that it was used from, and two teams on the same
            cores disturb each other.

    Raises:
        Whatever `make` raises.
    """

    engine: LLMEngine

    def __init__(self, make: Callable[[], LLMEngine]):
        self.error: BaseException | None = None  # what the engine died of
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._streams: dict[str, RequestStream] = {}  # of the requests that run; the thread's own
        self._num_sent = 0  # sequences put into the inbox, counted by those who do
        self._num_received = 0  # and taken out, counted by the thread
        self._is_closing = False
        self._is_over = False  # nobody empties the inbox any more
        is_made = threading.Event()
        self._thread = threading.Thread(target=self._live, args=(make, is_made), name="nanoengine", daemon=True)
        self._thread.start()
        is_made.wait()
        if self.error is not None:
            raise self.error

    # ---- for callers on an event loop

    def make_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> Request:
        """`LLMEngine.make_request`, from any thread: it encodes the prompt and checks all, and nothing runs before `submit`. The
        request has arrived now: its times count from here.
        """
        self._check_alive()
        now = self.engine.clock()
        request = self.engine.make_request(prompt, params, request_id or f"request-{uuid.uuid4().hex}", **options)
        request.arrival_time = now
        return request

    def submit(self, request: Request, interval: int | None = 1) -> RequestStream:
        """Queue a request; called on the event loop that will await its stream.

        Args:
            request: from `make_request`.
            interval: see `RequestStream`.

        Raises:
            EngineDead, EngineClosed: nothing runs any more.
        """
        self._check_alive()
        stream = RequestStream(request, asyncio.get_running_loop(), interval)
        self._num_sent += request.params.num_sequences
        self._put(_Submit(stream))
        return stream

    def abort(self, request_id: str) -> None:
        """End a request before the next step, if it still runs; its stream ends with the finish reason "abort"."""
        self._put(_Abort(request_id))

    def cancel(self, stream: RequestStream) -> None:
        """`abort`, of the request that this is the stream of, and of no other by its id."""
        if not stream.is_over:
            self._put(_Abort(stream.request.request_id, stream))

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Delta, None]:
        """Complete one prompt, and yield what each step brings; closing the iterator early aborts the request.

        Args:
            prompt: text or token ids.
            params: how to sample; all its completions come in one stream, each delta with its index.
            options: see `LLMEngine.make_request`.

        Raises:
            InvalidPrompt, InvalidSamplingParams: as `LLM.generate`, or `best_of`, which is known only at the end.
            StepFailed, EngineDead: see `RequestStream.end`.
        """
        if params is not None and params.best_of is not None:
            raise InvalidSamplingParams(f"best_of is {params.best_of}: which of them are best is known only at the end")
        loop = asyncio.get_running_loop()
        request = await loop.run_in_executor(None, partial(self.make_request, prompt, params, **options))
        stream = self.submit(request)
        try:
            async for deltas in stream:
                for delta in deltas:
                    yield delta
        finally:
            self.cancel(stream)

    async def call(self, function: Callable[[LLMEngine], T]) -> T:
        """The result of a function of the engine, called in its thread between two steps."""
        self._check_alive()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._put(_Call(function, loop, answer))
        return await answer

    async def metrics(self) -> EngineMetrics:
        """All counters between two steps."""
        return await self.call(LLMEngine.metrics)

    @property
    def num_waiting(self) -> int:
        """Sequences that are not begun, or were preempted."""
        scheduler = self.engine.scheduler
        return self._num_sent - self._num_received + len(scheduler.waiting) + len(scheduler.fetching)

    def num_unfinished_of(self, client: str) -> int:
        """Sequences of a client that the engine has not ended."""
        return self.engine.scheduler.shares.num_unfinished[client]

    def close(self) -> None:
        """Abort what runs, give the memory back and end the thread. Waits for the step that runs; closing twice is allowed."""
        self._is_closing = True
        self._inbox.put(_Close())
        self._thread.join()

    def _put(self, message: Message) -> None:
        self._inbox.put(message)
        if self._is_over:  # it may have come too late
            self._refuse_messages()

    def _check_alive(self) -> None:
        if self._is_closing or self.error is not None:
            raise self._reason()

    # ---- the thread

    def _live(self, make: Callable[[], LLMEngine], is_made: threading.Event) -> None:
        try:
            self.engine = make()
        except BaseException as error:  # it is the caller's
            self.error = error
            return
        finally:
            is_made.set()
        self._run()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._empty_inbox()
                if self.engine.has_unfinished:
                    self._send([news for request in self.engine.step() if (news := self._news(request))])
        except BaseException as error:  # whatever it was: nobody may wait for a thread that is gone
            logger.exception("the engine died")
            self.error = error
        self._end()

    def _empty_inbox(self) -> None:
        """Do what was asked for, a bounded part of it while there are steps to make; with no other work, wait for it."""
        for _ in range(MOST_MESSAGES):
            if self._inbox.empty() and (self.engine.has_unfinished or self._is_closing):
                break
            self._handle(self._inbox.get())

    def _handle(self, message: Message) -> None:
        match message:
            case _Submit(stream):
                self._submit(stream)
            case _Abort(request_id, stream):
                own = self._streams.get(request_id)
                if own is None or (stream is not None and stream is not own):
                    return
                if self.engine.abort(request_id) and (news := self._news(own.request)):
                    self._send([news])
            case _Call(function, loop, answer):
                try:
                    settle = partial(_settle, answer, function(self.engine), None)
                except Exception as error:  # it is the caller's, who awaits it
                    settle = partial(_settle, answer, None, error)
                _call_soon(loop, settle)
            case _Close():
                pass  # it has woken the thread

    def _submit(self, stream: RequestStream) -> None:
        request = stream.request
        self._num_received += request.params.num_sequences
        try:
            self.engine.submit(request, arrival_time=request.arrival_time)
        except InvalidRequest as error:  # its id is in use
            _call_soon(stream.loop, partial(stream.deliver, [], True, error))
            return
        self._streams[request.request_id] = stream

    def _news(self, request: Request) -> News | None:
        """What its stream must hear; None if there is nothing."""
        stream = self._streams.get(request.request_id)
        if stream is None:
            return None
        deltas = stream.collect()
        if request.finished:
            del self._streams[request.request_id]
            return stream, deltas, True, failure_of(request)
        return (stream, deltas, False, None) if deltas else None

    def _send(self, news: list[News]) -> None:
        """One call for all streams of a loop; there is hardly ever a second loop."""
        for loop in {stream.loop for stream, *_ in news}:
            items = [item for item in news if item[0].loop is loop]
            if not _call_soon(loop, partial(_deliver, items)):
                for stream, *_ in items:  # the loop is closed: nobody is there any more
                    self._streams.pop(stream.request.request_id, None)
                    self.engine.abort(stream.request.request_id)

    def _end(self) -> None:
        """Abort what runs, close the engine, and tell everybody who still waits."""
        try:
            if self.error is None:
                for request_id in list(self._streams):
                    self._handle(_Abort(request_id))
            self.engine.close()
        except (
            BaseException
        ) as error:  # of an engine that may be broken already: those who wait must hear of it all the same
            logger.exception("the engine could not be closed")
            self.error = self.error or error
        self._is_over = True
        for stream in self._streams.values():
            _call_soon(stream.loop, partial(stream.deliver, [], True, self._reason()))
        self._streams.clear()
        self._refuse_messages()

    def _refuse_messages(self) -> None:
        """Whoever sent something too late must not wait for it."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            if isinstance(message, _Submit):
                stream = message.stream
                _call_soon(stream.loop, partial(stream.deliver, [], True, self._reason()))
            elif isinstance(message, _Call):
                _call_soon(message.loop, partial(_settle, message.answer, None, self._reason()))

    def _reason(self) -> EngineDead | EngineClosed:
        """Why nothing runs any more."""
        if self.error is None:
            return EngineClosed("the engine is closed: make a new one")
        reason = EngineDead(f"the engine died of {type(self.error).__name__}: {self.error}; start it anew")
        reason.__cause__ = self.error
        return reason


def _deliver(news: list[News]) -> None:
    for stream, deltas, is_over, error in news:
        stream.deliver(deltas, is_over, error)


def _settle(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if answer.done():  # nobody waits any more
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> bool:
    """Call a function on a loop; False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        return False
    return True
