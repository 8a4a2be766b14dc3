"""Fleet: requests on replicas, and their moves from one replica to another. It never waits: each call handles a message, and
sends messages.

A request can be written as a `Resumable` at any time: its prompt, its params with a seed, and its tokens so far. When
its replica is lost or drained, it is submitted to another replica under a new key, and messages with the old key are dropped: no
token is lost, and no token comes twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanoengine.core.sequence import Phase, Request, Sequence
from nanoengine.errors import EngineDead
from nanoengine.features import EMBEDDING
from nanoengine.scale.replicas.messages import (
    Abort,
    CompletionDelta,
    Finish,
    Resumable,
    SetAdapters,
    StepUpdate,
    Submit,
)
from nanoengine.scale.replicas.router import ReplicaCandidate, Route, Router

if TYPE_CHECKING:
    from nanoengine.features.lora.adapters import Adapters
    from nanoengine.scale.worker.link import Link

logger = logging.getLogger("nanoengine")

MOST_LOSSES = 3
"""Limit of the replicas that a request loses without a new token in between; it may be the cause, and ends."""

TYPICAL_NEW = 128
"""Expected tokens of a completion, within its limit."""


@dataclass(eq=False, slots=True, kw_only=True)
class ReadyReplica(ReplicaCandidate):
    """A replica that accepts requests."""

    link: Link
    requests: dict[int, RoutedRequest] = field(default_factory=dict)  # by key
    adapters: frozenset[str] = frozenset()  # digests of the adapters in the replica


@dataclass(eq=False, slots=True)
class RoutedRequest:
    """A request that has not ended, and its replica."""

    request: Request
    key: int
    route: Route[ReadyReplica] | None = None  # None: it waits for a replica
    num_losses: int = 0  # since the last token


class Fleet:
    """The running requests and the ready replicas. Not thread-safe.

    Args:
        router: chooses a replica for a request.
        hashes: returns the hashes of the full blocks of a sequence, as in the caches of the replicas.
        begin: called at the first token of a completion, or at its end without one.
        adapters: the LoRA adapters of the requests; None: there are none.
    """

    def __init__(
        self,
        router: Router,
        hashes: Callable[[Sequence], list[bytes]],
        begin: Callable[[Sequence], object] = lambda _: None,
        adapters: Adapters | None = None,
    ):
        self.router, self.hashes, self.begin, self.adapters = router, hashes, begin, adapters
        self.replicas: dict[int, ReadyReplica] = {}
        self.running: dict[Request, RoutedRequest] = {}
        self.num_moves = 0  # of requests
        self._num_keys = 0

    @property
    def unrouted(self) -> list[RoutedRequest]:
        """Running requests that wait for a replica."""
        return [routed for routed in self.running.values() if routed.route is None]

    # ---- replicas

    def join(self, number: int, link: Link) -> None:
        """Add a replica that is ready, and send it the waiting requests."""
        replica = self.replicas[number] = ReadyReplica(number=number, link=link)
        self._set_adapters(replica)
        for routed in self.unrouted:
            self._route(routed)

    def set_adapters(self) -> None:
        """Send all replicas the adapters that are loaded now; they drop the others."""
        for replica in self.replicas.values():
            self._set_adapters(replica)

    def _set_adapters(self, replica: ReadyReplica) -> None:
        if self.adapters is None:
            return
        loaded = self.adapters.in_memory()
        new = {digest: adapter for digest, adapter in loaded.items() if digest not in replica.adapters}
        drops = replica.adapters - loaded.keys()
        if new or drops:
            replica.link.send(SetAdapters(new, drops))
            replica.adapters = frozenset(loaded)

    def lose(self, number: int) -> list[Request]:
        """Remove a lost replica, and move its requests. Returns the requests that end."""
        replica = self.replicas.pop(number, None)
        if replica is None:
            return []
        ended: list[Request] = []
        for routed in replica.requests.values():
            routed.route = None
            routed.num_losses += 1
            if routed.num_losses < MOST_LOSSES:
                self._route(routed)
            else:
                reason = f"{MOST_LOSSES} replicas were lost while they computed this request: it is not tried again"
                self._fail(routed, EngineDead(reason))
                ended.append(routed.request)
        return ended

    def fail(self, error: Exception) -> list[Request]:
        """End all requests that wait for a replica, and return them."""
        waiting = self.unrouted
        for routed in waiting:
            self._fail(routed, error)
        return [routed.request for routed in waiting]

    def num_running(self, number: int) -> int:
        """Number of the requests on a replica."""
        return len(self.replicas[number].requests) if number in self.replicas else 0

    def drain(self, number: int) -> None:
        """Remove a replica that is replaced, and move its requests at once."""
        replica = self.replicas.pop(number)
        for routed in replica.requests.values():
            replica.link.send(Abort(routed.key))
            routed.route = None
            self._route(routed)

    # ---- requests

    def submit(self, request: Request) -> None:
        routed = self.running[request] = RoutedRequest(request, 0)
        self._route(routed)

    def abort(self, request: Request, finish: Finish) -> None:
        """End a request wherever it runs; later messages about it are dropped. Nothing happens if it has ended."""
        if (routed := self.running.get(request)) is None:
            return
        for seq in request.sequences:
            self._finish(seq, finish)
        if routed.route is not None:
            routed.route.replica.link.send(Abort(routed.key))
        self._end(routed)

    def receive(self, number: int, update: StepUpdate) -> list[Request]:
        """Apply the results of a step of a replica; returns the requests that have new tokens or an end.

        Raises:
            ValueError: tokens are missing, or come twice.
        """
        replica = self.replicas.get(number)
        if replica is None:
            return []
        for hash, is_stored in update.changes:
            if hash is None:
                replica.cached.clear()
            elif is_stored:
                replica.cached.add(hash)
            else:
                replica.cached.discard(hash)
        for key, entries in update.prompt_logprobs.items():
            if key in replica.requests:
                replica.requests[key].request.prompt_logprobs = entries
        advanced: dict[Request, None] = {}
        for delta in update.deltas:
            routed = replica.requests.get(delta.key)
            if routed is None:  # it was moved or aborted
                continue
            self._apply_delta(routed, delta)
            advanced[routed.request] = None
        return list(advanced)

    def _apply_delta(self, routed: RoutedRequest, delta: CompletionDelta) -> None:
        request = routed.request
        seq = next(seq for seq in request.sequences if seq.index == delta.completion)
        if seq.finished or delta.first_token != len(seq.token_ids) - seq.num_prompt_tokens:
            raise ValueError(f"tokens from place {delta.first_token} on are not the next of this completion")
        routed.num_losses = 0
        if seq.phase is Phase.WAITING:
            self.begin(seq)
            seq.phase = Phase.DECODING
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = delta.num_cached_tokens
        seq.token_ids += delta.token_ids
        seq.num_tokens = len(seq.token_ids)
        seq.detokenizer.text += delta.text
        if delta.logprobs is not None and seq.logprobs is not None:
            seq.logprobs += delta.logprobs
        if routed.route is not None:
            routed.route.begun()
        if delta.finish is not None:
            self._finish(seq, delta.finish)
            if request.finished:
                self._end(routed)

    def _route(self, routed: RoutedRequest) -> None:
        """Submit a request to the best replica; without a replica the request waits for one."""
        if not self.replicas:
            return
        request = routed.request
        self.num_moves += routed.key > 0
        self._num_keys += 1
        routed.key = self._num_keys
        first = next(seq for seq in request.sequences if not seq.finished)
        submit = Submit(routed.key, resumable(request))
        routed.route = self.router.route(self.replicas.values(), self.hashes(first), *_num_expected(request))
        replica = routed.route.replica
        replica.requests[routed.key] = routed
        if self.adapters is not None and (digest := self.adapters.adapter_digest(request)) is not None:
            self._set_adapters(replica)
            submit = submit._replace(adapter=digest)
        replica.link.send(submit)

    def _finish(self, seq: Sequence, finish: Finish) -> None:
        """End a completion; nothing happens if it has ended."""
        if seq.finished:
            return
        if seq.phase is Phase.WAITING:
            self.begin(seq)
        seq.phase, seq.finish_reason, seq.stop_reason = Phase.FINISHED, finish.reason, finish.stop_reason
        seq.error = finish.error
        if finish.embedding is not None:
            seq.state[EMBEDDING] = finish.embedding
        request = seq.request
        request.error = request.error or seq.error
        request.num_finished += 1
        if finish.metrics is not None:
            request.metrics = finish.metrics

    def _fail(self, routed: RoutedRequest, error: Exception) -> None:
        for seq in routed.request.sequences:
            self._finish(seq, Finish("error", error=error))
        self._end(routed)

    def _end(self, routed: RoutedRequest) -> None:
        if routed.route is not None:
            del routed.route.replica.requests[routed.key]
            routed.route.ended()
        del self.running[routed.request]


def _num_expected(request: Request) -> tuple[int, int]:
    """(tokens to compute without a cache, expected new tokens) of a request."""
    open_seqs = [seq for seq in request.sequences if not seq.finished]
    limit = request.params.max_tokens or TYPICAL_NEW
    num_new = sum(min(TYPICAL_NEW, max(limit - len(seq.output_token_ids), 1)) for seq in open_seqs)
    return open_seqs[0].num_tokens, num_new


def resumable(request: Request) -> Resumable:
    """The state of a request, from which another engine can go on."""
    open_seqs = [seq for seq in request.sequences if not seq.finished]
    age = None if request.arrival_time is None else time.perf_counter() - request.arrival_time
    return Resumable(
        request.request_id,
        request.prompt_token_ids,
        request.params,
        {seq.index: seq.output_token_ids for seq in open_seqs},
        {seq.index: len(seq.detokenizer.text) for seq in open_seqs},
        request.cache_salt,
        request.priority,
        request.client,
        age,
    )
