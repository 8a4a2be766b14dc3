"""The router against one that looks at every replica."""

from __future__ import annotations

import random

import pytest

from nanoengine.replicas.router import FEW, Route, Router

SIZE = 4


class PlainRouter:
    """Sets and lists in place of masks and orders."""

    def __init__(self) -> None:
        self.cached: dict[int, set[bytes]] = {}
        self.loads: dict[int, int] = {}
        self.turns: dict[int, int] = {}
        self.open: set[int] = set()
        self.num_turns = 0

    def add(self, replica: int) -> None:
        self.cached[replica], self.loads[replica], self.turns[replica] = set(), 0, 0
        self.open.add(replica)

    def remove(self, replica: int) -> None:
        self.open.discard(replica)
        del self.cached[replica], self.loads[replica], self.turns[replica]

    def route(self, hashes: list[bytes], num_prompt: int, num_new: int) -> tuple[int, int]:
        def hit(replica: int) -> int:
            known = self.cached[replica]
            return SIZE * next((i for i, hash in enumerate(hashes) if hash not in known), len(hashes))

        def cost(replica: int) -> tuple[int, int, int]:
            return self.loads[replica] + num_prompt - hit(replica), self.turns[replica], replica

        best = min(self.open, key=cost)
        self.num_turns += 1
        self.turns[best] = self.num_turns
        self.loads[best] += num_prompt - hit(best) + num_new
        return best, hit(best)


@pytest.mark.parametrize(("seed", "most"), [(0, 3), (1, 8), (2, 8), (3, 20), (4, 2 * FEW), (5, 3 * FEW)])
def test_it_chooses_as_one_that_looks_at_every_replica(seed: int, most: int) -> None:
    rng = random.Random(seed)
    router, plain = Router(SIZE), PlainRouter()
    chains = [[rng.randbytes(16) for _ in range(rng.randint(1, 12))] for _ in range(6)]
    chains += [chain[: len(chain) // 2] + [rng.randbytes(16) for _ in range(4)] for chain in chains]
    routes: list[Route] = []
    seen = dict.fromkeys(("hit", "closed", "removed", "cleared", "swept", "others"), 0)
    number = 0
    for _ in range(most):
        number += 1
        router.add(number)
        plain.add(number)
    for _ in range(3000):
        act, known = rng.random(), list(plain.cached)
        if act < 0.5 and router.has_open:
            hashes = rng.choice(chains)[: rng.randint(0, 16)]
            num_prompt = len(hashes) * SIZE + rng.randint(1, SIZE)
            route = router.route(hashes, num_prompt, num_new=rng.randint(0, 9))
            assert (route.replica, route.num_cached_tokens) == plain.route(hashes, num_prompt, route.num_new)
            assert route.num_prompt == num_prompt - route.num_cached_tokens
            routes.append(route)
            seen["hit"] += route.num_cached_tokens > 0
            seen["others"] += not any(
                plain.loads[own] < plain.loads[route.replica] - route.num_prompt - route.num_new for own in plain.open
            )
        elif act < 0.6 and routes:
            place = rng.randrange(len(routes))
            if routes[place].num_prompt and rng.random() < 0.5:
                own = routes[place]
                routes[place] = router.begun(own)
                if own.replica in plain.loads:
                    plain.loads[own.replica] -= own.num_prompt
            else:
                own = routes.pop(place)
                router.ended(own)
                if own.replica in plain.loads:
                    plain.loads[own.replica] -= own.num_prompt + own.num_new
        elif act < 0.85 and known:
            replica, chain = rng.choice(known), rng.choice(chains)
            hashes = chain[: rng.randint(1, len(chain))]
            router.stored(replica, hashes)
            plain.cached[replica].update(hashes)
        elif act < 0.93 and known:
            replica, hash = rng.choice(known), rng.choice(rng.choice(chains))
            router.removed(replica, [hash])
            plain.cached[replica].discard(hash)
        elif act < 0.95 and known:
            replica = rng.choice(known)
            router.cleared(replica)
            plain.cached[replica].clear()
            seen["cleared"] += 1
        elif act < 0.96 and len(plain.open) > 1:
            replica = rng.choice(list(plain.open))
            router.close(replica)
            plain.open.discard(replica)
            seen["closed"] += 1
        elif act < 0.98 and len(known) > 1:
            replica = rng.choice(known)
            router.remove(replica)
            plain.remove(replica)
            seen["removed"] += 1
        if len(plain.cached) < most:
            number += 1
            router.add(number)
            plain.add(number)
        seen["swept"] += router._num_lost_bits == 0 and number > 20
        assert {replica: router.load(replica) for replica in plain.loads} == plain.loads
    assert all(seen.values()), f"the rare paths were met: {seen}"


def test_blocks_that_nobody_has_are_not_kept() -> None:
    router = Router(SIZE)
    for replica in range(3):
        router.add(replica)
        router.stored(replica, [b"a", bytes([replica])])
    for replica in range(3):
        router.removed(replica, [b"a", b"never there"])
    assert b"a" not in router.index
    for number in range(3, 400):  # each new one comes for one that is gone
        router.remove(number - 3)
        router.add(number)
        router.stored(number, [number.to_bytes(2, "big")])
    assert len(router.index) < 100
    assert len(router._owners) < 100
