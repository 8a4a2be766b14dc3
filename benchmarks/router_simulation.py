"""Replicas that only count: steps of chunks and decodes that take time by their tokens, caches of blocks; and traces for them.

A step computes a token of every running sequence, and of prompts as much as fits in its budget. A finished block can be hit from
the end of its step on; the least recently used blocks go first. Time is simulated: nothing here waits.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nanoengine.replicas.router import Route, Router

SIZE = 16
"""Tokens of a block."""

STEP_SECONDS, TOKEN_SECONDS, BUDGET = 0.010, 0.00015, 512
"""A step, and each token in it; most tokens of a step. About 6,000 prompt tokens a second, and streams of 12 to 90 ms a token."""

CACHE_BLOCKS = 4096
"""Of each replica: 65,536 tokens."""

TYPICAL_NEW = 128
"""As `nanoengine.replicas.fleet`."""


@dataclass(slots=True, eq=False)
class Call:
    """A request of a trace."""

    blocks: list[Any]  # hashes of the full blocks of its prompt
    num_prompt: int
    num_new: int
    then: Callable[[], tuple[float, Call] | None] = lambda: None  # what the client asks next, after so many seconds
    arrived: float = 0.0
    num_left: int = 0  # tokens of the prompt to compute
    num_cached: int = 0
    route: Route | None = None


@dataclass
class Found:
    ttfts: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_cached: int = 0

    @property
    def hit_rate(self) -> float:
        return self.num_cached / self.num_prompt


class SimulatedReplica:
    def __init__(self, number: int, router: Router, found: Found):
        self.number, self.router, self.found = number, router, found
        self.cache: OrderedDict[Any, None] = OrderedDict()
        self.waiting: deque[Call] = deque()
        self.prefilling: list[Call] = []
        self.decoding: dict[Call, int] = {}  # tokens to come
        self.is_running = False

    def begin_step(self) -> tuple[float, list[Call]] | None:
        """How long the next step takes, and whose prompts it completes; None: nothing is to do."""
        budget, done, num_tokens = BUDGET - len(self.decoding), [], len(self.decoding)
        while budget > 0 and (self.prefilling or self.waiting):
            if not self.prefilling:
                call = self.waiting.popleft()
                self._find(call)
                self.prefilling.append(call)
            call = self.prefilling[0]
            count = min(budget, call.num_left)
            call.num_left -= count
            budget -= count
            num_tokens += count
            if not call.num_left:
                done.append(self.prefilling.pop(0))
        return (STEP_SECONDS + TOKEN_SECONDS * num_tokens, done) if num_tokens else None

    def _find(self, call: Call) -> None:
        hits = list(itertools.takewhile(self.cache.__contains__, call.blocks))
        for hash in hits:
            self.cache.move_to_end(hash)
        call.num_cached = min(len(hits) * SIZE, call.num_prompt - 1)
        call.num_left = call.num_prompt - call.num_cached

    def end_step(self, done: list[Call], now: float) -> list[Call]:
        """Requests that ended."""
        ended = []
        for call in list(self.decoding):
            self.decoding[call] -= 1
            if not self.decoding[call]:
                del self.decoding[call]
                ended.append(call)
        for call in done:
            self.found.ttfts.append(now - call.arrived)
            self.found.num_prompt += call.num_prompt
            self.found.num_cached += call.num_cached
            assert call.route is not None
            call.route = self.router.begun(call.route)
            self.decoding[call] = call.num_new
            self.router.stored(self.number, [hash for hash in call.blocks if hash not in self.cache])
            for hash in call.blocks:
                self.cache[hash] = None
                self.cache.move_to_end(hash)
            while len(self.cache) > CACHE_BLOCKS:
                self.router.removed(self.number, [self.cache.popitem(last=False)[0]])
        return ended


def simulate(trace: str, count: int, router: Router, requests_each: int) -> Found:
    """Run a trace on so many replicas, until each has had so many requests on average."""
    found, order = Found(), itertools.count()
    replicas = [SimulatedReplica(number, router, found) for number in range(count)]
    for number in range(count):
        router.add(number)
    events: list[tuple[float, int, Any, Any]] = []
    arrivals = TRACES[trace](random.Random(1), count)
    num_left = requests_each * count

    def add(at: float, what: Any, done: Any = None) -> None:
        heapq.heappush(events, (at, next(order), what, done))

    add(*next(arrivals))
    while events:
        now, _, what, done = heapq.heappop(events)
        if isinstance(what, Call):
            if num_left <= 0:
                continue
            num_left -= 1
            if done is None:
                add(*next(arrivals))
            what.arrived = now
            what.route = router.route(what.blocks, what.num_prompt, min(TYPICAL_NEW, what.num_new))
            own = replicas[what.route.replica]
            own.waiting.append(what)
        else:
            own = what
            own.is_running = False
            for call in own.end_step(done, now):
                router.ended(call.route)
                if (following := call.then()) is not None:
                    add(now + following[0], following[1], "follows")
        if not own.is_running and (step := own.begin_step()) is not None:
            own.is_running = True
            add(now + step[0], own, step[1])
    return found


# ---- traces: endless arrivals (seconds, first request of a client); rates grow with the replicas

_names = itertools.count()


def _new_blocks(num_tokens: int) -> list[int]:
    return [next(_names) for _ in range(num_tokens // SIZE)]


def shared_prefixes(rng: random.Random, count: int) -> Iterator[tuple[float, Call]]:
    """Four tenants a replica, each with a system prompt of 4,000 tokens; questions of 200, answers of 100."""
    tenants = [_new_blocks(4000) for _ in range(4 * count)]
    now = 0.0
    while True:
        now += rng.expovariate(1.6 * count)
        yield now, Call(rng.choice(tenants) + _new_blocks(200), 4200, rng.randint(50, 150))


def chats(rng: random.Random, count: int) -> Iterator[tuple[float, Call]]:
    """Conversations of 8 turns on average: each sends what was said, and 150 tokens more; answers of 150, pauses of 8 s."""

    def turn(before: list[int], length: int) -> Call:
        num_new = rng.randint(50, 250)
        blocks = before + _new_blocks(length + 150 - len(before) * SIZE)

        def then() -> tuple[float, Call] | None:
            if rng.random() < 1 / 8 or length > 6000:
                return None
            return rng.expovariate(1 / 8), turn(blocks, length + 150 + num_new)

        return Call(blocks, length + 150, num_new, then)

    now = 0.0
    while True:
        now += rng.expovariate(0.4 * count)
        yield now, turn([], 600)


def agents(rng: random.Random, count: int) -> Iterator[tuple[float, Call]]:
    """Tasks of 12 steps on average with one of 8 sets of tools (3,000 tokens): each step adds 400 tokens, and comes after 1 s."""
    tools = [_new_blocks(3000) for _ in range(8)]

    def step(before: list[int], length: int) -> Call:
        num_new = rng.randint(30, 120)
        blocks = before + _new_blocks(length + 400 - len(before) * SIZE)

        def then() -> tuple[float, Call] | None:
            if rng.random() < 1 / 12 or length > 16_000:
                return None
            return rng.expovariate(1.0), step(blocks, length + 400 + num_new)

        return Call(blocks, length + 400, num_new, then)

    now = 0.0
    while True:
        now += rng.expovariate(0.12 * count)
        yield now, step(rng.choice(tools), 3000)


TRACES: dict[str, Callable[[random.Random, int], Iterator[tuple[float, Call]]]] = {
    "shared prefixes": shared_prefixes,
    "chats": chats,
    "agents": agents,
}
