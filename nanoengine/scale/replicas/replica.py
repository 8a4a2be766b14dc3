"""Replica: a whole engine behind messages. `process.py` receives the messages and sends the answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.sequence import Request, Sequence
from nanoengine.features import EMBEDDING
from nanoengine.features.observability.kv_events import AllCleared, BlockStored, KVEvent, KVEventPublisher
from nanoengine.scale.replicas.messages import (
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
)
from nanoengine.scale.worker.child import portable

if TYPE_CHECKING:
    from nanoengine.features.lora.adapters import Adapters


@dataclass(slots=True)
class Held:
    """A request, and how much of each completion was sent."""

    key: int
    request: Request
    num_tokens: dict[int, int]
    num_chars: dict[int, int]
    wants_prompt_logprobs: bool


class Replica:
    """Takes requests as `Resumable`, and returns the results of each step as `News`.

    Args:
        engine: the replica is its only user.
        events: the changes of its prefix cache; None: they are not sent.
        count: returns the counters of the engine.
        adapters: the LoRA adapters of the engine; None: it has none.
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
        self._wants_metrics = False
        if events is not None:
            events.attach(self._take_event, engine)

    def make_request(self, resumable: Resumable) -> Request:
        """Make the request of a submission. Its grammar may have to be compiled, so the caller's thread must be free to wait."""
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
        """Carry out a message, between two steps.

        Args:
            request: the request of a `Submit`, if it is made already.
        """
        if isinstance(message, Submit):
            try:
                self._submit(message, request or self.make_request(message.resumable))
            except Exception as error:  # whatever a part of the engine raised: it concerns this request alone
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
        elif isinstance(message, Forget):
            self.engine.reset_prefix_cache()

    def refuse(self, message: Submit, error: Exception) -> None:
        """End the completions of a request that cannot be submitted, with this error."""
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
        """Take a step, if a request runs; returns the news, if there are any."""
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
        if not (news.deltas or self._changes or news.prompt_logprobs or self._wants_metrics):
            return None
        news.changes, self._changes = self._changes, []
        if self._wants_metrics:
            news.metrics, self._wants_metrics = self.count(), False
        return news

    def _delta(self, held: Held, seq: Sequence) -> Delta | None:
        """The part of a completion that was not sent yet; None if there is none."""
        told = held.num_tokens[seq.index]
        tokens = seq.token_ids[seq.num_prompt_tokens + told :]
        if not tokens and not seq.finished:
            return None
        text = seq.text_from(held.num_chars.get(seq.index, 0))
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

    def _take_event(self, event: KVEvent) -> None:
        if isinstance(event, AllCleared):
            self._changes.append((None, False))
        elif event.group == 0:  # of several groups, the one whose layers see most
            self._changes.append((event.hash, isinstance(event, BlockStored)))
