"""Text: a chat that is encoded piece by piece has the tokens of the whole, and a second turn encodes only what is new."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from nanoengine.errors import InvalidPrompt
from nanoengine.features.fair_cache import FairCache
from nanoengine.models.description import describe
from nanoengine.models.names import DEMO
from nanoengine.models.tokenizer import HFTokenizer, ModelTokenizer
from nanoengine.serve.server.admission.text_threads import CURRENT_CLIENT, TextThreads
from nanoengine.serve.server.bodies.chat_encoder import CHARS_OF_A_PIECE, ChatEncoder, joined, longest_of
from nanoengine.serve.server.token_texts import TokenTexts
from tests.serve.aio.toys import PATIENCE

ALPHABET = ["a", "b", "ab", " ", "  ", "\n", "\t", "\u00a0", "Ä", "語", "🦜", "e\u0301", ".", "_", "x1", "AB", "\u2581"]


class Counted(HFTokenizer):
    """Counts what is encoded."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.encoded: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


def drawn_texts(tokens: list[str], count: int, seed: int) -> Iterator[str]:
    """Texts in which tokens stand everywhere, also cut in two, one in another and one behind the other."""
    rng = random.Random(seed)
    parts = tokens + [token[:-1] for token in tokens if len(token) > 1] + [token[1:] for token in tokens]
    for _ in range(count):
        yield "".join(rng.choice(parts if rng.random() < 0.5 else ALPHABET) for _ in range(rng.randrange(12)))


def check_same(tokenizer: ModelTokenizer, texts: Iterator[str]) -> None:
    """Each text has the tokens that the tokenizer gives it, at first and again."""
    encoder = ChatEncoder(tokenizer, 1 << 20)
    for text in texts:
        expected = tokenizer.encode(text, add_special_tokens=False)
        assert encoder.encode(text) == expected, text
        assert encoder.encode(text) == expected, text


# ---- the same tokens


def test_a_models_own_tokenizer() -> None:
    tokenizer = describe(DEMO).tokenizer
    check_same(tokenizer, drawn_texts([token.content for token in tokenizer.added_tokens()] or ["<x>"], 300, seed=1))


MAKERS = {
    "byte level": lambda: (None, pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
    "byte level, a space first": lambda: (None, pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()),
    "metaspace, at the start": lambda: (None, pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()),
    "metaspace, everywhere": lambda: (None, pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace()),
    "a normalizer that prepends": lambda: (
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
        pre_tokenizers.Split("\u2581", "merged_with_next"),
        decoders.Fuse(),
    ),
    "a normalizer that lowers and strips": lambda: (
        normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase(), normalizers.Strip()]),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    ),
}

TOKENS: dict[str, list[AddedToken]] = {
    "plain": [AddedToken("<a>", special=True), AddedToken("<b>", special=True)],
    "overlapping": [AddedToken(text, special=True) for text in ("<a>", "<a><a>", "a><", "><", "<a>b", "<")],
    "blanks before": [AddedToken("<a>", special=True, lstrip=True), AddedToken("<b>", special=True)],
    "blanks behind": [AddedToken("<a>", special=True, rstrip=True), AddedToken("<b>", special=True)],
    "blanks on both sides": [
        AddedToken("<a>", special=True, lstrip=True, rstrip=True),
        AddedToken("<b>", special=True, rstrip=True),
        AddedToken("  ", special=False, normalized=False),
        AddedToken("\n", special=False, normalized=False),
    ],
    "words": [AddedToken("<a>", special=True), AddedToken("ab", special=True, single_word=True)],
    "normalized": [
        AddedToken("<a>", special=True),
        AddedToken("AB", special=False, normalized=True),
        AddedToken("ab", special=False, normalized=True, single_word=True),
        AddedToken("<b>", special=True, normalized=True),
    ],
    "words, normalized": [AddedToken("<a>", special=True), AddedToken("x1", normalized=True, lstrip=True, rstrip=True)],
    "none": [],
}


def save(folder: Path, kind: str, tokens: list[AddedToken]) -> Path:
    """A tokenizer without merges, so that every character or byte counts."""
    characters = sorted({*pre_tokenizers.ByteLevel.alphabet(), *"".join(ALPHABET), *map(chr, range(32, 127)), "?"})
    model = BPE({text: i for i, text in enumerate([*characters, "\u2581a", "Ġa"])}, [("\u2581", "a"), ("Ġ", "a")])
    tokenizer = Tokenizer(model)
    normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = MAKERS[kind]()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    for token in tokens:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_any_tokenizer(tmp_path: Path, kind: str, tokens: str) -> None:
    tokenizer = HFTokenizer(save(tmp_path, kind, TOKENS[tokens]))
    check_same(tokenizer, drawn_texts(["<end>", *(token.content for token in TOKENS[tokens])], 150, seed=2))


# ---- what is remembered


def chat(turns: int) -> str:
    return "".join(f"<|im_start|>user\nturn {i}<|im_end|>\n" for i in range(turns)) + "<|im_start|>assistant\n"


def test_a_second_turn_encodes_only_what_is_new(tokenizer_folder: Path) -> None:
    tokenizer = Counted(tokenizer_folder)
    encoder = ChatEncoder(tokenizer, 1 << 20)
    encoder.encode(chat(3))
    first = len(tokenizer.encoded)
    encoder.encode(chat(4))
    assert tokenizer.encoded[first:] == ["<|im_start|>user\nturn 3"], "all else was there"
    encoder.encode(chat(4))
    assert len(tokenizer.encoded) == first + 1


