"""Router: chooses the replica for a request, by what each replica has cached and has to do. No tensors, no sockets.

The cost of a replica is the tokens of the prompt that it would have to compute, and the tokens that other requests have reserved
there. The least cost wins; of equal costs, the replica that was chosen longest ago. The tokens of a request are reserved in the
call that chooses, so that a burst of requests does not go to one replica.

Each replica has a set of block hashes, and a request looks at all replicas: that is meant for some dozens of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple


class Route(NamedTuple):
    """The replica of a request, and what the request has reserved there."""

    replica: int
    num_cached_tokens: int  # of its prompt, as far as the router knows
    num_prompt: int  # tokens reserved until its first token comes
    num_new: int  # tokens reserved until it ends


@dataclass(slots=True)
class _Replica:
    cached: set[bytes] = field(default_factory=set)  # hashes of its blocks
    load: int = 0  # tokens reserved
    last_turn: int = 0  # when it was chosen last


class Router:
    """Not thread-safe. `replica` is a number that the caller chooses.

    Args:
        block_size: tokens of a block of the replicas' caches.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._replicas: dict[int, _Replica] = {}
        self._num_turns = 0

    def add(self, replica: int) -> None:
        """A replica takes requests from now on; nothing is known to be cached there."""
        assert replica not in self._replicas
        self._replicas[replica] = _Replica()

    def remove(self, replica: int) -> None:
        """A replica takes no more requests; what was cached and reserved there is forgotten."""
        del self._replicas[replica]

    def load(self, replica: int) -> int:
        """Tokens that are reserved there."""
        return self._replicas[replica].load

    # ---- what is cached

    def cached(self, replica: int) -> set[bytes]:
        """Hashes of the blocks that can be hit there."""
        return self._replicas[replica].cached

    def stored(self, replica: int, hashes: Iterable[bytes]) -> None:
        """Blocks can be hit there."""
        self._replicas[replica].cached.update(hashes)

    def removed(self, replica: int, hashes: Iterable[bytes]) -> None:
        """Blocks are lost there."""
        self._replicas[replica].cached.difference_update(hashes)

    def cleared(self, replica: int) -> None:
        """Nothing is cached there any more."""
        self._replicas[replica].cached.clear()

    # ---- requests

    def route(self, hashes: Sequence[bytes], num_prompt: int, num_new: int) -> Route:
        """Choose a replica for a request, and reserve its tokens there. There must be a replica.

        Args:
            hashes: of the full blocks of its prompt, each of which covers all tokens before it.
            num_prompt: tokens to compute where nothing is cached.
            num_new: tokens that the request is expected to generate.
        """
        hits = {number: self._hit(own, hashes) for number, own in self._replicas.items()}

        def cost(number: int) -> tuple[int, int, int]:
            own = self._replicas[number]
            return own.load - hits[number], own.last_turn, number

        best = min(hits, key=cost)
        route = Route(best, hits[best], max(num_prompt - hits[best], 0), num_new)
        self._num_turns += 1
        self._replicas[best].last_turn = self._num_turns
        self._reserve(best, route.num_prompt + num_new)
        return route

    def begun(self, route: Route) -> Route:
        """The prompt of a request is computed; returns what the request still reserves."""
        self._reserve(route.replica, -route.num_prompt)
        return route._replace(num_prompt=0)

    def ended(self, route: Route) -> None:
        """A request has ended, or moved."""
        self._reserve(route.replica, -route.num_prompt - route.num_new)

    def _hit(self, replica: _Replica, hashes: Sequence[bytes]) -> int:
        """Tokens at the beginning of a prompt that a replica has cached."""
        return self.block_size * sum(1 for _ in takewhile(replica.cached.__contains__, hashes))

    def _reserve(self, replica: int, count: int) -> None:
        if (own := self._replicas.get(replica)) is not None:
            own.load += count
