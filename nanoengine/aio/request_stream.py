"""RequestStream: the results of one request, carried from the engine's thread to a reader on an event loop."""

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
"""Lists of deltas that wait for a reader. What comes then stays in the sequences until these are taken."""


@dataclass(slots=True)
class Delta:
    """What is new of one completion: it goes on where the delta before ends. `finish_reason` comes with the last."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Any] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


@dataclass(slots=True)
class _Cursor:
    """How much of one completion was handed out."""

    seq: Sequence
    num_tokens: int = 0
    num_chars: int = 0
    is_over: bool = False

    def take(self, least: int) -> Delta | None:
        """What is new; None if nothing is, or fewer than `least` tokens of a completion that goes on and has begun."""
        seq, is_over = self.seq, self.seq.finished
        assert seq.detokenizer is not None
        num_tokens = len(seq.token_ids) - seq.num_prompt_tokens
        num_new = num_tokens - self.num_tokens
        if not is_over and (num_new == 0 or (num_new < least and self.num_tokens)):
            return None
        tokens = seq.token_ids[seq.num_prompt_tokens + self.num_tokens :]
        logprobs = None if seq.logprobs is None else seq.logprobs[self.num_tokens : num_tokens]
        text = seq.detokenizer.text_from(self.num_chars)
        delta = Delta(
            index=seq.index,
            text=text,
            token_ids=tokens,
            logprobs=seq.params.shown_logprobs(logprobs, tokens)[0],
            finish_reason=seq.finish_reason if is_over else None,
            stop_reason=seq.stop_reason if is_over else None,
        )
        self.num_tokens, self.num_chars, self.is_over = num_tokens, self.num_chars + len(text), is_over
        return delta


class RequestStream:
    """The deltas of one request, as an asynchronous iterator of lists: each list has all deltas since the one before.

    A slow reader loses nothing and holds nobody up: a few lists that were not taken yet wait here, and the next has the rest.

    Args:
        request: not submitted yet.
        loop: where it is awaited.
        interval: tokens of a completion that are handed out together; its first one and its last ones come at once. None: only
            the end is told.
    """

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop, interval: int | None = 1):
        self.request = request
        self.loop = loop
        self.interval = interval
        self._cursors: list[_Cursor] = []  # the engine's; the rest belongs to the loop
        self._deltas: list[Delta] = []
        self._num_unread = 0  # lists of them
        self.take_now: Callable[[list[Delta]], bool] | None = None
        """What need not wake a reader who waits: takes the deltas of a step at once, unless it answers False."""
        self.is_over = False  # all of it has arrived
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ---- in the thread of the engine

    def collect(self) -> list[Delta]:
        """What is new since the last call."""
        if self.interval is None or (self._num_unread >= MOST_UNREAD and not self.request.finished):
            return []
        if not self._cursors:
            self._cursors = [_Cursor(seq) for seq in self.request.sequences]
        interval = self.interval
        return [d for cursor in self._cursors if not cursor.is_over and (d := cursor.take(interval)) is not None]

    def end_with(self, error: Exception) -> None:
        """Nothing comes any more."""
        call_soon(self.loop, partial(self.deliver, [], True, error))

    # ---- on the loop

    def deliver(self, deltas: list[Delta], is_over: bool, error: BaseException | None = None) -> None:
        """Take what has come, and wake the reader."""
        if self.is_over:
            return
        has_reader = self._waiter is not None and not self._waiter.done()
        if has_reader and not is_over and self.take_now is not None and self.take_now(deltas):
            return
        self._deltas += deltas
        self._num_unread += 1
        self.is_over, self._error = is_over, error
        if self._waiter is not None and not self._waiter.done():
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
    """What the caller of a failed request is told; None if it has not failed."""
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
