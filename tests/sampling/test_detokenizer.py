from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from nanoengine.sampling.detokenizer import StopDetokenizer
from tests.drawn import FAST


class Pieces:
    """A vocabulary made on the spot: token i is the i-th piece of bytes."""

    def __init__(self, *pieces: bytes):
        self.pieces = pieces

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.pieces[token] for token in token_ids).decode(errors="replace")


def stream(
    pieces: Sequence[bytes | str], stop: Sequence[str] = (), *, min_tokens: int = 0, include_stop: bool = False
) -> tuple[list[str], str | None]:
    """Push all pieces, one token each; the text after each push and after the end, and the stop that was met."""
    raw = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    detokenizer = StopDetokenizer(Pieces(*raw).decode, stop, include_stop=include_stop, min_tokens=min_tokens)
    texts, met = [], None
    for token in range(len(raw)):
        met = detokenizer.push(token)
        texts.append(detokenizer.text)
        if met is not None:
            break
    detokenizer.finish()
    texts.append(detokenizer.text)
    for start in range(len(texts[-1]) + 2):
        assert detokenizer.text_from(start) == texts[-1][start:]
    return texts, met


# ---- characters


def test_text_comes_token_by_token() -> None:
    assert stream(["Hello", ",", " world"]) == (["Hello", "Hello,", "Hello, world", "Hello, world"], None)


def test_no_tokens_give_no_text() -> None:
    assert stream([]) == ([""], None)


def test_a_character_split_over_tokens_waits_for_its_last_byte() -> None:
    texts, _ = stream([b"a\xc3", b"\xa9b"])
    assert texts == ["a", "aéb", "aéb"]


def test_an_emoji_split_into_bytes_comes_whole() -> None:
    texts, _ = stream([b"\xf0", b"\x9f", b"\x98", b"\x80", "!"])
    assert texts == ["", "", "", "😀", "😀!", "😀!"]


def test_joined_emoji_keep_all_their_parts() -> None:
    family = "👩‍👩‍👧"
    texts, _ = stream([bytes([byte]) for byte in family.encode()])
    assert texts[-1] == family
    assert all(family.startswith(text) for text in texts)


def test_invalid_bytes_become_replacement_characters_and_do_not_hold_up_the_text() -> None:
    texts, _ = stream([b"a", b"\xff", b"b", b"c"])
    assert texts == ["a", "a", "a\ufffdb", "a\ufffdbc", "a\ufffdbc"]


def test_a_character_that_is_never_completed_is_released_at_the_end() -> None:
    texts, _ = stream([b"a", b"\xe2\x82"])
    assert texts == ["a", "a", "a\ufffd"]


def test_a_run_of_invalid_bytes_gives_all_of_them() -> None:
    texts, _ = stream([b"\xff"] * 5)
    assert texts[-1] == "\ufffd" * 5


@pytest.mark.parametrize("byte", [b"\xff", b"\x80", b"\xf0"])
def test_a_long_run_of_invalid_bytes_is_released_as_it_comes(byte: bytes) -> None:
    """All but the last three, which a later byte may still turn into one character."""
    texts, _ = stream([b"a", *[byte] * 20])
    assert [len(text) for text in texts[:-1]] == [1] + [1 + max(0, n - 3) for n in range(1, 21)]
    assert texts[-1] == "a" + "\ufffd" * 20


def test_a_character_behind_a_run_of_invalid_bytes_comes_whole() -> None:
    texts, _ = stream([b"\xff"] * 9 + [b"\xf0", b"\x9f", b"\x98", b"\x80", b"!"])
    assert texts[-1] == "\ufffd" * 9 + "😀!"


UNDECODABLE = {
    "leads without an end": [b"\xe6"],
    "continuations without a beginning": [b"\x97"],
    "bytes that are never valid": [b"\xff", b"\xf8"],
    "replacement characters": ["\ufffd".encode()],
    "characters that no token ends": [b"\xa5\xe6\x97"],
    "with tokens without text": [b"\xe6", b"", b"\x98"],
    "random": [bytes([byte]) for byte in random.Random(0).choices(b"\xe6\x97\xa5\xf0\x9f\x98\xc3", k=997)],
}


