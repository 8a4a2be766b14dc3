"""Where the router sends requests, and what it believes of each replica."""

from __future__ import annotations

import random

import pytest

from nanoengine.scale.replicas.router import Route, Router

SIZE = 4
CHAIN = [bytes([number]) * 16 for number in range(10)]


def router_of(*replicas: int) -> Router:
    router = Router(SIZE)
    for replica in replicas:
        router.add(replica)
    return router


def chosen(router: Router, hashes: list[bytes], num_prompt: int = 0, num_new: int = 0) -> int:
    """The choice, of which nothing stays reserved."""
    route = router.route(hashes, num_prompt, num_new)
    router.ended(route)
    return route.replica


def test_a_prompt_goes_where_most_of_its_beginning_is_cached() -> None:
    router = router_of(1, 2, 3)
    router.stored(2, CHAIN[:4])
    router.stored(3, [*CHAIN[:2], *CHAIN[3:]])  # with a gap: what is behind it is of no use
    assert router.route(CHAIN, 41, 9) == Route(2, 16, 25, 9)
    router = router_of(1, 2)
    router.stored(1, CHAIN)
    assert router.route(CHAIN[:3], 12, 0) == Route(1, 12, 0, 0), "all of it is cached"
    router.removed(1, [CHAIN[1], b"never there"])
    assert router.route(CHAIN[:3], 12, 0) == Route(1, 4, 8, 0)


def test_what_is_to_be_done_outweighs_what_is_cached() -> None:
    router = router_of(1, 2)
    router.stored(1, CHAIN[:5])
    assert [router.route(CHAIN[:5], 22, 8).replica for _ in range(4)] == [1, 1, 2, 1]
    assert (router.load(1), router.load(2)) == (30, 30)


def test_tokens_are_reserved_until_they_are_computed() -> None:
    router = router_of(1)
    first, second = router.route([], 10, 5), router.route([], 20, 7)
    assert router.load(1) == 42
    first = router.begun(first)
    assert (first, router.load(1)) == (Route(1, 0, 0, 5), 32)
    router.ended(first)
    router.ended(second)
    assert router.load(1) == 0


def test_of_equal_costs_the_replica_wins_that_was_chosen_longest_ago() -> None:
    router = router_of(1, 2, 3)
    assert [chosen(router, []) for _ in range(6)] == [1, 2, 3, 1, 2, 3]


def test_a_replica_that_is_cleared_or_removed_has_nothing() -> None:
    router = router_of(1, 2)
    router.stored(1, CHAIN)
    router.cleared(1)
    assert router.cached(1) == set()
    assert router.route(CHAIN, 50, 0).num_cached_tokens == 0
    router.stored(2, CHAIN)
    route = router.route(CHAIN, 50, 0)
    router.remove(2)
    router.ended(route)  # its replica is gone, and what it had reserved there
    router.add(2)
    assert (router.cached(2), router.load(2)) == (set(), 0)


@pytest.mark.parametrize("seed", range(3))
def test_a_burst_with_one_prefix_is_spread(seed: int) -> None:
    rng = random.Random(seed)
    router = router_of(*range(4))
    for _ in range(40):
        router.route(CHAIN, 4 * len(CHAIN), rng.randint(1, 20))
    loads = [router.load(number) for number in range(4)]
    assert max(loads) - min(loads) <= 60, "less than one request more than another"
