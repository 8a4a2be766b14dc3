"""Router: chooses the replica for a request, by cached prefix and load. No tensors, no sockets.

The cost of a replica is the number of prompt tokens to compute there, plus the tokens that other requests have reserved there.
The least cost wins; of equal costs, the replica that was chosen longest ago. The call that chooses also reserves the tokens of
the request, so that a burst of requests does not go to one replica.

Each replica has a set of block hashes, and a request scores all replicas: this suits some dozens of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Generic, TypeVar


@dataclass(eq=False, slots=True)
class ReplicaCandidate:
    """A replica with the facts that the router scores."""

    number: int
    cached: set[bytes] = field(default_factory=set)  # hashes of cached blocks
    load: int = 0  # tokens that requests have reserved
    last_choice: int = 0  # number of the last request that it was chosen for


C = TypeVar("C", bound=ReplicaCandidate)


@dataclass(slots=True)
class Route(Generic[C]):
    """The replica of a request, and the tokens reserved there."""

    replica: C
    num_cached_tokens: int  # of its prompt, by the hashes
    num_prompt: int  # tokens reserved until its first token comes
    num_new: int  # tokens reserved until it ends

    def begun(self) -> None:
        """Release the tokens of the prompt: it is computed."""
        self.replica.load -= self.num_prompt
        self.num_prompt = 0

    def ended(self) -> None:
        """Release all tokens: the request has ended."""
        self.replica.load -= self.num_prompt + self.num_new


class Router:
    """Chooses replicas, and counts their reserved tokens. Not thread-safe.

    Args:
        block_size: tokens of a block of the replicas' caches.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._num_choices = 0

    def route(self, candidates: Iterable[C], hashes: Sequence[bytes], num_prompt: int, num_new: int) -> Route[C]:
        """Choose a replica for a request, and reserve its tokens there.

        Args:
            candidates: the replicas that accept requests; at least one.
            hashes: of the full blocks of its prompt, each of which covers all tokens before it.
            num_prompt: tokens to compute without a cached prefix.
            num_new: expected new tokens.
        """

        def cost(replica: ReplicaCandidate) -> tuple[int, int, int]:
            return replica.load - self._hit(replica, hashes), replica.last_choice, replica.number

        best = min(candidates, key=cost)
        hit = self._hit(best, hashes)
        route = Route(best, hit, num_prompt - hit, num_new)
        self._num_choices += 1
        best.last_choice = self._num_choices
        best.load += route.num_prompt + num_new
        return route

    def _hit(self, replica: ReplicaCandidate, hashes: Sequence[bytes]) -> int:
        """Length in tokens of the prefix of a prompt that a replica has cached."""
        return self.block_size * sum(1 for _ in takewhile(replica.cached.__contains__, hashes))
