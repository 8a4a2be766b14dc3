"""Router: which replica a request goes to. It knows what each has cached, and what each has to do; no tensors, no sockets.

The cost of a replica is the tokens of the prompt that it does not have, and the tokens that others have reserved there. The least
cost wins, of equals the replica that was chosen longest ago. The tokens of a request are reserved in the call that chooses, so
that a burst of requests does not go to one replica.

Each replica has a bit, and the index a mask of bits for each hash: one look says which replicas have a block, however many there
are. A replica that loses everything gets another bit, and the index is swept when many bits are of no use any more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

FEW = 32
"""Replicas that are looked at one by one; among more, the least loaded is found in the order of loads."""

LEAST_SWEPT = 64
"""Bits of no use before the index is swept."""


class Route(NamedTuple):
    """Where a request goes, and what it has reserved there."""

    replica: int
    num_cached_tokens: int  # of its prompt, as far as the router knows
    num_prompt: int  # tokens reserved until its first token comes
    num_new: int  # tokens reserved until it ends


class _State:
    """What the router knows of a replica."""

    __slots__ = ("bit", "is_open", "load", "turn")

    def __init__(self, bit: int):
        self.bit, self.load, self.turn, self.is_open = bit, 0, 0, True


class Router:
    """Not thread-safe. `replica` is a number that the caller chooses.

    Args:
        block_size: tokens of a block of the replicas' caches.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.index: dict[bytes, int] = {}  # hash of a block -> bits of the replicas that have it
        self._states: dict[int, _State] = {}
        self._owners: list[int] = []  # of each bit: a replica; -1: nobody's any more
        self._open = 0  # bits of the replicas that take requests
        self._order: list[tuple[int, int, int]] = []  # of these: (load, turn of its last choice, replica), ascending
        self._num_turns = self._num_lost_bits = 0

    # ---- replicas

    def add(self, replica: int) -> None:
        """A replica takes requests from now on; nothing is known to be cached there."""
        assert replica not in self._states
        state = self._states[replica] = _State(self._new_bit(replica))
        self._open |= 1 << state.bit
        insort(self._order, (0, 0, replica))

    def close(self, replica: int) -> None:
        """A replica takes no more requests."""
        state = self._states[replica]
        if state.is_open:
            state.is_open = False
            self._open &= ~(1 << state.bit)
            self._unorder(replica, state)

    def remove(self, replica: int) -> None:
        """A replica is gone, with all that was cached and reserved there."""
        self.close(replica)
        self._lose_bit(self._states.pop(replica).bit)

    @property
    def has_open(self) -> bool:
        return bool(self._open)

    def load(self, replica: int) -> int:
        """Tokens that are reserved there."""
        return self._states[replica].load

    # ---- what is cached

    def stored(self, replica: int, hashes: Iterable[bytes]) -> None:
        """Blocks can be hit there."""
        index, own = self.index, 1 << self._states[replica].bit
        for hash in hashes:
            index[hash] = index.get(hash, 0) | own

    def removed(self, replica: int, hashes: Iterable[bytes]) -> None:
        """Blocks are lost there."""
        index, others = self.index, ~(1 << self._states[replica].bit)
        for hash in hashes:
            if mask := index.get(hash, 0) & others:
                index[hash] = mask
            else:
                index.pop(hash, None)

    def cleared(self, replica: int) -> None:
        """Nothing is cached there any more."""
        state = self._states[replica]
        was_open = state.is_open
        self._open &= ~(1 << state.bit)
        self._lose_bit(state.bit)
        state.bit = self._new_bit(replica)
        if was_open:
            self._open |= 1 << state.bit

    # ---- requests

    def route(self, hashes: Iterable[bytes], num_prompt: int, num_new: int) -> Route:
        """Choose a replica for a request, and reserve its tokens there. `has_open` must be true.

        Args:
            hashes: of the full blocks of its prompt, each of which covers all tokens before it.
            num_prompt: tokens to compute where nothing is cached.
            num_new: tokens that it may bring, as far as can be said.
        """
        mask, num_hit, index = self._open, 0, self.index
        best: tuple[int, int, int] | None = None  # (load - tokens hit, turn, replica)
        best_hit = 0
        for hash in hashes:
            next_mask = mask & index.get(hash, 0)
            if next_mask != mask:  # some have no more than this
                load, turn, replica = self._least(mask)
                found = load - num_hit, turn, replica
                if best is None or found < best:
                    best, best_hit = found, num_hit
                mask = next_mask
                if not mask:
                    break
            num_hit += self.block_size
        if mask:
            load, turn, replica = self._least(mask)
            found = load - num_hit, turn, replica
            if best is None or found < best:
                best, best_hit = found, num_hit
        assert best is not None
        route = Route(best[2], best_hit, max(num_prompt - best_hit, 0), num_new)
        self._num_turns += 1
        self._reserve(route.replica, route.num_prompt + num_new, self._num_turns)
        return route

    def begun(self, route: Route) -> Route:
        """The prompt of a request is computed; returns what it has reserved still."""
        self._reserve(route.replica, -route.num_prompt)
        return route._replace(num_prompt=0)

    def ended(self, route: Route) -> None:
        """A request has ended, or moved."""
        self._reserve(route.replica, -route.num_prompt - route.num_new)

    def _reserve(self, replica: int, count: int, turn: int | None = None) -> None:
        state = self._states.get(replica)
        if state is None:
            return
        if state.is_open:
            self._unorder(replica, state)
        state.load += count
        state.turn = state.turn if turn is None else turn
        if state.is_open:
            insort(self._order, (state.load, state.turn, replica))

    def _unorder(self, replica: int, state: _State) -> None:
        del self._order[bisect_left(self._order, (state.load, state.turn, replica))]

    def _least(self, mask: int) -> tuple[int, int, int]:
        """(load, turn, replica) of the least loaded of some open replicas."""
        if mask == self._open:
            return self._order[0]
        if mask.bit_count() > FEW:
            return next(own for own in self._order if mask >> self._states[own[2]].bit & 1)
        owners: list[int] = []
        while mask:
            owners.append(self._owners[(mask & -mask).bit_length() - 1])
            mask &= mask - 1
        states = self._states
        return min((states[own].load, states[own].turn, own) for own in owners)

    # ---- bits

    def _new_bit(self, replica: int) -> int:
        self._owners.append(replica)
        return len(self._owners) - 1

    def _lose_bit(self, bit: int) -> None:
        self._owners[bit] = -1
        self._num_lost_bits += 1
        if self._num_lost_bits >= max(LEAST_SWEPT, len(self._states)):
            self._sweep()

    def _sweep(self) -> None:
        """Number the bits anew, without those of no use."""
        old = {state.bit: replica for replica, state in self._states.items() if self._owners[state.bit] >= 0}
        self._owners, self._num_lost_bits = [], 0
        new: dict[int, int] = {bit: self._new_bit(replica) for bit, replica in old.items()}
        self.index = {hash: found for hash, mask in self.index.items() if (found := _renumbered(mask, new))}
        self._open = 0
        for bit, replica in old.items():
            state = self._states[replica]
            state.bit = new[bit]
            self._open |= state.is_open << state.bit


def _renumbered(mask: int, new: dict[int, int]) -> int:
    found = 0
    while mask:
        bit = (mask & -mask).bit_length() - 1
        found |= 1 << new[bit] if bit in new else 0
        mask &= mask - 1
    return found
