"""AsyncLLMEngine: an engine whose steps run in a separate thread, for many callers on event loops.

Calls (submit, abort, functions of the engine) go into an inbox, which the thread empties between two steps: the engine needs no
lock. Those of one client are done in order, and those of several clients in turn. The news of a step go back in one call
for all its requests, so that a loop is woken once a step, however many streams there are.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import chain
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from nanoengine.builder import Built, build_engine, read_config
from nanoengine.core.errors import EngineClosed, InvalidSamplingParams
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.sequence import Request
from nanoengine.errors import EngineDead
from nanoengine.serve.aio.request_stream import Delta, RequestStream, call_soon, failure_of

if TYPE_CHECKING:
    from nanoengine.features.lora.request import LoRARequest

logger = logging.getLogger("nanoengine")

T = TypeVar("T")

MOST_MESSAGES = 32
"""Most messages that are handled between two steps: callers who ask without a pause must not stop the steps."""

DELIVERY_SECONDS = 2e-3
"""The longest time that the next step waits for the loop to deliver the results of the last one. Both at once take longer than
one after the other: they disturb each other's cores, caches and interpreter lock."""

News = tuple[RequestStream, list[Delta], bool, Exception | None]
"""The results of a step for one stream: the stream, its deltas, whether it is over, and its error."""


class _Message(NamedTuple):
    """A call for the thread, a call that refuses it if the thread has ended, and the client of the call."""

    do: Callable[[], object]
    refuse: Callable[[Exception], object] = lambda _: None
    client: str = ""


