"""Guesses by counting, against contexts and continuations that are counted by scanning."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanoengine.speculation.suffix import (
    CONTEXT,
    DOUBT,
    LEAST_CONTEXT,
    MOST_CONTINUATIONS,
    SEPARATOR,
    Reader,
    RecentOutputs,
    SuffixProposer,
)
from nanoengine.speculation.suffix_automaton import SuffixAutomaton

pieces = st.integers(1, 3).flatmap(lambda most: st.lists(st.integers(0, most), max_size=40))
loops = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(lambda loop: loop * 12)
texts = st.lists(pieces | loops, min_size=1, max_size=3).map(lambda parts: [token for part in parts for token in part])
leasts = st.sampled_from([0.01, 0.2, 0.5, 0.9])
SALT = "salt"


def places(text: list[int], string: list[int]) -> list[int]:
    """Where the string ends in the text."""
    return [end for end in range(len(string), len(text) + 1) if text[end - len(string) : end] == string]


def scanned_context(tokens: list[int], text: list[int], most_places: int) -> list[int]:
    """The longest end of the tokens that the text has at more places than that."""
    for length in range(min(CONTEXT, len(tokens)), 0, -1):
        if len(places(text, tokens[-length:])) > most_places:
            return tokens[-length:]
    return []


def scanned_guess(context: list[int], text: list[int], most: int, least: float) -> tuple[list[int], float]:
    """The walk of `likeliest`, each step counted by a scan."""
    guess: list[int] = []
    expected, likelihood = 0.0, 1.0
    while len(guess) < most and len(context) >= LEAST_CONTEXT:
        followers = [text[end] for end in places(text, context) if end < len(text)]
        if not followers:
            context = context[1:]
            continue
        kinds = list(dict.fromkeys(followers))  # in the order of their first places
        if len(kinds) > MOST_CONTINUATIONS:
            break
        count, _, token = max((followers.count(kind), order, kind) for order, kind in enumerate(kinds))
        likelihood *= count / (len(followers) + DOUBT / len(context))
        if token == SEPARATOR or likelihood < least:
            break
        guess.append(token)
        expected += likelihood
        context = [*context, token][-CONTEXT:]
    return guess, expected


def scanned(tokens: list[int], outputs: list[list[int]], most: int, least: float) -> list[int]:
    """The guess of a sequence that meets these outputs, all of one generation."""
    own = scanned_guess(scanned_context(tokens, tokens, 1), tokens, most, least)
    recent = [token for output in outputs if output for token in (*output, SEPARATOR)]
    others = scanned_guess(scanned_context(tokens, recent, 0), recent, most, least)
    return max(own, others, key=lambda guess: guess[1])[0]


def after(outputs: list[list[int]], **options: float) -> SuffixProposer:
    """A proposer that has seen these outputs end."""
    proposer = SuffixProposer(**options)  # type: ignore[arg-type]
    for output in outputs:
        proposer.begin([0], SALT).end([0, *output])
    return proposer


def guess(proposer: SuffixProposer, tokens: list[int], most: int = 8, salt: str = SALT) -> list[int]:
    return proposer.begin(tokens, salt).fork().propose(tokens, most)


@given(tokens=texts, most=st.integers(0, 12), least=leasts)
def test_the_guess_from_the_own_text_is_that_of_a_scan(tokens: list[int], most: int, least: float) -> None:
    assert guess(SuffixProposer(least), tokens, most) == scanned(tokens, [], most, least)


@given(tokens=pieces | loops, outputs=st.lists(pieces | loops, max_size=3), least=leasts)
def test_the_guess_from_own_text_and_recent_outputs_is_that_of_a_scan(
    tokens: list[int], outputs: list[list[int]], least: float
) -> None:
    found = guess(after(outputs, least_likelihood=least), tokens)
    assert found == scanned(tokens, outputs, 8, least)
    assert SEPARATOR not in found


@given(tokens=texts, outputs=st.lists(pieces | loops, max_size=2), data=st.data())
def test_it_does_not_matter_how_many_tokens_a_call_brings(
    tokens: list[int], outputs: list[list[int]], data: st.DataObject
) -> None:
    """Nor does it matter how many of them are the prompt, which other completions go on from in other ways."""
    proposer = after(outputs)
    prompt = tokens[: data.draw(st.integers(0, len(tokens)))]
    read = proposer.begin(prompt, SALT)
    other, guesser = read.fork(), read.fork()
    other.propose([*prompt, *range(4), *range(4)], 8)
    end = len(prompt)
    while end < len(tokens):
        end = data.draw(st.integers(end, len(tokens)))
        assert guesser.propose(tokens[:end], 8) == guess(proposer, tokens[:end])
        end += 1


@given(tokens=texts, others=texts, data=st.data())
def test_a_reader_stays_right_while_the_automaton_grows(
    tokens: list[int], others: list[int], data: st.DataObject
) -> None:
    automaton = SuffixAutomaton(CONTEXT + 1)
    reader = Reader(automaton)
    end = known = grown = 0  # tokens read, tokens in the automaton, tokens read when it grew last
    while end < len(tokens):
        more = data.draw(st.integers(0, len(others) - known))
        for token in others[known : known + more]:
            automaton.append(token)
        known += more
        grown = end if more else grown
        end = data.draw(st.integers(end + 1, len(tokens)))
        reader.read(tokens[:end])
        _, state, length = reader.context
        context = tokens[end - length : end]
        assert not length or automaton.counts[state] == len(places(others[:known], context)) > 0
        longest = scanned_context(tokens[:end], others[:known], 0)
        assert length <= len(longest)
        if end - grown >= CONTEXT or not length:
            assert context == longest
        fresh = Reader(automaton)
        fresh.read(tokens[:end])
        assert fresh.context.length == len(longest)


def test_a_context_with_very_many_continuations_has_no_guess() -> None:
    def behind(kinds: int) -> list[int]:
        return [token for kind in range(kinds) for token in (1, 2, 100 + kind)] + [1, 2, 100] * 90

    assert guess(SuffixProposer(), [*behind(MOST_CONTINUATIONS), 7, 1, 2], 1) == [100]
    assert guess(SuffixProposer(), [*behind(MOST_CONTINUATIONS + 1), 7, 1, 2], 1) == []


def test_a_running_sequence_meets_what_ends_beside_it() -> None:
    proposer = SuffixProposer()
    guesser = proposer.begin([8, 1], SALT)
    assert guesser.propose([8, 1, 2], 1) == []
    proposer.begin([5, 1, 2, 6], SALT).end([5, 1, 2, 6, 1, 2, 3, 4])
    assert guess(proposer, [5, 1], 1) == [], "only outputs are left to others"
    assert guesser.propose([8, 1, 2], 1) == [3]
    assert guesser.propose([8, 1, 2, 3], 1) == [4]


def test_outputs_with_another_salt_are_never_met() -> None:
    proposer = SuffixProposer()
    proposer.begin([], "mine").end([1, 2, 3, 4, 5])
    guesser = proposer.begin([], "yours")
    assert guesser.propose([1, 2], 2) == []
    proposer.begin([], "mine").end([1, 2, 3, 4, 5])
    assert guesser.propose([1, 2, 3], 2) == []
    guesser.end([1, 2, 6])
    assert guess(proposer, [1, 2], 1, "yours") == [6]
    assert guess(proposer, [1, 2], 1, "mine") == [3]


@pytest.mark.parametrize("is_begun", [True, False])
def test_the_salt_that_was_not_used_for_longest_goes(is_begun: bool) -> None:
    """The beginning of a request is a use, and so is the end of an output; who says nothing takes no place."""
    proposer = SuffixProposer(max_salts=2)
    early = proposer.begin([], "a")
    for salt in ("a", "b"):
        proposer.begin([], salt).end([1, 2, 3])
    running = proposer.begin([1, 2], "b")
    assert running.propose([1, 2], 1) == [3]
    if is_begun:
        proposer.begin([], "a")
    else:
        early.end([1, 2, 3])
    proposer.begin([1, 2, 3], "d").end([1, 2, 3])
    proposer.begin([], "c").end([1, 2, 3])
    assert [guess(proposer, [1, 2], 1, salt) for salt in ("a", "b", "c")] == [[3], [], [3]]
    assert running.propose([1, 2], 1) == [], "a running sequence keeps nothing that has gone"


@example(lengths=[12, 11], half=24)  # one token too many, with the separators
@given(lengths=st.lists(st.integers(1, 90), max_size=20), half=st.integers(24, 40))
def test_outputs_are_kept_up_to_a_bound_the_latest_ones_always(lengths: list[int], half: int) -> None:
    outputs = RecentOutputs(2 * half)
    proposer = SuffixProposer(max_tokens=2 * half)
    said: list[list[int]] = []
    for length in lengths:
        start = sum(map(len, said))
        said.append(list(range(start, start + length)))  # no token is said twice
        outputs.keep(said[-1])
        proposer.keep(said[-1], SALT)
        assert all(automaton.num_tokens <= half for automaton in outputs.generations)
        assert len(outputs.generations) <= 2
        known = [guess(proposer, output[-3:-1], 1) == output[-1:] for output in said if len(output) > 2]
        assert known == sorted(known), "older ones go first"
        kept = 0
        for output in reversed(said):
            kept += min(len(output) + 1, half)
            if kept <= half and len(output) > 2:
                assert guess(proposer, output[-3:-1], 1) == output[-1:]


def test_a_running_sequence_goes_over_to_new_generations() -> None:
    proposer = SuffixProposer(max_tokens=2 * 24)  # each has one of these outputs
    running = proposer.begin([], SALT)
    text: list[int] = []
    for number in range(0, 1000, 100):
        proposer.begin([], SALT).end([number, number + 1, *range(number + 50, number + 70)])
        text += [number, number + 1]
        assert running.propose(text, 1) == [number + 50]
        text += [number + 60, number + 61]
        assert running.propose(text, 1) == [number + 62]
    text += [862, 863]
    assert running.propose(text, 1) == [864], "of the generation before"
    text += [762, 763]
    assert running.propose(text, 1) == [], "gone"
