"""Where the router sends requests."""

from __future__ import annotations

import random

from nanoengine.scale.replicas.router import ReplicaCandidate, Router

SIZE = 4
CHAIN = [bytes([number]) * 16 for number in range(10)]


def chosen(router: Router, candidates: list[ReplicaCandidate], hashes: list[bytes]) -> int:
    """The choice, of which nothing stays reserved."""
    route = router.route(candidates, hashes, 0, 0)
    route.ended()
    return route.replica.number


def test_a_prompt_goes_where_most_of_its_beginning_is_cached() -> None:
    with_gap = {*CHAIN[:2], *CHAIN[3:]}  # what is behind the gap is of no use
    candidates = [ReplicaCandidate(1), ReplicaCandidate(2, cached=set(CHAIN[:4])), ReplicaCandidate(3, cached=with_gap)]
    route = Router(SIZE).route(candidates, CHAIN, 41, 9)
    assert (route.replica.number, route.num_cached_tokens, route.num_prompt, route.num_new) == (2, 16, 25, 9)
    route = Router(SIZE).route([ReplicaCandidate(2), ReplicaCandidate(1, cached=set(CHAIN))], CHAIN[:3], 12, 0)
    assert (route.replica.number, route.num_cached_tokens, route.num_prompt) == (1, 12, 0), "all of it is cached"


def test_what_is_to_be_done_outweighs_what_is_cached() -> None:
    router, candidates = Router(SIZE), [ReplicaCandidate(1, cached=set(CHAIN[:5])), ReplicaCandidate(2)]
    assert [router.route(candidates, CHAIN[:5], 22, 8).replica.number for _ in range(4)] == [1, 1, 2, 1]
    assert [candidate.load for candidate in candidates] == [30, 30]


def test_tokens_are_reserved_until_they_are_computed() -> None:
    router, candidate = Router(SIZE), ReplicaCandidate(1)
    first, second = router.route([candidate], [], 10, 5), router.route([candidate], [], 20, 7)
    assert candidate.load == 42
    first.begun()
    assert (first.num_prompt, candidate.load) == (0, 32)
    first.ended()
    second.ended()
    assert candidate.load == 0


def test_of_equal_costs_the_replica_wins_that_was_chosen_longest_ago() -> None:
    router, candidates = Router(SIZE), [ReplicaCandidate(1), ReplicaCandidate(2), ReplicaCandidate(3)]
    assert [chosen(router, candidates, []) for _ in range(6)] == [1, 2, 3, 1, 2, 3]


def test_a_burst_with_one_prefix_is_spread() -> None:
    rng, router, candidates = random.Random(0), Router(SIZE), [ReplicaCandidate(number) for number in range(4)]
    for _ in range(40):
        router.route(candidates, CHAIN, 4 * len(CHAIN), rng.randint(1, 20))
    loads = [candidate.load for candidate in candidates]
    assert max(loads) - min(loads) <= 60, "less than one request more than another"