def test_what_is_remembered_has_a_limit_and_the_oldest_goes_first(tokenizer_folder: Path) -> None:
    tokenizer = Counted(tokenizer_folder)
    pieces = [f"<|im_start|>{i:028}" for i in range(3)]
    cost = len(pieces[0]) + len(tokenizer.encode(pieces[0], add_special_tokens=False)) + CHARS_OF_A_PIECE
    tokenizer.encoded.clear()
    encoder = ChatEncoder(tokenizer, 2 * cost + 1)  # two fit
    for piece in (pieces[0], pieces[1], pieces[0], pieces[2], pieces[0], pieces[2]):
        encoder.encode(piece)
    assert tokenizer.encoded == [pieces[0], pieces[1], pieces[2]]
    encoder.encode(pieces[1]).append(7)  # what was given may be changed
    assert tokenizer.encoded[3:] == [pieces[1]]
    assert encoder.encode(pieces[1]) == tokenizer.encode(pieces[1], add_special_tokens=False)
    nothing = ChatEncoder(tokenizer, 0)
    assert nothing.encode(chat(2)) == nothing.encode(chat(2)) == tokenizer.encode(chat(2), add_special_tokens=False)
    assert encoder.encode(chat(2), add_special_tokens=True) == tokenizer.encode(chat(2))
    with pytest.raises(InvalidPrompt, match="Unicode"):
        encoder.encode("<|im_start|>\ud83d")


def test_short_messages_count_for_the_memory_that_they_take(tokenizer_folder: Path) -> None:
    """Each is an entry with its key: a client that sends thousands of one character must not fill the memory."""
    encoder = ChatEncoder(Counted(tokenizer_folder), 10_000)
    encoder.encode("".join(f"<|im_start|>{i}" for i in range(2000)))
    assert 0 < len(encoder.pieces) <= 10_000 // CHARS_OF_A_PIECE


def test_who_has_most_gives_way() -> None:
    cache: FairCache[str, str] = FairCache(150)
    cache.put("a", "1", "old", 90)
    cache.put("b", "1", "x", 40)
    cache.put("b", "2", "y", 40)
    assert [cache.get(*own) for own in (("a", "1"), ("b", "1"), ("b", "2"), ("a", "2"))] == [None, "x", "y", None]
    cache.put("b", "1", "z", 30)
    assert (cache.get("b", "1"), cache.size, len(cache)) == ("z", 70, 2)
    cache.put("c", "1", "larger than all", 151)
    assert (cache.get("c", "1"), cache.size) == (None, 70)


@pytest.mark.anyio
async def test_many_threads_get_the_same(tokenizer_folder: Path) -> None:
    tokenizer = HFTokenizer(tokenizer_folder)
    encoder, threads = ChatEncoder(tokenizer, 300), TextThreads(4)

    found = await asyncio.gather(*(threads.run(encoder.encode, chat(i % 7)) for i in range(300)))
    threads.close()
    assert found == [tokenizer.encode(chat(i % 7), add_special_tokens=False) for i in range(300)]


# ---- messages in parts


def test_parts_are_joined_by_line_feeds() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"text": "c"}]
    message = {"role": "user", "content": parts, "name": "x"}
    assert joined(message) == {"role": "user", "content": "a\nb\nc", "name": "x"}
    assert message["content"] is parts
    for other in ({"role": "user", "content": "a"}, {"role": "assistant", "content": None}, {"role": "user"}):
        assert joined(other) is other
    with pytest.raises(InvalidPrompt, match="image_url"):
        joined({"role": "user", "content": [{"type": "image_url"}]})


# ---- names of tokens


def test_a_character_of_several_tokens_is_named_by_its_last(tokenizer_folder: Path) -> None:
    tokenizer = HFTokenizer(tokenizer_folder)
    texts = TokenTexts(tokenizer)
    for text in ("a🦜b語", "e\u0301 👩‍👩‍👧", "<|im_end|>é"):
        tokens = tokenizer.encode(text)
        names = [texts.after(tokens[max(0, i - 4) : i], token) for i, token in enumerate(tokens)]
        assert "".join(names) == text
    assert texts.after([], tokenizer.eos_token_id) == "<|endoftext|>"  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_one_client_never_has_all_threads() -> None:
    gate, threads = threading.Event(), TextThreads(2)
    CURRENT_CLIENT.set("greedy")
    greedy = [asyncio.ensure_future(threads.run(gate.wait, PATIENCE)) for _ in range(5)]
    await asyncio.sleep(0)
    greedy.pop().cancel()  # a client that is gone leaves the line
    CURRENT_CLIENT.set("other")
    assert await threads.run(str, "text") == "text"
    gate.set()
    assert await asyncio.gather(*greedy) == [True] * 4
    threads.close()


def test_thousands_of_special_tokens_are_looked_for_at_once() -> None:
    """One after the other they took a minute for a text of 2^20 angle brackets, in which no other thread ran."""
    texts = sorted([f"<unused{i}>" for i in range(6000)] + ["<a>", "<a><a>", "<", "\n", "\n\n", "[x]"])
    found = longest_of(texts)
    assert found.count("unused") == 1
    text = "<unused17><unused170><a><a><a>x<unus\n\n\n[x]<"
    expected = re.findall("|".join(map(re.escape, sorted(texts, key=len, reverse=True))), text)
    assert re.findall(found, text) == expected
