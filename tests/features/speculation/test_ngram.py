"""Prompt lookup, against a scan of the whole text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from nanoengine.features.speculation.ngram import NgramProposer

texts = st.integers(0, 4).flatmap(lambda most: st.lists(st.integers(0, most), max_size=60))
sizes = st.tuples(st.integers(1, 3), st.integers(0, 3)).map(lambda pair: (pair[0], sum(pair)))


def guess(token_ids: list[int], most: int = 8, *, min_tokens: int = 2, max_tokens: int = 5) -> list[int]:
    known = token_ids.copy()
    found = list(NgramProposer(min_tokens, max_tokens).begin(token_ids).propose(token_ids, most))
    assert token_ids == known, "they are the sequence's own"
    return found


def in_common(text: list[int], place: int) -> int:
    """How many tokens before the place are the same as those before the end of the text."""
    count = 0
    while count < place and text[place - 1 - count] == text[len(text) - 1 - count]:
        count += 1
    return count


def best_places(text: list[int], least: int, most: int) -> list[int]:
    """Those earlier places that have the most in common with the end, as far as `most` goes; none that has less than `least`."""
    commons = {place: min(in_common(text, place), most) for place in range(1, len(text))}
    longest = max(commons.values(), default=0)
    return [place for place, common in commons.items() if common == longest >= least]


def scanned_place(text: list[int], least: int, most: int) -> tuple[int | None, int]:
    """The source: the one before as long as it comes true, otherwise the latest of the best. And what it has in common with the
    end, as far as it was looked at.
    """
    place, common = None, 0
    for end in range(1, len(text) + 1):
        if place is not None and text[place] == text[end - 1]:
            place, common = place + 1, common + 1
        else:
            place = max(best_places(text[:end], least, most), default=None)
            common = 0 if place is None else min(in_common(text[:end], place), most)
    return place, common


def copied(text: list[int], place: int | None, most: int) -> list[int]:
    """What follows a place, the copy itself included."""
    if place is None:
        return []
    whole = list(text)
    for i in range(most):
        whole.append(whole[place + i])
    return whole[len(text) :]


@given(text=texts, sizes=sizes, most=st.integers(0, 20))
@example(text=[1, 2, 3] * 4 + [1, 2], sizes=(2, 5), most=10)  # a loop: it is guessed beyond the end of the text
@example(
    text=[0, 1, 2, 3, 4, 70, 9, 1, 2, 3, 4, 71, 8, 0, 1, 2, 3, 4], sizes=(2, 3), most=1
)  # a source that came true goes on
def test_the_guess_is_that_of_a_scan(text: list[int], sizes: tuple[int, int], most: int) -> None:
    least, longest = sizes
    place, common = scanned_place(text, least, longest)
    assert guess(text, most, min_tokens=least, max_tokens=longest) == copied(text, place, min(most, common))
    places = best_places(text, least, longest)
    assert place in places or not places, "a source that went on well has as much in common as any"


@given(text=texts, sizes=sizes, data=st.data())
def test_it_does_not_matter_how_many_tokens_a_call_brings(
    text: list[int], sizes: tuple[int, int], data: st.DataObject
) -> None:
    """Nor does it matter how many of them are the prompt, which other completions go on from in other ways."""
    prompt = text[: data.draw(st.integers(0, len(text)))]
    read = NgramProposer(*sizes).begin(prompt)
    other, proposer = read.fork(), read.fork()
    other.propose([*prompt, *range(3), *range(3)], 8)
    end = len(prompt)
    while end < len(text):
        end = data.draw(st.integers(end, len(text)))
        expected = guess(text[:end], min_tokens=sizes[0], max_tokens=sizes[1])
        assert list(proposer.propose(text[:end], 8)) == expected
        end += 1


def test_requests_share_nothing() -> None:
    proposer = NgramProposer()
    proposer.begin([1, 2, 3, 4, 5]).propose([1, 2, 3, 4, 5], 4)
    assert proposer.begin([1, 2]).propose([1, 2], 4) == []


def test_completions_do_not_read_their_prompt_again() -> None:
    """Nor do they keep it: what each of them adds is its own."""
    prompt = [i * i % 1009 for i in range(20_000)]
    read = NgramProposer().begin(prompt)
    forks = [read.fork() for _ in range(64)]
    for number, fork in enumerate(forks):
        fork.propose([*prompt, number], 8)
    assert sum(len(fork._latest) for fork in forks) <= 64 * 4
