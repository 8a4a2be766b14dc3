from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.engine.kv.block_pool import Prefix
from nanoengine.engine.kv.host_tier import HostTier
from tests.engine.toys import FAST


def prefixes(count: int) -> list[Prefix]:
    return [Prefix(bytes([i]), None, b"") for i in range(count)]


def test_slots_are_handed_out_once_each() -> None:
    tier = HostTier(3)
    assert sorted(tier.put(prefix) for prefix in prefixes(3)) == [0, 1, 2]
    assert not tier.has_room


def test_a_prefix_knows_its_slot_until_it_is_dropped() -> None:
    tier = HostTier(2)
    [prefix] = prefixes(1)
    slot = tier.put(prefix)
    assert prefix.host_slot == slot
    tier.drop(prefix)
    assert prefix.host_slot is None
    assert tier.has_room
    tier.check()


def test_the_oldest_is_the_one_that_was_put_or_used_longest_ago() -> None:
    tier = HostTier(3)
    first, second, third = prefixes(3)
    for prefix in (first, second, third):
        tier.put(prefix)
    assert tier.oldest() is first
    tier.use(first)
    assert tier.oldest() is second
    tier.drop(second)
    assert tier.oldest() is third


def test_an_empty_tier_has_no_oldest() -> None:
    assert HostTier(2).oldest() is None


def test_a_dropped_slot_is_used_again() -> None:
    tier = HostTier(1)
    first, second = prefixes(2)
    slot = tier.put(first)
    tier.drop(first)
    assert tier.put(second) == slot


def test_clear_drops_everything() -> None:
    tier = HostTier(3)
    kept = prefixes(3)
    for prefix in kept:
        tier.put(prefix)
    tier.clear()
    tier.check()
    assert [prefix.host_slot for prefix in kept] == [None] * 3
    assert len(tier.free_slots) == 3


def test_check_notices_a_lost_slot_and_a_wrong_one() -> None:
    tier = HostTier(2)
    [prefix] = prefixes(1)
    tier.put(prefix)
    tier.check()
    prefix.host_slot = 1 - prefix.host_slot  # type: ignore[operator]
    with pytest.raises(AssertionError):
        tier.check()
    tier = HostTier(2)
    tier.free_slots.pop()
    with pytest.raises(AssertionError):
        tier.check()


@FAST
@given(st.lists(st.tuples(st.sampled_from(["put", "use", "drop", "clear"]), st.integers(0, 99)), max_size=60))
def test_any_run_of_calls_agrees_with_a_list_in_order_of_use(calls: list[tuple[str, int]]) -> None:
    tier = HostTier(4)
    order: list[Prefix] = []
    for name, number in calls:
        if name == "put" and tier.has_room:
            order.append(Prefix(b"", None, b""))
            tier.put(order[-1])
        elif name == "clear" and number > 80:
            tier.clear()
            order = []
        elif name == "use" and order:
            prefix = order.pop(number % len(order))
            tier.use(prefix)
            order.append(prefix)
        elif name == "drop" and order:
            tier.drop(order.pop(number % len(order)))
        tier.check()
        assert list(tier.entries.values()) == order
        assert tier.oldest() is (order[0] if order else None)
        assert len(tier.free_slots) == 4 - len(order)
