"""Fleet: the requests that run on replicas, and how they move from one replica to another. It never waits: each call takes a
message, and sends messages.

A request can be written as a `Resumable` at any time: its prompt, its params with a seed, and the tokens that came so far. When
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
from nanoengine.scale.replicas.messages import Abort, Delta, Equip, Finish, KVChange, News, Resumable, Submit
from nanoengine.scale.replicas.router import Place, Route, Router

if TYPE_CHECKING:
    from nanoengine.features.lora.adapters import Adapters
    from nanoengine.scale.worker.link import Link

logger = logging.getLogger("nanoengine")

MOST_LOSSES = 3
"""A request that has lost so many replicas, and got no token in between, is ended: it may be the cause."""

TYPICAL_NEW = 128
"""Tokens that a completion is expected to have, if its limit allows for them."""


@dataclass(eq=False, slots=True, kw_only=True)
class Member(Place):
    """A replica that takes requests."""

    link: Link
    running: dict[int, Running] = field(default_factory=dict)  # by key
    adapters: frozenset[str] = frozenset()  # digests of the adapters that it has


@dataclass(eq=False, slots=True)
class Running:
    """A request that has not ended."""

    request: Request
    key: int
    route: Route[Member] | None = None  # None: it waits for a replica
    num_losses: int = 0  # since the last token


class Fleet:
    """Not thread-safe.

    Args:
        router: chooses a member for a request.
        hashes: returns the hashes of the full blocks of a sequence, as in the caches of the replicas.
        begin: called when a completion stops waiting: its first token has come, or its end.
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
        self.members: dict[int, Member] = {}
        self.running: dict[Request, Running] = {}
        self.unplaced: dict[Request, Running] = {}  # the running requests that wait for a replica
        self.num_moves = 0  # of requests
        self._num_keys = 0

    # ---- members

    def join(self, number: int, link: Link) -> None:
        """A replica is ready: it takes requests."""
        member = self.members[number] = Member(number=number, link=link)
        self._equip(member)
        waiting, self.unplaced = self.unplaced, {}
        for own in waiting.values():
            self._place(own)

    def equip(self) -> None:
        """Send all members the adapters that are loaded now, and have them drop the others."""
        for member in self.members.values():
            self._equip(member)

    def _equip(self, member: Member) -> None:
        if self.adapters is None:
            return
        kept = self.adapters.kept()
        new = {digest: adapter for digest, adapter in kept.items() if digest not in member.adapters}
        drops = member.adapters - kept.keys()
        if new or drops:
            member.link.send(Equip(new, drops))
            member.adapters = frozenset(kept)

    def lose(self, number: int) -> list[Request]:
        """A replica is gone: its requests move. Returns the requests that are ended."""
        member = self.members.pop(number, None)
        if member is None:
            return []
        ended: list[Request] = []
        for own in member.running.values():
            own.route = None
            own.num_losses += 1
            if own.num_losses < MOST_LOSSES:
                self._place(own)
            else:
                reason = f"{MOST_LOSSES} replicas were lost while they computed this request: it is not tried again"
                self._fail(own, EngineDead(reason))
                ended.append(own.request)
        return ended

    def fail(self, error: Exception) -> list[Request]:
        """End all requests that wait for a replica, and return them."""
        ended = list(self.unplaced)
        for own in list(self.unplaced.values()):
            self._fail(own, error)
        return ended

    def num_running(self, number: int) -> int:
        """Requests that a member has."""
        return len(self.members[number].running) if number in self.members else 0

    def drain(self, number: int) -> None:
        """A replica takes no more requests, and its requests move at once."""
        member = self.members.pop(number)
        for own in member.running.values():
            member.link.send(Abort(own.key))
            own.route = None
            self._place(own)

    # ---- requests

    def submit(self, request: Request) -> None:
        own = self.running[request] = Running(request, 0)
        self._place(own)

    def abort(self, request: Request, finish: Finish) -> None:
        """End a request wherever it runs; later messages about it are dropped. Nothing happens if it has ended."""
        if (own := self.running.get(request)) is None:
            return
        for seq in request.sequences:
            self._finish(seq, finish)
        if own.route is not None:
            own.route.place.link.send(Abort(own.key))
        self._end(own)

    def receive(self, number: int, news: News) -> list[Request]:
        """Take the news of a replica; returns the requests that have new tokens or an end.

        Raises:
            ValueError: it has left tokens out, or said them twice.
        """
        member = self.members.get(number)
        if member is None:
            return []
        for change in news.changes:
            _take_change(member, change)
        for key, entries in news.prompt_logprobs.items():
            if key in member.running:
                member.running[key].request.prompt_logprobs = entries
        touched: dict[Request, None] = {}
        for delta in news.deltas:
            own = member.running.get(delta.key)
            if own is None:  # it was moved or aborted
                continue
            self._take_delta(own, delta)
            touched[own.request] = None
        return list(touched)

    def _take_delta(self, own: Running, delta: Delta) -> None:
        request = own.request
        seq = next(seq for seq in request.sequences if seq.index == delta.completion)
        if seq.finished or delta.first_token != len(seq.token_ids) - seq.num_prompt_tokens:
            raise ValueError(f"tokens from place {delta.first_token} on are not the next of this completion")
        own.num_losses = 0
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
        if own.route is not None:
            own.route.begun()
        if delta.finish is not None:
            self._finish(seq, delta.finish)
            if request.finished:
                self._end(own)

    def _place(self, own: Running) -> None:
        """Submit a request to the best replica; without a replica the request waits for one."""
        if not self.members:
            self.unplaced[own.request] = own
            return
        request = own.request
        self.num_moves += own.key > 0
        self._num_keys += 1
        own.key = self._num_keys
        first = next(seq for seq in request.sequences if not seq.finished)
        submit = Submit(own.key, resumable(request))
        own.route = self.router.route(self.members.values(), self.hashes(first), *_num_expected(request))
        member = own.route.place
        member.running[own.key] = own
        if self.adapters is not None and (digest := self.adapters.digest_of(request)) is not None:
            self._equip(member)
            submit = submit._replace(adapter=digest)
        member.link.send(submit)

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

    def _fail(self, own: Running, error: Exception) -> None:
        for seq in own.request.sequences:
            self._finish(seq, Finish("error", None, error, None, None))
        self._end(own)

    def _end(self, own: Running) -> None:
        if own.route is not None:
            del own.route.place.running[own.key]
            own.route.ended()
        self.unplaced.pop(own.request, None)
        del self.running[own.request]


def _take_change(member: Member, change: KVChange) -> None:
    """Note which blocks a replica has cached."""
    hash, is_stored = change
    if hash is None:
        member.cached.clear()
    elif is_stored:
        member.cached.add(hash)
    else:
        member.cached.discard(hash)


def _num_expected(request: Request) -> tuple[int, int]:
    """Tokens of a request that are to be computed without a cache, and tokens that it is expected to generate."""
    open_seqs = [seq for seq in request.sequences if not seq.finished]
    limit = request.params.max_tokens or TYPICAL_NEW
    num_new = sum(min(TYPICAL_NEW, max(limit - len(seq.output_token_ids), 1)) for seq in open_seqs)
    return open_seqs[0].num_tokens, num_new


def resumable(request: Request) -> Resumable:
    """The state of a request, with which another engine can go on."""
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
