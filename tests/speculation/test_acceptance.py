from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.speculation.acceptance import FIRST_GUESS, FIRST_RATE, LEARNING_RATE, Acceptance
from tests.speculation.scripted import FAST

NUM_DRAFTS = 5
runs = st.integers(1, NUM_DRAFTS).flatmap(lambda count: st.tuples(st.just(count), st.integers(0, count)))


@FAST
@given(history=st.lists(runs, max_size=30))
def test_each_place_learns_from_the_drafts_that_came_to_it(history: list[tuple[int, int]]) -> None:
    """A draft behind one that was rejected says nothing of its place, nor does a run that was shorter."""
    acceptance = Acceptance(NUM_DRAFTS)
    likely = 1.0
    for num_drafts, num_accepted in history:
        acceptance.record(num_drafts, num_accepted)
    chances = acceptance.chances(NUM_DRAFTS)
    for place in range(NUM_DRAFTS):
        rate, times = FIRST_GUESS, 0
        for num_drafts, num_accepted in history:
            if place < num_drafts and num_accepted >= place:
                rate += max(1 / (1 / FIRST_RATE + times), LEARNING_RATE) * ((num_accepted > place) - rate)
                times += 1
        likely *= rate
        assert chances[place] == pytest.approx(likely)
    assert all(0 <= chance <= 1 for chance in chances)
    assert chances == sorted(chances, reverse=True), "no draft is likelier than the one before it"
    assert acceptance.chances(2) == chances[:2]
