"""Replica: a whole engine, and what it takes and says as messages. Where these come from and go to is its caller's business."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.sequence import Request, Sequence
from nanoengine.observability.kv_events import AllCleared, BlockStored, KVEvent, KVEventPublisher
from nanoengine.replicas.messages import (
    Abort,
    Delta,
    Equip,
    Finish,
    Forget,
    KVChange,
    News,
    Ping,
    Resumable,
    Submit,
    TellCached,
)
from nanoengine.worker.child import portable

EMBEDDING = "embedding"
"""In `Sequence.state`: what an embedding request asks for."""


@dataclass(slots=True)
class Held:
    """A request, and how much of each completion was told."""

    key: int
    request: Request
    num_tokens: dict[int, int]
    num_chars: dict[int, int]
    wants_prompt_logprobs: bool


class Adapters(Protocol):
    """What the front says that requests need: see `lora/adapters.py`."""

    def keep(self, adapters: Mapping[str, Any], drops: Collection[str]) -> None: ...
    def give(self, request: Request, digest: str) -> None: ...


class Replica:
    """Requests come as `Resumable`; after each step, `News` say what it has brought.

    Args:
        engine: nobody else uses it.
        events: of its prefix cache; None: nothing is told of it.
        count: what the engine counts, when somebody asks.
        adapters: None: it takes none.
    """

    def __init__(
        self,
        engine: LLMEngine,
        events: KVEventPublisher | None = None,
        count: Callable[[], Any] = lambda: None,
        adapters: Adapters | None = None,
    ):
        self.engine, self.events, self.count, self.adapters = engine, events, count, adapters
        self.held: dict[int, Held] = {}
        self._keys: dict[str, int] = {}  # by the ids of requests
        self._refused: list[Delta] = []
        self._changes: list[KVChange] = []
        self._num_changes = 0  # that were told
        self._is_all = self._wants_metrics = False
        self._tell_cached()

    def make_request(self, resumable: Resumable) -> Request:
        """The request of a submission; in a thread that may wait, since a grammar may have to be compiled for it."""
        own = resumable
        request = Request(
            own.request_id, None, own.prompt_token_ids, own.params, own.cache_salt, own.priority, own.client
        )
        request.completions = own.completions
        if own.age is not None:
            request.arrival_time = time.perf_counter() - own.age
        for part in self.engine.scheduler.parts.copy():
            part.made(request)
        return request

    def receive(self, message: Any, request: Request | None = None) -> None:
        """Do what a message asks for, between two steps.

        Args:
            request: made of a `Submit`; None: it is made now.
        """
        if isinstance(message, Submit):
            try:
                self._submit(message, request or self.make_request(message.resumable))
            except Exception as error:  # whatever a part of the engine raised: it is the request's
                self.refuse(message, error)
        elif isinstance(message, Abort):
            if (held := self.held.pop(message.key, None)) is not None:
                del self._keys[held.request.request_id]
                self.engine.abort(held.request.request_id)
        elif isinstance(message, Equip):
            assert self.adapters is not None
            self.adapters.keep(message.adapters, message.drops)
            if message.drops and not self.engine.has_unfinished:
                self.engine.step()  # in which the runner gives back what they took
        elif isinstance(message, Ping):
            self._wants_metrics |= message.wants_metrics
        elif isinstance(message, TellCached):
            self._tell_cached()
        elif isinstance(message, Forget):
            self.engine.reset_prefix_cache()

    def refuse(self, message: Submit, error: Exception) -> None:
        """A request cannot be submitted: its completions end with this error."""
        finish = Finish("error", None, portable(error), None, None)
        completions = message.resumable.completions.items()
        self._refused += [Delta(message.key, index, len(own), [], "", None, 0, finish) for index, own in completions]

    def _submit(self, message: Submit, request: Request) -> None:
        own = message.resumable
        if message.adapter is not None:
            assert self.adapters is not None
            self.adapters.give(request, message.adapter)
        self.engine.submit(request)
        num_tokens = {seq.index: len(seq.output_token_ids) for seq in request.sequences}
        wants = request.prompt_logprobs is not None
        self.held[message.key] = Held(message.key, request, num_tokens, dict(own.num_chars), wants)
        self._keys[request.request_id] = message.key

    def step(self) -> News | None:
        """Take a step, if there is something to do; returns what there is to say."""
        news = News(self._refused)
        self._refused = []
        for request in self.engine.step() if self.engine.has_unfinished else ():
            held = self.held.get(self._keys.get(request.request_id, -1))
            if held is None or held.request is not request:
                continue
            for seq in request.sequences:
                if seq.index in held.num_tokens and (delta := self._delta(held, seq)) is not None:
                    news.deltas.append(delta)
            known = request.prompt_logprobs
            if held.wants_prompt_logprobs and known is not None and None not in known[1:]:
                held.wants_prompt_logprobs = False
                news.prompt_logprobs[held.key] = known
            if request.finished:
                del self.held[held.key], self._keys[request.request_id]
        if self.events is not None:
            self.events.publish()
        has_news = news.deltas or self._changes or self._is_all or news.prompt_logprobs
        if not (has_news or self._wants_metrics):
            return None
        news.changes, self._changes = self._changes, []
        news.first_change, news.is_all, self._is_all = self._num_changes, self._is_all, False
        self._num_changes += len(news.changes)
        if self._wants_metrics:
            news.metrics, self._wants_metrics = self.count(), False
        return news

    def _delta(self, held: Held, seq: Sequence) -> Delta | None:
        """What is new of a completion; None if nothing is."""
        told = held.num_tokens[seq.index]
        tokens = seq.token_ids[seq.num_prompt_tokens + told :]
        if not tokens and not seq.finished:
            return None
        assert seq.detokenizer is not None
        text = seq.detokenizer.text_from(held.num_chars.get(seq.index, 0))
        logprobs = None if seq.logprobs is None else seq.logprobs[told : told + len(tokens)]
        finish = None
        if seq.finish_reason is not None:
            error = None if seq.error is None else portable(seq.error)
            metrics = held.request.metrics if held.request.finished else None
            finish = Finish(seq.finish_reason, seq.stop_reason, error, seq.state.get(EMBEDDING), metrics)
            del held.num_tokens[seq.index]
        else:
            held.num_tokens[seq.index] += len(tokens)
            held.num_chars[seq.index] = held.num_chars.get(seq.index, 0) + len(text)
        return Delta(held.key, seq.index, told, tokens, text, logprobs, seq.num_cached_tokens or 0, finish)

    def _tell_cached(self) -> None:
        """Begin anew to tell what is cached."""
        if self.events is not None:
            self._changes, self._is_all = [], True
            self.events.attach(None, self.engine)
            self.events.attach(self._take_event, self.engine)

    def _take_event(self, event: KVEvent) -> None:
        if isinstance(event, AllCleared):
            self._changes.append((None, False))
        elif event.group == 0:  # of several groups, the one whose layers see most
            self._changes.append((event.hash, isinstance(event, BlockStored)))