@pytest.mark.parametrize("pieces", UNDECODABLE.values(), ids=UNDECODABLE)
def test_an_undecodable_text_of_any_length_costs_the_same_for_each_token(pieces: list[bytes]) -> None:
    """The engine decodes between two steps, so one such text must not hold up all others."""
    lengths = []
    vocabulary = Pieces(*pieces)
    tokens = list(itertools.islice(itertools.cycle(range(len(pieces))), 3000))
    detokenizer = StopDetokenizer(lambda ids: (lengths.append(len(ids)), vocabulary.decode(ids))[1])
    for token in tokens:
        detokenizer.push(token)
    assert max(lengths) <= 70
    assert len(vocabulary.decode(tokens)) - len(detokenizer.text) <= 3
    detokenizer.finish()
    assert detokenizer.text == vocabulary.decode(tokens)


def test_a_character_behind_a_long_undecodable_text_comes_whole() -> None:
    pieces = [b"\xe6"] * 500 + [b"\xf0", b"\x9f", b"\x98", b"\x80", b"!"]
    assert stream(pieces)[0][-1] == "\ufffd" * 500 + "😀!"


def test_a_run_of_bytes_that_byte_fallback_cannot_read_stays_unread() -> None:
    """The library gives one replacement for each byte of a run, characters among them too, if not all of it is text."""
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])

    def decode(token_ids: Sequence[int]) -> str:
        return decoder.decode([f"<0x{byte:02X}>" for byte in token_ids])

    data = b"\xe6" + "日".encode() * 100
    detokenizer = StopDetokenizer(decode)
    for byte in data:
        detokenizer.push(byte)
    detokenizer.finish()
    assert detokenizer.text == decode(data) == "\ufffd" * 301


def test_tokens_without_text_change_nothing() -> None:
    assert stream(["a", "", "", "b"])[0] == ["a", "a", "a", "ab", "ab"]


def test_tokens_without_text_do_not_make_later_decoding_longer() -> None:
    """A special token has no text; thousands of them in a row must not be decoded over and over."""
    lengths = []
    pieces = Pieces(b"a", *[b""] * 50)
    detokenizer = StopDetokenizer(lambda ids: (lengths.append(len(ids)), pieces.decode(ids))[1])
    for token in range(51):
        detokenizer.push(token)
    assert max(lengths) <= 4


def test_a_decoder_that_looks_at_the_token_before_is_given_it() -> None:
    """Some decoders drop the space before the first token; the text must not lose the spaces in the middle."""
    words = ["one", "two", "three"]
    detokenizer = StopDetokenizer(lambda ids: " ".join(words[i] for i in ids))
    for token in range(3):
        detokenizer.push(token)
    assert detokenizer.text == "one two three"


def test_a_decoder_that_drops_the_first_space_keeps_the_others_after_a_token_without_text() -> None:
    pieces = Pieces(b" one", b"", b" two")
    detokenizer = StopDetokenizer(lambda ids: pieces.decode(ids).removeprefix(" "))
    for token in range(3):
        detokenizer.push(token)
    assert detokenizer.text == "one two"


@pytest.mark.parametrize(
    "words", [["▁", "▁", "a"], ["▁", "▁a"], ["", "▁", "", "▁▁"], ["▁▁", "a"], ["a", "▁", "▁", "b"]]
)
def test_a_decoder_that_drops_the_first_space_drops_only_one(words: list[str]) -> None:
    """The first token may be that space alone: it has no text, but the next one must keep its own space."""
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    detokenizer = StopDetokenizer(lambda ids: decoder.decode([words[i] for i in ids]))
    for token in range(len(words)):
        detokenizer.push(token)
    detokenizer.finish()
    assert detokenizer.text == "".join(words).replace("▁", " ").removeprefix(" ")


def test_a_decoder_with_one_replacement_for_each_missing_byte_gives_whole_characters() -> None:
    """Tokenizers with byte fallback do so: an incomplete character looks like several."""

    def decode(token_ids: Sequence[int]) -> str:
        data = bytes(token_ids)
        for length in range(len(data), -1, -1):
            try:
                return data[:length].decode() + "\ufffd" * (len(data) - length)
            except UnicodeDecodeError:
                continue
        raise AssertionError("an empty prefix always decodes")

    detokenizer = StopDetokenizer(decode)
    texts = []
    for byte in "a€😀b".encode():
        detokenizer.push(byte)
        texts.append(detokenizer.text)
    assert texts == ["a", "a", "a", "a€", "a€", "a€", "a€", "a€😀", "a€😀b"]


