"""Text as it comes, token by token: characters, stop strings, and texts that are no characters at all."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from os.path import commonprefix

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from nanoengine.core.detokenizer import Detokenizer
from nanoengine.features.sampling.stop_detokenizer import StopDetokenizer
from tests.drawn import FAST

Decode = Callable[[Sequence[int]], str]


def decoder_of(pieces: Sequence[bytes | str]) -> Decode:
    """A vocabulary made on the spot: token i is the i-th piece."""
    raw = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    return lambda token_ids: b"".join(raw[token] for token in token_ids).decode(errors="replace")


def texts_of(detokenizer: StopDetokenizer, tokens: Sequence[int]) -> tuple[list[str], str | None]:
    """The text after each token and after the end, and the stop that was met."""
    texts, met = [""], None
    for token in tokens:
        met = detokenizer.push(token)
        texts.append(detokenizer.text)
        assert detokenizer.text_from(len(texts[-2])) == texts[-1][len(texts[-2]) :]
        assert texts[-1].startswith(texts[-2])
        if met is not None:
            break
    for _ in range(2):  # the second time adds nothing
        detokenizer.finish()
    return [*texts[1:], detokenizer.text], met


def stream(pieces: Sequence[bytes | str]) -> list[str]:
    return texts_of(StopDetokenizer(decoder_of(pieces)), range(len(pieces)))[0]


# ---- characters


@pytest.mark.parametrize(
    ("pieces", "texts"),
    [
        (["Hello", ",", " world"], ["Hello", "Hello,", "Hello, world", "Hello, world"]),
        ([], [""]),
        ([b"a\xc3", b"\xa9b"], ["a", "aéb", "aéb"]),
        ([b"\xf0", b"\x9f", b"\x98", b"\x80", "!"], ["", "", "", "😀", "😀!", "😀!"]),
        ([b"a", b"\xff", b"b", b"c"], ["a", "a", "a\ufffdb", "a\ufffdbc", "a\ufffdbc"]),  # it holds up nothing
        ([b"a", b"\xe2\x82"], ["a", "a", "a\ufffd"]),  # never completed: released at the end
        (["a", "", "", "b"], ["a", "a", "a", "ab", "ab"]),
    ],
)
def test_a_character_comes_with_its_last_byte(pieces: list[bytes | str], texts: list[str]) -> None:
    assert stream(pieces) == texts


@FAST
@given(
    st.lists(st.sampled_from(["a", " b", "é", "\U0001f600", "\ufffd", " ", "  ", "", b"\xf0\x9f", b"\x98\x80"])),
    st.integers(0, 20),
)
def test_behind_a_prompt_the_text_is_what_its_tokens_add(pieces: list[bytes | str], cut: int) -> None:
    """Though the decoder drops a space at the beginning of a text, as SentencePiece's do, and the prompt ends in a character."""

    def decode(ids: Sequence[int]) -> str:
        return decoder_of(pieces)(ids).removeprefix(" ")

    cut %= len(pieces) + 1
    for detokenizer in (Detokenizer(decode, range(cut)), StopDetokenizer(decode, prompt=range(cut))):
        for token in range(cut, len(pieces)):
            detokenizer.push(token)
        detokenizer.finish()
        whole, before = decode(range(len(pieces))), decode(range(cut))
        assert detokenizer.text == whole[len(commonprefix([whole, before])) :]  # noqa: RUF071 - characters are meant


UNDECODABLE = {
    "leads without an end": [b"\xe6"],
    "continuations without a beginning": [b"\x97"],
    "bytes that are never valid": [b"\xff", b"\xf8"],
    "replacement characters": ["\ufffd".encode()],
    "characters that no token ends": [b"\xa5\xe6\x97"],
    "with tokens without text": [b"\xe6", b"", b"\x98"],
    "random": [bytes([byte]) for byte in random.Random(0).choices(b"\xe6\x97\xa5\xf0\x9f\x98\xc3", k=997)],
    "no text at all": [b""],
}


