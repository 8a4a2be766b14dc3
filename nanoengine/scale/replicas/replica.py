"""Replica: an engine behind messages. `process.py` receives the messages and sends the answers."""

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
    CompletionDelta,
    Finish,
    KVChange,
    Ping,
    ResetPrefixCache,
    Resumable,
    SetAdapters,
    StepUpdate,
    Submit,
)
from nanoengine.scale.worker.child import portable

if TYPE_CHECKING:
    from nanoengine.features.lora.adapters import Adapters


@dataclass(slots=True)
class SentProgress:
    """The sent part of each completion of a request."""

    key: int
    num_tokens: dict[int, int]
    num_chars: dict[int, int]
    wants_prompt_logprobs: bool


class Replica:
    """An engine that accepts requests as `Resumable`, and returns the results of each step as `StepUpdate`.

    Args:
        engine: the replica is its only user.
        events: publishes the changes of its prefix cache.
        count: returns the counters of the engine.
        adapters: the LoRA adapters of the engine; None: no adapters.
    """

    def __init__(
        self,
        engine: LLMEngine,
        events: KVEventPublisher,
        count: Callable[[], Any] = lambda: None,
        adapters: Adapters | None = None,
    ):
        self.engine, self.events, self.count, self.adapters = engine, events, count, adapters
        self.requests: dict[Request, SentProgress] = {}
        self._refused: list[CompletionDelta] = []
        self._changes: list[KVChange] = []
        self._wants_metrics = False
        events.attach(self._note_change, engine)

    def make_request(self, resumable: Resumable) -> Request:
        """Make the request of a submission. Its grammar may have to be compiled, so the caller's thread must be free to wait."""
        old = resumable
        request = Request(
            old.request_id, None, old.prompt_token_ids, old.params, old.cache_salt, old.priority, old.client
        )
        request.completions = old.completions
        if old.age is not None:
            request.arrival_time = time.perf_counter() - old.age
        for part in self.engine.scheduler.parts.copy():
            part.made(request)
        return request

    def receive(self, message: Any, request: Request | None = None) -> None:
        """Carry out a message, between two steps.

        Args:
            request: of a `Submit`, if it is made already.
        """
        if isinstance(message, Submit):
            try:
                self._submit(message, request or self.make_request(message.resumable))
            except Exception as error:  # of any part of the engine: it concerns this request alone
                self.refuse(message, error)
        elif isinstance(message, Abort):
            for aborted in [one for one, progress in self.requests.items() if progress.key == message.key]:
                del self.requests[aborted]
                self.engine.abort(aborted.request_id)
        elif isinstance(message, SetAdapters):
            assert self.adapters is not None
            self.adapters.keep(message.adapters, message.drops)
            if message.drops and not self.engine.has_unfinished:
                self.engine.step()  # in which the runner frees their memory
        elif isinstance(message, Ping):
            self._wants_metrics = True
        elif isinstance(message, ResetPrefixCache):
            self.engine.reset_prefix_cache()

    def refuse(self, message: Submit, error: Exception) -> None:
        """End the completions of a request that cannot be submitted, with this error."""
        finish = Finish("error", error=portable(error))
        for index, tokens in message.resumable.completions.items():
            self._refused.append(CompletionDelta(message.key, index, len(tokens), [], "", None, 0, finish))

    def _submit(self, message: Submit, request: Request) -> None:
        state = message.resumable
        if message.adapter is not None:
            assert self.adapters is not None
            self.adapters.give(request, message.adapter)
        self.engine.submit(request)
        num_tokens = {seq.index: len(seq.output_token_ids) for seq in request.sequences}
        wants = request.prompt_logprobs is not None
        self.requests[request] = SentProgress(message.key, num_tokens, dict(state.num_chars), wants)

    def step(self) -> StepUpdate | None:
        """Compute a step, if a request runs; returns its results, if any."""
        update = StepUpdate(self._refused)
        self._refused = []
        for request in self.engine.step() if self.engine.has_unfinished else ():
            if (progress := self.requests.get(request)) is None:
                continue
            for seq in request.sequences:
                if seq.index in progress.num_tokens and (delta := self._delta(progress, seq)) is not None:
                    update.deltas.append(delta)
            known = request.prompt_logprobs
            if progress.wants_prompt_logprobs and known is not None and None not in known[1:]:
                progress.wants_prompt_logprobs = False
                update.prompt_logprobs[progress.key] = known
            if request.finished:
                del self.requests[request]
        self.events.publish()
        if not (update.deltas or self._changes or update.prompt_logprobs or self._wants_metrics):
            return None
        update.changes, self._changes = self._changes, []
        if self._wants_metrics:
            update.metrics, self._wants_metrics = self.count(), False
        return update

    def _delta(self, progress: SentProgress, seq: Sequence) -> CompletionDelta | None:
        """The part of a completion that was not sent yet; None: all of it was sent."""
        num_sent = progress.num_tokens[seq.index]
        tokens = seq.token_ids[seq.num_prompt_tokens + num_sent :]
        if not tokens and not seq.finished:
            return None
        text = seq.text_from(progress.num_chars.get(seq.index, 0))
        logprobs = None if seq.logprobs is None else seq.logprobs[num_sent : num_sent + len(tokens)]
        finish = None
        if seq.finish_reason is not None:
            error = None if seq.error is None else portable(seq.error)
            metrics = seq.request.metrics if seq.request.finished else None
            finish = Finish(seq.finish_reason, seq.stop_reason, error, seq.state.get(EMBEDDING), metrics)
            del progress.num_tokens[seq.index]
        else:
            progress.num_tokens[seq.index] += len(tokens)
            progress.num_chars[seq.index] = progress.num_chars.get(seq.index, 0) + len(text)
        return CompletionDelta(
            progress.key, seq.index, num_sent, tokens, text, logprobs, seq.num_cached_tokens or 0, finish
        )

    def _note_change(self, event: KVEvent) -> None:
        if isinstance(event, AllCleared):
            self._changes.append((None, False))
        elif event.group == 0:  # of several groups, the one with the longest windows
            self._changes.append((event.hash, isinstance(event, BlockStored)))