@pytest.mark.parametrize("text", ["a€😀b", "😀😀", "你好世界", "é€x", "👩‍👩‍👧"])
def test_the_byte_fallback_of_the_tokenizers_library_gives_whole_characters(text: str) -> None:
    """It makes a whole run of bytes unreadable as long as its end is: the character before the incomplete one as well."""
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    detokenizer = StopDetokenizer(lambda ids: decoder.decode([f"<0x{byte:02X}>" for byte in ids]))
    for byte in text.encode():
        detokenizer.push(byte)
        assert text.startswith(detokenizer.text)
    assert detokenizer.text == text


def test_finishing_twice_adds_nothing() -> None:
    detokenizer = StopDetokenizer(Pieces(b"a", b"\xe2").decode)
    detokenizer.push(0)
    detokenizer.push(1)
    detokenizer.finish()
    detokenizer.finish()
    assert detokenizer.text == "a\ufffd"


# ---- stop strings


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 20])
def test_a_stop_split_over_any_tokens_is_cut_and_never_leaks(size: int) -> None:
    whole = "some text<|END|>rest"
    texts, met = stream([whole[i : i + size] for i in range(0, len(whole), size)], ["<|END|>"])
    assert met == "<|END|>"
    assert texts[-1] == "some text"
    assert all("some text".startswith(text) for text in texts)


def test_the_beginning_of_a_stop_is_held_until_it_proves_to_be_none() -> None:
    texts, met = stream(["a", "E", "N", "x"], ["END"])
    assert met is None
    assert texts == ["a", "a", "a", "aENx", "aENx"]


def test_only_the_beginning_of_a_stop_is_held() -> None:
    assert stream(["axE"], ["END"])[0] == ["ax", "axE"]


def test_a_stop_that_begins_inside_another_beginning_is_found() -> None:
    texts, met = stream(list("xaab"), ["ab"])
    assert (texts[-1], met) == ("xa", "ab")
    texts, met = stream(list("EENDED"), ["END"])
    assert (texts[-1], met) == ("E", "END")
    texts, met = stream(list("xababac"), ["abac"])
    assert (texts[-1], met) == ("xab", "abac")
    assert all("xab".startswith(text) for text in texts)


def test_text_held_at_the_end_is_released() -> None:
    assert stream(["a", "EN"], ["END"])[0] == ["a", "a", "aEN"]


def test_the_earliest_stop_wins_when_a_token_completes_several() -> None:
    texts, met = stream(["x one two"], ["two", "one"])
    assert (texts[-1], met) == ("x ", "one")


def test_a_long_stop_that_begins_earlier_wins_over_one_inside_it() -> None:
    texts, met = stream(["x abcd"], ["bc", "abcd"])
    assert (texts[-1], met) == ("x ", "abcd")


def test_the_stop_completed_first_wins_over_one_that_is_still_open() -> None:
    texts, met = stream(list("xabcd"), ["abcd", "bc"])
    assert (texts[-1], met) == ("xa", "bc")


def test_several_stops_are_held_back_together() -> None:
    texts, met = stream(list("a<b##"), ["</", "##"])
    assert texts == ["a", "a", "a<b", "a<b", "a<b", "a<b"]
    assert met == "##"


def test_a_stop_over_a_split_character_is_found() -> None:
    texts, met = stream([b"ok \xe2\x82", b"\xac", b"5"], ["€5"])
    assert (texts[-1], met) == ("ok ", "€5")


def test_text_after_a_stop_in_the_same_token_is_dropped() -> None:
    texts, met = stream(["a\n", "b\n\nc"], ["\n\n"])
    assert (texts[-1], met) == ("a\nb", "\n\n")


def test_a_stop_at_the_very_beginning_leaves_no_text() -> None:
    assert stream(["END of"], ["END"]) == (["", ""], "END")


def test_stops_before_min_tokens_are_text() -> None:
    texts, met = stream(["a", "END", "b", "END", "c"], ["END"], min_tokens=3)
    assert (texts[-1], met) == ("aENDb", "END")


def test_a_stop_may_end_after_min_tokens_though_it_began_before() -> None:
    texts, met = stream(["a", "EN", "D"], ["END"], min_tokens=3)
    assert (texts[-1], met) == ("a", "END")


def test_a_stop_completed_before_min_tokens_does_not_end_the_text_later() -> None:
    """Even while it is held back as the beginning of a longer stop."""
    texts, met = stream(["x", "ab", "c", "!"], ["ab", "ab##"], min_tokens=3)
    assert (texts[-1], met) == ("xabc!", None)


def test_after_min_tokens_the_next_stop_counts_and_not_an_earlier_one() -> None:
    texts, met = stream(["x", "ab", "abc"], ["ab", "ab##"], min_tokens=3)
    assert (texts[-1], met) == ("xab", "ab")