@pytest.mark.parametrize("pieces", UNDECODABLE.values(), ids=UNDECODABLE)
def test_an_undecodable_text_of_any_length_costs_the_same_for_each_token(pieces: list[bytes]) -> None:
    """The engine decodes between two steps, so one such text must not hold up all others. A character behind it comes whole."""
    lengths = []
    vocabulary = decoder_of([*pieces, "😀!"])
    tokens = list(itertools.islice(itertools.cycle(range(len(pieces))), 3000))
    detokenizer = StopDetokenizer(lambda ids: (lengths.append(len(ids)), vocabulary(ids))[1])
    for number, token in enumerate(tokens, 1):
        detokenizer.push(token)
        if number < 20 or number == len(tokens):
            assert len(vocabulary(tokens[:number])) - len(detokenizer.text) <= 3
    assert max(lengths) <= 70
    detokenizer.push(len(pieces))
    assert detokenizer.text == vocabulary([*tokens, len(pieces)])


def byte_fallback(token_ids: Sequence[int]) -> str:
    """One replacement for each byte of a run, characters among them too, if not all of it is text."""
    return decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]).decode(
        [f"<0x{byte:02X}>" for byte in token_ids]
    )


def one_for_each_missing_byte(token_ids: Sequence[int]) -> str:
    data = bytes(token_ids)
    for length in range(len(data), -1, -1):
        try:
            return data[:length].decode() + "\ufffd" * (len(data) - length)
        except UnicodeDecodeError:
            continue
    raise AssertionError("an empty prefix always decodes")


@pytest.mark.parametrize("decode", [byte_fallback, one_for_each_missing_byte])
@pytest.mark.parametrize("text", ["a€😀b", "😀😀", "你好世界", "é€x", "👩‍👩‍👧"])
def test_decoders_to_which_an_incomplete_character_looks_like_several_give_whole_ones(
    text: str, decode: Decode
) -> None:
    found, _ = texts_of(StopDetokenizer(decode), text.encode())
    assert all(text.startswith(part) for part in found)
    assert found[-2] == text


def test_a_run_of_bytes_that_byte_fallback_cannot_read_stays_unread() -> None:
    data = b"\xe6" + "日".encode() * 100
    assert texts_of(StopDetokenizer(byte_fallback), data)[0][-1] == byte_fallback(data) == "\ufffd" * 301


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
    assert stream(pieces)[-1] == b"".join(pieces).decode(errors="replace")


LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
WORDS: dict[str, tuple[decoders.Decoder | None, list[str]]] = {
    "bytes": (None, ["e2 82 ac", "c3 a9", "f0 9f 98 80", "61", "2062", "efbfbd", "e282 acc3 a962", "ff", "20"]),
    "byte fallback": (
        decoders.Sequence(LLAMA),
        [
            "<0xE2> <0x82> <0xAC>",
            "<0xC3> <0xA9>",
            "<0x41>",
            "<0xF0> <0x9F> <0x98> <0x80>",
            "▁",
            "▁a",
            "b",
            "é",
            "<0xFF>",
        ],
    ),
    "byte-level": (decoders.ByteLevel(), ["â Ĥ ¬", "âĤ ¬a", "Ġ", "Ġa", "Ã ©", "Ã ©âĤ ¬", "ÿ"]),
    "word pieces": (decoders.WordPiece(), ["a", "##b", ".", "n't", "'", "##é"]),
    "ends of words": (decoders.BPEDecoder(), ["a</w>", "b", "é</w>", "</w>"]),
}
"""Tokens of texts by decoder, those of a word or a character together; without one they are bytes."""


@settings(FAST, max_examples=200)
@given(st.sampled_from(sorted(WORDS)), st.randoms(use_true_random=False), st.sampled_from([0, 0, 0.02, 0.5]))
def test_tokens_that_are_read_together_have_the_text_of_each_in_turn(
    kind: str, rng: random.Random, num_broken: float
) -> None:
    decoder, words = WORDS[kind]
    pieces = ["", *dict.fromkeys(" ".join(words).split())]  # the first is special

    def decode(ids: Sequence[int]) -> str:
        own = [pieces[token] for token in ids if pieces[token]]
        return str(decoder.decode(own)) if decoder else bytes.fromhex("".join(own)).decode(errors="replace")

    few, length, include_stop = rng.sample(words, rng.randint(1, 4)), rng.choice([1, 5, 90]), rng.random() < 0.5
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += [pieces.index(piece) for piece in rng.choice(few).split()] + [0] * (rng.random() < 0.1)
        if rng.random() < num_broken:
            tokens.append(rng.randrange(len(pieces)))
    stop = len(pieces)
    pieces.append(pieces[1])
    tokens += [stop] * rng.randint(0, 1)
    prompt = tokens[: rng.choice([0, 0, 1, 4])]
    each, together = (StopDetokenizer(decode, prompt=prompt, include_stop=include_stop) for _ in range(2))
    for length in range(len(prompt) + 1, len(tokens) + 1):
        each.push(tokens[length - 1], is_stop=tokens[length - 1] == stop)
        if rng.random() < 0.05 or length == len(tokens):
            assert together.read(tokens[:length], {stop}) is None
            assert together.text == each.text
            assert together.num_tokens == length < together.due
    each.finish()
    together.finish()
    assert together.text == each.text