class AsyncLLMEngine:
    """An engine that steps in a separate thread while callers await their results.

    Args:
        make: makes the engine; nobody else may use that. It is called in the thread that steps: torch keeps a team of threads for
            every thread that it was used from, and two teams on the same cores disturb each other.

    Raises:
        Exception: whatever `make` raises.
    """

    engine: LLMEngine
    built: Built  # what `from_model` and `of` have built

    def __init__(self, make: Callable[[], LLMEngine]):
        self.error: BaseException | None = None  # that has ended the engine
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        # The thread alone uses these two:
        self._lines: dict[str, deque[_Message]] = {}  # messages that wait for their turn, by client
        self._streams: dict[str, RequestStream] = {}  # of the requests that run, by request id
        self._num_sent = 0  # sequences that were put into the inbox, counted by the callers
        self._num_received = 0  # sequences that were removed from it, counted by the thread
        self._step_began: float | None = None  # the time at which the running step began
        self._is_closing = False
        self.is_ending = False  # no more steps are made, and the engine is being closed, which may write files
        self._is_over = False  # nobody empties the inbox any more
        is_made = threading.Event()
        self._thread = threading.Thread(target=self._live, args=(make, is_made), name="nanoengine", daemon=True)
        self._thread.start()
        is_made.wait()
        if self.error is not None:
            raise self.error

    @classmethod
    def from_model(cls, model: str = "demo", *, use_tqdm: bool = True, **options: Any) -> AsyncLLMEngine:
        """An engine for a model. Arguments and errors as for `LLM`."""
        return cls.of(partial(build_engine, read_config(model, options), use_tqdm))

    @classmethod
    def of(cls, build: Callable[[], Built]) -> AsyncLLMEngine:
        """An engine that a function builds, which is called in the engine's thread. Raises what it raises."""
        parts: list[Built] = []

        def make() -> LLMEngine:
            parts.append(build())
            return parts[0].engine

        running = cls(make)
        running.built = parts[0]
        return running

    # ---- for callers on an event loop

    def make_request(
        self,
        prompt: str | Sequence[int],
        params: CoreSamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> Request:
        """`LLMEngine.make_request`, from any thread: it encodes the prompt and checks all, and nothing runs before `submit`. The
        request has arrived now: its times count from here.

        Args:
            lora_request: the adapter of the request.
        """
        self._check_alive()
        now = time.perf_counter()
        request = self.engine.make_request(prompt, params, request_id or f"request-{uuid.uuid4().hex}", **options)
        request.arrival_time = now
        if lora_request is not None:
            from nanoengine.features.lora.adapters import adapters_of  # who has such a request has it

            adapters_of(self.engine.scheduler.parts).use_for_requests([request], lora_request)
        return request

    def submit(
        self, request: Request, interval: int | None = 1, begun: Callable[[], object] = lambda: None
    ) -> RequestStream:
        """Queue a request; called on the event loop that will await its stream.

        Args:
            request: from `make_request`.
            interval: see `RequestStream`.
            begun: see `RequestStream`.

        Raises:
            EngineDead, EngineClosed: nothing runs any more.
        """
        self._check_alive()
        stream = RequestStream(request, asyncio.get_running_loop(), interval, begun)
        self._num_sent += request.params.num_sequences
        self._put(_Message(partial(self._submit, stream), stream.end_with, request.client))
        return stream

    def abort(self, request_id: str, client: str = "") -> None:
        """End a request of a client, if it still runs; its stream ends with the finish reason "abort"."""
        self._put(_Message(partial(self._abort, request_id), client=client))

    def cancel(self, stream: RequestStream) -> None:
        """Abort the request of a stream, and no other of the same id."""
        if not stream.is_over:
            request = stream.request
            self._put(_Message(partial(self._abort, request.request_id, stream), client=request.client))

    async def generate(
        self, prompt: str | Sequence[int], params: CoreSamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Delta, None]:
        """Complete one prompt, and yield the deltas of each step; closing the iterator early aborts the request.

        Args:
            prompt: text or token ids.
            params: how to sample; all its completions come in one stream, each delta with its index.
            options: see `make_request`.

        Raises:
            InvalidPrompt, InvalidSamplingParams: as `LLM.generate`, or `best_of`, which is known only at the end.
            StepFailed, EngineDead: see `RequestStream.end`.
        """
        if params is not None and params.num_sequences != params.n:
            raise InvalidSamplingParams(
                "best_of", f" is {params.num_sequences}: which completions are best is known only at the end"
            )
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
        """The result of a function of the engine, called in its thread between two steps, unless nobody awaits it any more."""
        self._check_alive()
        answer = Future[T]()
        refuse = lambda error: answer.set_running_or_notify_cancel() and answer.set_exception(error)  # type: ignore[func-returns-value]  # noqa: E731
        self._put(_Message(partial(self._call, function, answer), refuse))
        return await asyncio.wrap_future(answer)

    @property
    def num_waiting(self) -> int:
        """The number of sequences that have not begun, or were preempted."""
        return self._num_sent - self._num_received + len(self.engine.scheduler.waiting)

    @property
    def seconds_in_step(self) -> float:
        """Seconds since the running step began; 0.0: none runs."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """Abort what runs, give the memory back and end the thread. Waits for the step that runs; closing twice is allowed."""
        self._is_closing = True
        self._inbox.put(_Message(lambda: None))  # it wakes the thread
        self._thread.join()

    def _put(self, message: _Message) -> None:
        self._inbox.put(message)
        if self._is_over:  # it may have come too late
            self._refuse_messages()

    def _check_alive(self) -> None:
        if self._is_closing or self.error is not None or not self._thread.is_alive():  # nor is it in a fork
            raise self._reason()

    # ---- the thread

    def _live(self, make: Callable[[], LLMEngine], is_made: threading.Event) -> None:
        try:
            self.engine = make()
            self._inbox = getattr(self.engine, "inbox", self._inbox)  # one that waits for other things, too
        except BaseException as error:  # it is the caller's
            self.error = error
            return
        finally:
            is_made.set()
        try:
            while not self._is_closing:
                self._empty_inbox()
                if self.engine.has_unfinished:
                    self._step_began = time.monotonic()
                    touched = self.engine.step()
                    self._step_began = None
                    self._send([news for request in touched if (news := self._news(request))])
        except BaseException as error:  # whatever it was: nobody may wait for a thread that is gone
            logger.exception("the engine died")
            self.error = error
        self._end()

    def _empty_inbox(self) -> None:
        """Do calls, one of each client in turn: a request of many prompts comes in as many calls, and nobody else may wait for
        all of them. If there are steps to make, `MOST_MESSAGES` at most; without steps, wait for a call.
        """
        lines = self._lines
        for _ in range(MOST_MESSAGES):
            while not self._inbox.empty() or not (lines or self.engine.has_unfinished or self._is_closing):
                message = self._inbox.get()
                lines.setdefault(message.client, deque()).append(message)
            if not lines:
                break
            client = next(iter(lines))
            line = lines.pop(client)
            message = line.popleft()
            if line:
                lines[client] = line  # behind those of all others
            message.do()

    def _abort(self, request_id: str, stream: RequestStream | None = None) -> None:
        """Abort a request; with a stream, only the request of this stream, and no other of the same id."""
        running = self._streams.get(request_id)
        if running is None or (stream is not None and stream is not running):
            return
        if self.engine.abort(request_id) and (news := self._news(running.request)):
            self._send([news], waits=False)

    def _call(self, function: Callable[[LLMEngine], T], answer: Future[T]) -> None:
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(function(self.engine))
            except Exception as error:  # it is the caller's, who awaits it
                answer.set_exception(error)

    def _submit(self, stream: RequestStream) -> None:
        request = stream.request
        self._num_received += request.params.num_sequences
        try:
            self.engine.submit(request)
        except Exception as error:  # its id is in use, or a part of the engine raised in the middle
            stream.end_with(error)
            if self.engine.requests.get(request.request_id) is request:
                self.engine.abort(request.request_id)
            return
        self._streams[request.request_id] = stream

    def _news(self, request: Request) -> News | None:
        """The news for the stream of a request; None: there are none."""
        stream = self._streams.get(request.request_id)
        if stream is None:
            return None
        try:
            deltas = stream.collect()
        except Exception as error:  # raised by functions of its parameters: it ends this request alone
            del self._streams[request.request_id]
            self.engine.abort(request.request_id)
            return stream, [], True, error
        if request.finished:
            del self._streams[request.request_id]
            return stream, deltas, True, failure_of(request)
        return (stream, deltas, False, None) if deltas else None

    def _send(self, news: list[News], *, waits: bool = True) -> None:
        """One call for all streams of a loop; there is hardly ever a second loop. Waits until they have it, but not for long."""
        for loop in {stream.loop for stream, *_ in news}:
            items = [item for item in news if item[0].loop is loop]
            is_delivered = threading.Lock()
            is_delivered.acquire()
            if call_soon(loop, partial(_deliver, items, is_delivered.release)):
                if waits:
                    is_delivered.acquire(timeout=DELIVERY_SECONDS)
            else:
                for stream, *_ in items:  # the loop is closed: nobody is there any more
                    if self._streams.get(stream.request.request_id) is stream:
                        del self._streams[stream.request.request_id]
                        self.engine.abort(stream.request.request_id)

    def _end(self) -> None:
        """Abort what runs, close the engine, and tell everybody who still waits."""
        self._step_began, self.is_ending = None, True
        try:
            try:
                for request_id in list(self._streams) if self.error is None else ():
                    self._abort(request_id)
            finally:
                self.engine.close()
        except BaseException as error:  # it may be broken already; callers that wait get the error all the same
            logger.error("the engine could not be closed", exc_info=error)
            self.error = self.error or error
        self._is_over, self.is_ending = True, False
        for stream in self._streams.values():
            stream.end_with(self._reason())
        self._streams.clear()
        for message in chain(*self._lines.values()):
            message.refuse(self._reason())
        self._refuse_messages()

    def _refuse_messages(self) -> None:
        """Refuse the messages that came after the end of the thread, so that nobody waits for ever."""
        with suppress(Empty):
            while True:
                self._inbox.get_nowait().refuse(self._reason())

    def _reason(self) -> EngineDead | EngineClosed:
        """The error for callers of an engine that has ended."""
        if self.error is None:
            return EngineClosed("the engine is closed: make a new one")
        reason = EngineDead(f"the engine died of {type(self.error).__name__}: {self.error}; start it anew")
        reason.__cause__ = self.error
        return reason


def _deliver(news: list[News], done: Callable[[], object]) -> None:
    for stream, deltas, is_over, error in news:
        stream.deliver(deltas, is_over, error)
    news[0][0].loop.call_soon(done)  # behind the readers who were woken