# ---- stops that stay in the text


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 20])
def test_a_stop_that_stays_ends_the_text_behind_it_over_any_tokens(size: int) -> None:
    whole = "some text<|END|>rest"
    texts, met = stream([whole[i : i + size] for i in range(0, len(whole), size)], ["<|END|>"], include_stop=True)
    assert met == "<|END|>"
    assert texts[-1] == "some text<|END|>"
    assert all(texts[-1].startswith(text) for text in texts)


def test_what_may_become_a_stop_that_stays_need_not_be_held() -> None:
    texts, met = stream(["a", "E", "N", "D"], ["END"], include_stop=True)
    assert (texts, met) == (["a", "aE", "aEN", "aEND", "aEND"], "END")


def test_what_is_new_can_be_taken_while_text_is_held() -> None:
    detokenizer = StopDetokenizer(Pieces(b"ab", b"cE", b"N", b"x", b"\xe2\x82").decode, ["END"])
    taken = [""]
    for token in range(5):
        detokenizer.push(token)
        taken.append(detokenizer.text_from(sum(map(len, taken))))
    detokenizer.finish()
    taken.append(detokenizer.text_from(sum(map(len, taken))))
    assert taken[1:] == ["ab", "c", "", "ENx", "", "\ufffd"]


# ---- any text

fragments = st.lists(
    st.one_of(
        st.text("abé€😀", max_size=3).map(str.encode),
        st.binary(max_size=3),
        st.sampled_from([b"\xf0\x9f", b"\x98\x80", b"\xe2\x82", b"\xac", b"\xc3", b"\xa9"]),
    ),
    max_size=14,
)
undecodable = st.lists(
    st.sampled_from([b"\xf0", b"\x9f\x98", b"\x80", b"\xe6\x97", b"\xc3", b""]), min_size=60, max_size=150
)


@FAST
@given(st.one_of(fragments, undecodable))
def test_without_stops_the_pieces_join_to_the_whole(pieces: list[bytes]) -> None:
    texts, _ = stream(pieces)
    assert texts[-1] == b"".join(pieces).decode(errors="replace")
    for earlier, later in itertools.pairwise(texts):
        assert later.startswith(earlier)


def cut(pieces: list[str], stops: list[str], min_tokens: int) -> tuple[str, str | None]:
    """What should come out: the text is cut by the first token whose text completes a stop, at its earliest stop."""
    text = ""
    for number, piece in enumerate(pieces, 1):
        old, text = len(text), text + piece
        if number >= min_tokens:
            ends = ((start, stop) for stop in stops for start in range(len(text)) if text.startswith(stop, start))
            new = [(start, stop) for start, stop in ends if start + len(stop) > old]
            if new:
                start, stop = min(new)
                return text[:start], stop
    return text, None


@FAST
@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_with_stops_the_text_is_the_whole_cut_at_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    texts, met = stream(pieces, stops)
    assert (texts[-1], met) == cut(pieces, stops, 0)
    assert all(texts[-1].startswith(text) for text in texts)
    with_stop, same = stream(pieces, stops, include_stop=True)
    assert (with_stop[-1], same) == (texts[-1] + (met or ""), met), "it ends at the same stop"
    assert all(with_stop[-1].startswith(text) for text in with_stop)


@FAST
@given(st.lists(st.text("ab", max_size=2), max_size=12), st.text("ab", min_size=1, max_size=3))
def test_one_character_a_token_cuts_like_a_search(pieces: list[str], stop: str) -> None:
    whole = "".join(pieces)
    texts, met = stream(list(whole), [stop])
    position = whole.find(stop)
    assert texts[-1] == (whole if position < 0 else whole[:position])
    assert met == (stop if position >= 0 else None)


@FAST
@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 8),
)
def test_with_min_tokens_the_text_is_cut_at_the_first_stop_that_ends_after_them(
    pieces: list[str], stops: list[str], min_tokens: int
) -> None:
    texts, met = stream(pieces, stops, min_tokens=min_tokens)
    assert (texts[-1], met) == cut(pieces, stops, min_tokens)
    assert all(texts[-1].startswith(text) for text in texts)
    with_stop, same = stream(pieces, stops, min_tokens=min_tokens, include_stop=True)
    assert (with_stop[-1], same) == (texts[-1] + (met or ""), met)
    assert all(with_stop[-1].startswith(text) for text in with_stop)