def test_whole_characters_that_nobody_reads_yet_cost_two_calls() -> None:
    calls = list[Sequence[int]]()
    text = "Ein Käse, zwei Käse. "
    detokenizer = StopDetokenizer(lambda ids: (calls.append(ids), "".join(text[i % len(text)] for i in ids))[1])
    detokenizer.read(range(32))
    detokenizer.read(range(64))
    assert detokenizer.text == (text * 4)[:64]
    assert len(calls) == 5, "one is of the prompt"


# ---- stop strings


def expected(pieces: list[str], stops: list[str], min_tokens: int, include_stop: bool) -> tuple[list[str], str | None]:
    """The first token whose text completes a stop cuts the text, at its earliest one. The longest end that begins one is held."""
    text, texts = "", []
    for number, piece in enumerate(pieces, 1):
        old, text = len(text), text + piece
        ends = [(start, stop) for stop in stops for start in range(len(text)) if text.startswith(stop, start)]
        new = [(start, stop) for start, stop in ends if start + len(stop) > old]
        if new and number >= min_tokens:
            start, stop = min(new)
            text = text[: start + len(stop) * include_stop]
            return [*texts, text, text], stop
        held = [size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])]
        texts.append(text if include_stop else text[: len(text) - max(held, default=0)])
    return [*texts, text], None


@FAST
@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12) | st.text("ab", max_size=20).map(list),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.just(0) | st.integers(0, 8),
    include_stop=st.booleans(),
)
@example(pieces=["x abcd"], stops=["bc", "abcd"], min_tokens=0, include_stop=False)
@example(pieces=list("xabcd"), stops=["abcd", "bc"], min_tokens=0, include_stop=False)
@example(pieces=list("xababac"), stops=["abac"], min_tokens=0, include_stop=False)
@example(pieces=["x", "ab", "c", "!"], stops=["ab", "ab##"], min_tokens=3, include_stop=False)
def test_the_text_is_the_whole_cut_at_the_first_stop_and_beginnings_of_stops_are_held(
    pieces: list[str], stops: list[str], min_tokens: int, include_stop: bool
) -> None:
    detokenizer = StopDetokenizer(decoder_of(pieces), stops, include_stop=include_stop, min_tokens=min_tokens)
    assert texts_of(detokenizer, range(len(pieces))) == expected(pieces, stops, min_tokens, include_stop)


def test_a_stop_over_a_split_character_is_found() -> None:
    pieces = [b"ok \xe2\x82", b"\xac", b"5"]
    texts, met = texts_of(StopDetokenizer(decoder_of(pieces), ["€5"]), range(3))
    assert (texts, met) == (["ok ", "ok ", "ok ", "ok "], "€5")


def test_a_text_may_end_by_what_it_says() -> None:
    """Behind the whole token, not before `min_tokens`, and a stop string comes first."""
    pieces, told = ["a", "b!", "c", "d!", "e"], list[str]()

    def until(new: str) -> str | None:
        told.append(new)
        return "an end" if "!" in new else None

    def read(stop: Sequence[str] = (), min_tokens: int = 0) -> tuple[str, str | None]:
        own = StopDetokenizer(decoder_of(pieces), stop, min_tokens=min_tokens, until=until)
        texts, met = texts_of(own, range(len(pieces)))
        return texts[-1], met

    assert (read(), told) == (("ab!", "an end"), pieces[:2])
    assert read(min_tokens=3) == ("ab!cd!", "an end")
    assert read(["b"]) == ("a", "b")
    assert read(["!x"]) == ("ab!", "an end"), "what was held back is told"
