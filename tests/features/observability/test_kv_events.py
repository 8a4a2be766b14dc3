"""KV events: a listener knows what the pool has cached (always: test_observer.py), and can break nothing."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from nanoengine.features.observability.kv_events import AllCleared, BlockRemoved, BlockStored, KVEvent
from tests.core.toys import run

from .toys import Observed


class Router:
    """What a listener knows."""

    def __init__(self, observed: Observed):
        self.observed = observed
        self.heard: list[KVEvent] = []
        self.known: dict[tuple[int, bytes], list[int]] = {}
        observed.observer.events.attach(self.hear, observed.engine)

    def hear(self, event: KVEvent) -> None:
        self.heard.append(event)
        match event:
            case BlockStored(hash, _, _, group):
                assert (group, hash) not in self.known
                self.known[group, hash] = event.token_ids()
            case BlockRemoved(hash, group):
                del self.known[group, hash]
            case AllCleared():
                self.known.clear()

    def check(self) -> None:
        blocks = self.observed.engine.scheduler.blocks
        assert self.known.keys() == {(group, hash) for group, index in enumerate(blocks.index) for hash in index}


def test_each_full_block_is_stored_once_behind_its_parent_when_its_step_is_done() -> None:
    observed = Observed()
    router = Router(observed)
    observed.add([1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    assert router.heard == []
    observed.engine.step()
    first, second = router.heard
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.parent_hash, second.parent_hash) == (b"", first.hash)
    assert [first.token_ids(), second.token_ids()] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    run(observed.engine, [])
    observed.add([1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    run(observed.engine, [])
    assert len(router.heard) == 2, "nothing is stored again"


def test_a_reset_that_is_refused_says_nothing_and_one_that_works_says_so_at_once() -> None:
    observed = Observed()
    router = Router(observed)
    observed.add([1] * 9, 3)
    observed.engine.step()
    router.heard.clear()
    assert not observed.engine.reset_prefix_cache()
    assert router.heard == []
    run(observed.engine, [])
    router.heard.clear()
    assert observed.engine.reset_prefix_cache()
    assert router.heard == [AllCleared()]
    router.check()


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_late_listener_is_told_what_is_cached_parents_first(num_groups: int) -> None:
    observed = Observed(num_blocks=20 * num_groups, max_model_len=30, num_groups=num_groups)
    for number in range(12):
        observed.add([number % 3] * 4 + [number] * 9, 5)
        observed.engine.step()
    observed.engine.step()
    router, seen = Router(observed), set()
    router.check()
    assert router.known
    blocks = observed.engine.scheduler.blocks
    for event in router.heard:
        assert isinstance(event, BlockStored)
        assert (event.group, event.parent_hash) in seen or event.parent_hash not in blocks.index[event.group]
        seen.add((event.group, event.hash))
    run(observed.engine, [])
    router.check()
    assert Counter(map(type, router.heard))[BlockRemoved] > 0


def test_nothing_is_collected_for_nobody() -> None:
    observed = Observed()
    router = Router(observed)
    observed.observer.events.attach(None, observed.engine)
    observed.add([1] * 9, 3)
    run(observed.engine, [])
    assert router.heard == observed.observer.events._events == []
    assert observed.engine.scheduler.parts == [observed.observer], "it is not even asked"


def test_an_error_of_the_listener_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    observed, heard = Observed(), list[KVEvent]()

    def listener(event: KVEvent) -> None:
        heard.append(event)
        raise ValueError("no")

    observed.observer.events.attach(listener, observed.engine)
    with caplog.at_level(logging.WARNING, "nanoengine"):
        observed.add([1] * 9, 1)
        run(observed.engine, [])
    assert len(heard) == observed.snapshot().num_listener_errors == 2, "the second event was told too"
    assert len(caplog.records) == 1
