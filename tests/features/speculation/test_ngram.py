"""Prompt lookup, against a scan of the whole text."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import example, given
from hypothesis import strategies as st

from nanoengine.features.speculation import ngram
from nanoengine.features.speculation.ngram import NgramProposer

texts = st.integers(0, 4).flatmap(lambda most: st.lists(st.integers(0, most), max_size=60))
sizes = st.integers(1, 3)


def guess(token_ids: list[int], most: int = 8, size: int = 2) -> list[int]:
    known = token_ids.copy()
    found = list(NgramProposer(size).begin(token_ids).propose(token_ids, most))
    assert token_ids == known, "they are the sequence's own"
    return found


def in_common(text: list[int], place: int) -> int:
    """How many tokens before the place are the same as those before the end of the text, as far as they are compared."""
    count = 0
    while count < min(place, ngram.MAX_COMMON) and text[place - 1 - count] == text[len(text) - 1 - count]:
        count += 1
    return count


def scanned_place(text: list[int], size: int) -> tuple[int | None, int]:
    """Of the latest places behind the last tokens, the latest that has the most in common with the end, and how much that is."""
    places = [place for place in range(1, len(text)) if in_common(text, place) >= size][-ngram.MAX_OCCURRENCES :]
    place = max(places, key=lambda place: (in_common(text, place), place), default=None)
    return place, 0 if place is None else in_common(text, place)


def copied(text: list[int], place: int | None, most: int) -> list[int]:
    """What follows a place, the copy itself included."""
    if place is None:
        return []
    whole = list(text)
    for i in range(most):
        whole.append(whole[place + i])
    return whole[len(text) :]


@given(text=texts, size=sizes, most=st.integers(0, 20), limits=st.tuples(st.integers(1, 9), st.integers(3, 9)))
@example(
    text=[1, 2, 3] * 4 + [1, 2], size=2, most=10, limits=(16, 32)
)  # a loop: it is guessed beyond the end of the text
@example(text=[0, 1, 2, 70, 9, 1, 2, 71, 8, 0, 1, 2], size=2, most=1, limits=(16, 32))  # the latest has less in common
def test_the_guess_is_that_of_a_scan(text: list[int], size: int, most: int, limits: tuple[int, int]) -> None:
    with patch.multiple(ngram, MAX_OCCURRENCES=limits[0], MAX_COMMON=limits[1]):
        place, common = scanned_place(text, size)
        assert guess(text, most, size) == copied(text, place, min(most, common))


@given(text=texts, size=sizes, data=st.data())
def test_it_does_not_matter_how_many_tokens_a_call_brings(text: list[int], size: int, data: st.DataObject) -> None:
    """Nor does it matter how many of them are the prompt, which other completions go on from in other ways."""
    prompt = text[: data.draw(st.integers(0, len(text)))]
    read = NgramProposer(size).begin(prompt)
    other, proposer = read.fork(), read.fork()
    other.propose([*prompt, *range(3), *range(3)], 8)
    end = len(prompt)
    while end < len(text):
        end = data.draw(st.integers(end, len(text)))
        assert list(proposer.propose(text[:end], 8)) == guess(text[:end], size=size)
        end += 1


def test_requests_share_nothing() -> None:
    proposer = NgramProposer()
    proposer.begin([1, 2, 3, 4, 5]).propose([1, 2, 3, 4, 5], 4)
    assert proposer.begin([1, 2]).propose([1, 2], 4) == []


def test_completions_do_not_read_their_prompt_again() -> None:
    """What each of them adds is its own."""
    prompt = [i * i % 1009 for i in range(20_000)]
    read = NgramProposer().begin(prompt)
    forks = [read.fork() for _ in range(64)]
    for number, fork in enumerate(forks):
        fork.propose([*prompt, number], 8)
    assert sum(len(fork._latest) for fork in forks) <= 64
