from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.engine.kv.block_pool import Prefix, PrefixKV
from nanoengine.engine.kv.host_tier import HostTier
from tests.engine.kv.toys import FAST


def put(tier: HostTier, count: int = 1) -> list[PrefixKV]:
    """New prefixes, each in a slot of its own."""
    prefixes = [PrefixKV(Prefix(bytes([i]), None, b"", 1), 0) for i in range(count)]
    for prefix in prefixes:
        tier.put(tier.free_slots.pop(), prefix, filled=True)
    return prefixes


def test_slots_are_handed_out_once_each() -> None:
    tier = HostTier(3)
    assert sorted(prefix.host_slot or 0 for prefix in put(tier, 3)) == [0, 1, 2]
    assert not tier.free_slots


def test_a_prefix_knows_its_slot_until_it_is_dropped() -> None:
    tier = HostTier(2)
    [prefix] = put(tier)
    assert prefix.host_slot is not None
    assert prefix.host_filled
    tier.drop(prefix)
    assert prefix.host_slot is None
    assert not prefix.host_filled
    assert len(tier.free_slots) == 2
    tier.check()


def test_the_oldest_is_the_one_that_was_put_or_used_longest_ago() -> None:
    tier = HostTier(3)
    first, second, third = put(tier, 3)
    assert tier.oldest() is first
    tier.use(first)
    assert tier.oldest() is second
    tier.drop(second)
    assert tier.oldest() is third


def test_an_empty_tier_has_no_oldest() -> None:
    assert HostTier(2).oldest() is None


def test_a_dropped_slot_is_used_again() -> None:
    tier = HostTier(1)
    [first] = put(tier)
    tier.drop(first)
    [second] = put(tier)
    assert second.host_slot == 0


def test_a_pinned_slot_is_not_the_oldest_and_not_free_before_the_last_pin_is_gone() -> None:
    tier = HostTier(2)
    first, second = put(tier, 2)
    slot = first.host_slot
    assert slot is not None
    tier.pin(slot)
    tier.pin(slot)
    assert tier.oldest() is second
    tier.drop(first)
    tier.unpin(slot)
    tier.check()
    assert tier.free_slots == []
    tier.unpin(slot)
    tier.check()
    assert tier.free_slots == [slot]


def test_a_slot_that_is_still_used_stays_with_its_prefix_when_it_is_unpinned() -> None:
    tier = HostTier(1)
    [prefix] = put(tier)
    tier.pin(0)
    assert tier.oldest() is None
    tier.unpin(0)
    assert tier.oldest() is prefix
    assert tier.free_slots == []


def test_clear_drops_everything() -> None:
    tier = HostTier(3)
    kept = put(tier, 3)
    tier.clear()
    tier.check()
    assert [prefix.host_slot for prefix in kept] == [None] * 3
    assert len(tier.free_slots) == 3


def test_check_notices_a_lost_slot_and_a_wrong_one() -> None:
    tier = HostTier(2)
    [prefix] = put(tier)
    tier.check()
    prefix.host_slot = 1 - prefix.host_slot  # type: ignore[operator]
    with pytest.raises(AssertionError):
        tier.check()
    tier = HostTier(2)
    tier.free_slots.pop()
    with pytest.raises(AssertionError):
        tier.check()


@FAST
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "use", "drop", "pin", "unpin", "clear"]), st.integers(0, 99)), max_size=60
    )
)
def test_any_run_of_calls_agrees_with_a_list_in_order_of_use(calls: list[tuple[str, int]]) -> None:
    tier = HostTier(4)
    order: list[PrefixKV] = []
    pinned: list[int] = []
    for name, number in calls:
        if name == "put" and tier.free_slots:
            order += put(tier)
        elif name == "clear" and number > 80:
            tier.clear()
            order = []
        elif name == "pin" and order:
            slot = order[number % len(order)].host_slot
            assert slot is not None
            tier.pin(slot)
            pinned.append(slot)
        elif name == "unpin" and pinned:
            tier.unpin(pinned.pop(number % len(pinned)))
        elif name == "use" and order:
            prefix = order.pop(number % len(order))
            tier.use(prefix)
            order.append(prefix)
        elif name == "drop" and order:
            tier.drop(order.pop(number % len(order)))
        tier.check()
        assert list(tier.entries.values()) == order
        assert tier.oldest() is next((prefix for prefix in order if prefix.host_slot not in pinned), None)
        held = {prefix.host_slot for prefix in order} | set(pinned)
        assert len(tier.free_slots) == 4 - len(held)
