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
from typing import Generic, TypeVar


@dataclass(eq=False, slots=True)
class Place:
    """A replica, as the router sees it."""

    number: int
    cached: set[bytes] = field(default_factory=set)  # hashes of the blocks that can be hit there
    load: int = 0  # tokens that requests have reserved
    last_turn: int = 0  # when it was chosen last


P = TypeVar("P", bound=Place)


@dataclass(slots=True)
class Route(Generic[P]):
    """The replica of a request, and what the request has reserved there."""

    place: P
    num_cached_tokens: int  # of its prompt, as far as the router knows
    num_prompt: int  # tokens reserved until its first token comes
    num_new: int  # tokens reserved until it ends

    def begun(self) -> None:
        """The prompt of the request is computed."""
        self.place.load -= self.num_prompt
        self.num_prompt = 0

    def ended(self) -> None:
        """The request has ended, or moved."""
        self.place.load -= self.num_prompt + self.num_new


class Router:
    """Not thread-safe.

    Args:
        block_size: tokens of a block of the replicas' caches.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._num_turns = 0

    def route(self, places: Iterable[P], hashes: Sequence[bytes], num_prompt: int, num_new: int) -> Route[P]:
        """Choose a replica for a request, and reserve its tokens there.

        Args:
            places: the replicas that take requests; at least one.
            hashes: of the full blocks of its prompt, each of which covers all tokens before it.
            num_prompt: tokens to compute where nothing is cached.
            num_new: tokens that the request is expected to generate.
        """

        def cost(own: Place) -> tuple[int, int, int]:
            return own.load - self._hit(own, hashes), own.last_turn, own.number

        best = min(places, key=cost)
        hit = self._hit(best, hashes)
        route = Route(best, hit, num_prompt - hit, num_new)
        self._num_turns += 1
        best.last_turn = self._num_turns
        best.load += route.num_prompt + num_new
        return route

    def _hit(self, place: Place, hashes: Sequence[bytes]) -> int:
        """Tokens at the beginning of a prompt that a replica has cached."""
        return self.block_size * sum(1 for _ in takewhile(place.cached.__contains__, hashes))
