"""The suffix automaton, against all strings of a text, listed."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from nanoengine.speculation.suffix_automaton import NONE, ROOT, SuffixAutomaton

texts = st.integers(1, 3).flatmap(lambda most: st.lists(st.integers(0, most), max_size=60))
loops = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.lists(st.integers(0, 2), max_size=8)).map(
    lambda pieces: (pieces[0] * 8 + pieces[1]) * 2
)
depths = st.integers(1, 6)


def automaton_of(text: list[int], depth: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton(depth)
    for token in text:
        automaton.append(token)
    return automaton


def find(automaton: SuffixAutomaton, string: list[int]) -> int:
    """The state that the edges lead to; NONE where they do not."""
    state = ROOT
    for token in string:
        state = automaton.edges[state].get(token, NONE)
        if state == NONE:
            break
    return state


def strings_of(text: list[int], depth: int) -> Counter[tuple[int, ...]]:
    """How often each string of 1 to `depth` tokens occurs."""
    return Counter(
        tuple(text[start : start + length]) for length in range(1, depth + 1) for start in range(len(text) - length + 1)
    )


def accepted(automaton: SuffixAutomaton, depth: int) -> dict[tuple[int, ...], int]:
    """All strings of 1 to `depth` tokens that edges spell, with the counts of their states."""
    found: dict[tuple[int, ...], int] = {}
    level: list[tuple[tuple[int, ...], int]] = [((), ROOT)]
    for _ in range(depth):
        level = [((*string, t), after) for string, state in level for t, after in automaton.edges[state].items()]
        found |= {string: automaton.counts[state] for string, state in level}
    return found


@given(text=texts | loops, depth=depths)
def test_it_holds_exactly_the_strings_of_its_text_how_often_each_occurs_and_what_followed_first(
    text: list[int], depth: int
) -> None:
    automaton = automaton_of(text, depth)
    assert accepted(automaton, depth) == strings_of(text, depth)
    assert len(automaton.edges) <= 2 * len(text) + 1, "a token adds two states at most"
    for string in strings_of(text, depth - 1):
        ends = range(len(string), len(text))
        followers = [text[end] for end in ends if tuple(text[end - len(string) : end]) == string]
        assert list(automaton.edges[find(automaton, list(string))]) == list(dict.fromkeys(followers))


@given(text=texts | loops, depth=depths)
def test_the_last_state_is_that_of_the_last_tokens_and_its_way_to_the_root_is_short(
    text: list[int], depth: int
) -> None:
    automaton = SuffixAutomaton(depth)
    for end, token in enumerate(text, 1):
        automaton.append(token)
        assert automaton.last == find(automaton, text[max(end - depth, 0) : end])
        assert automaton.num_tokens == end
        state, steps = automaton.last, 0
        while state != ROOT:
            state, steps = automaton.links[state], steps + 1
        assert steps <= depth


@given(text=texts | loops, depth=depths)
def test_a_link_leads_to_the_longest_suffix_that_occurs_more_often(text: list[int], depth: int) -> None:
    automaton = automaton_of(text, depth)
    counts = strings_of(text, depth)
    for string in counts:
        link = automaton.links[find(automaton, list(string))]
        more = [n for n in range(1, len(string)) if counts[string[-n:]] > counts[string]]
        assert automaton.lengths[link] == max(more, default=0)
        assert link == find(automaton, list(string[len(string) - automaton.lengths[link] :]))


def test_a_loop_adds_states_only_at_first() -> None:
    assert len(automaton_of([7] * 5000, 8).edges) == len(automaton_of([7] * 50, 8).edges)
    assert len(automaton_of([1, 2, 3] * 2000, 8).edges) == len(automaton_of([1, 2, 3] * 20, 8).edges)


@given(text=texts | loops, depth=depths)
def test_who_holds_a_state_finds_its_strings_again_when_it_was_split(text: list[int], depth: int) -> None:
    automaton = SuffixAutomaton(depth)
    held: dict[tuple[int, ...], int] = {}  # each string and the state that it had when it was first seen
    for end, token in enumerate(text, 1):
        automaton.append(token)
        for length in range(1, min(depth, end) + 1):
            string = text[end - length : end]
            held.setdefault(tuple(string), find(automaton, string))
        for string, state in held.items():
            assert automaton.holder(state, len(string)) == find(automaton, list(string))


@given(text=texts | loops, depth=depths, data=st.data())
def test_a_fork_is_the_automaton_of_its_own_text_and_changes_no_other(
    text: list[int], depth: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(text)))
    base, known = automaton_of(text[:first], depth), automaton_of(text[:first], depth)
    other = base.fork()
    for token in (0, 5, 0, 1, 5, 5, 0):
        other.append(token)
    fork = base.fork()
    for token in text[first:]:
        fork.append(token)
    whole = automaton_of(text, depth)
    for name in ("edges", "links", "lengths", "counts", "last", "num_tokens"):
        assert getattr(fork, name) == getattr(whole, name)
        assert getattr(base, name) == getattr(known, name)
    assert [list(own) for own in fork.edges] == [list(own) for own in whole.edges], "in the same order"


def test_a_fork_shares_most_edges_with_its_prompt() -> None:
    base = automaton_of([i * i % 1009 for i in range(5000)], 24)
    fork = base.fork()
    for token in range(50):
        fork.append(token)
    shared = sum(own is its for own, its in zip(base.edges, fork.edges, strict=False))
    assert shared > len(base.edges) - 200
