"""RequestStream: carries the results of one request from the engine's thread to a reader on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from nanoengine.core.errors import StepFailed
from nanoengine.core.outputs import FinishReason
from nanoengine.core.sequence import Request, Sequence

MOST_UNREAD = 64
"""The most lists of deltas that wait for a reader. Later results stay in the sequences until these are read."""


@dataclass(slots=True)
class Delta:
    """The part of one completion behind the delta before. The last one has the `finish_reason`."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Any] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


@dataclass(slots=True)
class _DeltaCursor:
    """The part of one completion that was handed out."""

    seq: Sequence
    num_tokens: int = 0
    num_chars: int = 0
    is_over: bool = False

    def take(self, least: int) -> Delta | None:
        """The part behind the cursor; None: it is empty, or it is in the middle and has fewer than `least` tokens."""
        seq, is_over = self.seq, self.seq.finished
        num_tokens = len(seq.token_ids) - seq.num_prompt_tokens
        num_new = num_tokens - self.num_tokens
        if not is_over and (num_new == 0 or (num_new < least and self.num_tokens)):
            return None
        tokens = seq.token_ids[seq.num_prompt_tokens + self.num_tokens :]
        logprobs = None if seq.logprobs is None else seq.logprobs[self.num_tokens : num_tokens]
        text = seq.text_from(self.num_chars)
        delta = Delta(
            index=seq.index,
            text=text,
            token_ids=tokens,
            logprobs=seq.params.returned_logprobs(logprobs, tokens)[0],
            finish_reason=seq.finish_reason if is_over else None,
            stop_reason=seq.stop_reason if is_over else None,
        )
        self.num_tokens, self.num_chars, self.is_over = num_tokens, self.num_chars + len(text), is_over
        return delta


class RequestStream:
    """The deltas of one request, as an asynchronous iterator of lists: each list has all deltas since the one before.

    A slow reader loses nothing and delays nobody: a few lists that were not read yet wait here, and the next has the rest.

    Args:
        request: not submitted yet.
        loop: where it is awaited.
        interval: the least tokens of a delta; the first token and the last ones come at once. None: there is only the first.
        begun: called on the loop for each completion that has its first token, or has ended without any.
    """

    def __init__(
        self,
        request: Request,
        loop: asyncio.AbstractEventLoop,
        interval: int | None = 1,
        begun: Callable[[], object] = lambda: None,
    ):
        self.request = request
        self.loop = loop
        self.interval = interval
        self._cursors: list[_DeltaCursor] = []  # the engine's; the rest belongs to the loop
        self._begun = begun
        self._to_begin = set(range(request.params.num_sequences))
        self._deltas: list[Delta] = []
        self._num_unread = 0  # lists of them
        self.take_now: Callable[[list[Delta]], bool] | None = None
        """Called on the loop with the deltas of a step, if a reader waits; the reader is woken only if this returns False."""
        self.is_over = False  # all results have arrived
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ---- in the thread of the engine

    def collect(self) -> list[Delta]:
        """The deltas since the last call."""
        if not self._cursors:
            self._cursors = [_DeltaCursor(seq) for seq in self.request.sequences]
        cursors, least = self._cursors, self.interval
        if least is None or (self._num_unread >= MOST_UNREAD and not self.request.finished):
            cursors, least = [cursor for cursor in cursors if not cursor.num_tokens], 1
        return [d for cursor in cursors if not cursor.is_over and (d := cursor.take(least)) is not None]

    def end_with(self, error: Exception) -> None:
        """End the stream with an error."""
        call_soon(self.loop, partial(self.deliver, [], True, error))

    # ---- on the loop

    def deliver(self, deltas: list[Delta], is_over: bool, error: BaseException | None = None) -> None:
        """Take deltas, and wake the reader. An error of `begun` or `take_now` goes to the reader, and to nobody else."""
        if self.is_over or self._error is not None:
            return
        has_reader = self._waiter is not None and not self._waiter.done()
        try:
            for index in self._to_begin & {delta.index for delta in deltas} if self._to_begin else ():
                self._to_begin.remove(index)
                self._begun()
            if has_reader and not is_over and self.take_now is not None and self.take_now(deltas):
                return
        except Exception as raised:
            deltas, error = [], raised
        self._deltas += deltas
        self._num_unread += 1
        self.is_over, self._error = is_over, error
        if self._waiter is not None and has_reader:
            self._waiter.set_result(None)

    async def end(self) -> None:
        """Wait until the request has ended; its result is `request.output()`.

        Raises:
            StepFailed: an exception inside a step ended it.
            EngineDead: the engine can go on with no request.
        """
        async for _ in self:
            pass

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[Delta]:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self.is_over:
                raise StopAsyncIteration
            self._waiter = self.loop.create_future()
            await self._waiter
        deltas, self._deltas, self._num_unread = self._deltas, [], 0
        return deltas


def failure_of(request: Request) -> StepFailed | None:
    """The error for the caller of a failed request; None: the request has not failed."""
    if request.error is None:
        return None
    failure = StepFailed(f"the request failed: {request.error}", [request.output()])
    failure.__cause__ = request.error
    return failure


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> bool:
    """Call a function on a loop, from another thread; False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        return False
    return True
