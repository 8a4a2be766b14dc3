"""Fleet: the requests that run on replicas, and how they move. It waits for nothing: messages come in, and messages go out.

A request is a `Resumable` at any time: its prompt, its params with a seed, and the tokens that came so far. When its replica is
lost or drained it is submitted to another one, under a new key. What still comes under the old key is dropped, and a delta counts
only where it goes on exactly behind the tokens that are known: nothing is lost, and nothing comes twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from nanoengine.core.sequence import Phase, Request, Sequence
from nanoengine.errors import EngineDead
from nanoengine.replicas.messages import Abort, Delta, Equip, Finish, News, Resumable, Submit, TellCached
from nanoengine.replicas.replica import EMBEDDING
from nanoengine.replicas.router import Route, Router

logger = logging.getLogger("nanoengine")

MOST_LOSSES = 3
"""A request that has lost so many replicas, and got no token in between, is ended: it may be what kills them."""

TYPICAL_NEW = 128
"""Tokens that a completion is expected to bring, if it may bring as many."""


class Sends(Protocol):
    """The way to a replica."""

    def send(self, message: Any) -> None: ...


class Adapters(Protocol):
    """What requests need beside themselves: see `lora/adapters.py`."""

    def digest_of(self, request: Request) -> str | None: ...
    def kept(self) -> Mapping[str, Any]: ...


@dataclass(eq=False, slots=True)
class Member:
    """A replica that takes requests, or runs the last of them."""

    number: int
    link: Sends
    running: dict[int, Running] = field(default_factory=dict)  # by key
    next_change: int = 0  # of its cache: the number of the next one that is to be told
    is_known: bool = False  # all that it has cached was told
    adapters: frozenset[str] = frozenset()  # digests of those that it has


@dataclass(eq=False, slots=True)
class Running:
    """A request that has not ended."""

    request: Request
    key: int
    member: Member | None = None
    route: Route | None = None
    num_losses: int = 0  # since the last token


class Fleet:
    """Not thread-safe.

    Args:
        router: chooses a member for a request.
        hashes: of the full blocks of a sequence, as the caches of the replicas have them.
        begin: told when a completion waits no more: its first token has come, or its end.
        adapters: those of the requests; None: there are none.
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
        self.homeless: dict[Request, Running] = {}  # of them, those that wait for a replica
        self.num_moves = 0  # of requests
        self._num_keys = 0

    # ---- members

    def join(self, number: int, link: Sends) -> None:
        """A replica is ready: it takes requests."""
        member = self.members[number] = Member(number, link)
        self._equip(member)
        self.router.add(number)
        waiting, self.homeless = self.homeless, {}
        for own in waiting.values():
            self._place(own)

    def equip(self) -> None:
        """Bring all members the adapters that there are now, and have them forget the others."""
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
        """A replica is gone: what it had moves. Returns the requests that are ended."""
        member = self.members.pop(number, None)
        if member is None:
            return []
        self.router.remove(number)
        ended: list[Request] = []
        for own in member.running.values():
            own.member = own.route = None
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
        ended = list(self.homeless)
        for own in list(self.homeless.values()):
            self._fail(own, error)
        return ended

    def num_running(self, number: int) -> int:
        """Requests that a member has."""
        return len(self.members[number].running) if number in self.members else 0

    def drain(self, number: int) -> None:
        """A replica takes no more requests, and what it has moves at once."""
        member = self.members.pop(number)
        self.router.remove(number)
        for own in list(member.running.values()):
            member.link.send(Abort(own.key))
            own.member = own.route = None
            self._place(own)

    # ---- requests

    def submit(self, request: Request) -> None:
        own = self.running[request] = Running(request, 0)
        self._place(own)

    def abort(self, request: Request, finish: Finish) -> None:
        """End a request wherever it is; what still comes of it is dropped. Nothing happens if it has ended."""
        if (own := self.running.get(request)) is None:
            return
        for seq in request.sequences:
            self._finish(seq, finish)
        if own.member is not None:
            own.member.link.send(Abort(own.key))
        self._end(own)

    def receive(self, number: int, news: News) -> list[Request]:
        """Take what a replica says; returns the requests that got something."""
        member = self.members.get(number)
        if member is None:
            return []
        self._take_changes(member, news)
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
        have = len(seq.token_ids) - seq.num_prompt_tokens
        if seq.finished or (delta.first_token + len(delta.token_ids) <= have and delta.finish is None):
            return  # it is known
        if delta.first_token != have:  # some were lost on the way: get them again
            self._move(own)
            return
        own.num_losses = 0
        if seq.phase is Phase.WAITING:
            self.begin(seq)
            seq.phase = Phase.DECODING
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = delta.num_cached_tokens
        seq.token_ids += delta.token_ids
        seq.num_tokens = len(seq.token_ids)
        assert seq.detokenizer is not None
        seq.detokenizer.text += delta.text
        if delta.logprobs is not None and seq.logprobs is not None:
            seq.logprobs += delta.logprobs
        if own.route is not None and own.route.num_prompt:
            own.route = self.router.begun(own.route)
        if delta.finish is not None:
            self._finish(seq, delta.finish)
            if request.finished:
                self._end(own)

    def _take_changes(self, member: Member, news: News) -> None:
        """What a replica has cached, as far as it was told without a gap."""
        router, number = self.router, member.number
        if news.is_all:
            router.cleared(number)
            member.is_known, member.next_change = True, news.first_change
        elif news.changes and news.first_change != member.next_change and member.is_known:
            router.cleared(number)
            member.is_known = False
            member.link.send(TellCached())
        if not member.is_known:
            return
        member.next_change += len(news.changes)
        for (is_stored, is_all), changes in groupby(news.changes, lambda change: (change[1], change[0] is None)):
            if is_all:
                router.cleared(number)
            else:
                hashes = [hash for hash, _ in changes if hash is not None]
                (router.stored if is_stored else router.removed)(number, hashes)

    def _move(self, own: Running) -> None:
        assert own.member is not None
        own.member.link.send(Abort(own.key))
        self._leave(own)
        self._place(own)

    def _place(self, own: Running) -> None:
        """Submit a request to the best replica; without any it waits for one."""
        if not self.members:
            self.homeless[own.request] = own
            return
        request = own.request
        self.num_moves += own.key > 0
        self._num_keys += 1
        own.key = self._num_keys
        first = next(seq for seq in request.sequences if not seq.finished)
        submit = Submit(own.key, resumable(request))
        own.route = self.router.route(self.hashes(first), *_num_expected(request))
        own.member = self.members[own.route.replica]
        own.member.running[own.key] = own
        if self.adapters is not None and (digest := self.adapters.digest_of(request)) is not None:
            self._equip(own.member)
            submit = submit._replace(adapter=digest)
        own.member.link.send(submit)

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

    def _leave(self, own: Running) -> None:
        if own.member is not None:
            del own.member.running[own.key]
            if own.route is not None:
                self.router.ended(own.route)
        own.member = own.route = None

    def _end(self, own: Running) -> None:
        self._leave(own)
        self.homeless.pop(own.request, None)
        del self.running[own.request]


def _num_expected(request: Request) -> tuple[int, int]:
    """Tokens that are to be computed of a request where nothing is cached: those that are there, and those that it may bring."""
    open_seqs = [seq for seq in request.sequences if not seq.finished]
    limit = request.params.max_tokens or TYPICAL_NEW
    num_new = sum(min(TYPICAL_NEW, max(limit - len(seq.output_token_ids), 1)) for seq in open_seqs)
    return open_seqs[0].num_tokens, num_new


def resumable(request: Request) -> Resumable:
    """What another engine needs to go on with a request."""
    open_seqs = [seq for seq in request.sequences if not seq.finished]
    age = None if request.arrival_time is None else time.perf_counter() - request.arrival_time
    return Resumable(
        request.request_id,
        request.prompt_token_ids,
        request.params,
        {seq.index: seq.output_token_ids for seq in open_seqs},
        {seq.index: len(seq.detokenizer.text) for seq in open_seqs if seq.detokenizer is not None},
        request.cache_salt,
        request.priority,
        request.client,
        age,
    )
