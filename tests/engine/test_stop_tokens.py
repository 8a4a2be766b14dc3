"""StopTokens: no step in which somebody may end is taken for one in which nobody does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nanoengine.engine.messages import UNKNOWN
from nanoengine.engine.stop_tokens import StopTokens
from tests.engine.toys import FAST


def test_what_stands_for_no_token_always_counts() -> None:
    stops = StopTokens()
    assert stops.may_be_in([3, UNKNOWN])
    assert not stops.may_be_in([3, 4])
    stops.add(frozenset([4]))
    stops.remove(frozenset([4]))
    assert stops.may_be_in([UNKNOWN])
    assert not stops.may_be_in([4])


@FAST
@given(st.lists(st.frozensets(st.integers(0, 5), max_size=3), max_size=8), st.data())
def test_it_is_the_union_of_those_that_are_there(sets: list[frozenset[int]], data: st.DataObject) -> None:
    stops, there = StopTokens(), []
    for tokens in sets:
        stops.add(tokens)
        there.append(tokens)
        if data.draw(st.booleans()):
            gone = there.pop(data.draw(st.integers(0, len(there) - 1)))
            stops.remove(gone)
        any_of_them = frozenset().union(*there)
        assert [token for token in range(6) if stops.may_be_in([token])] == sorted(any_of_them)
