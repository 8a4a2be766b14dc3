"""The shapes of log probabilities, with a tokenizer that writes a character in several tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, cast

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from nanoengine.core.outputs import CompletionOutput
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.features.sampling.token_logprobs import TokenLogprob
from nanoengine.models.tokenizer import ModelTokenizer
from nanoengine.serve.server.apis.openai.logprobs import LEAST, LogprobShapes, Progress
from nanoengine.serve.server.token_texts import TokenTexts


class Bytes:
    """Token i is byte i."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")


def shapes(as_ids: bool = False) -> LogprobShapes:
    return LogprobShapes(TokenTexts(cast(ModelTokenizer, Bytes())), as_ids)


def entry(**ranks: int) -> dict[int, TokenLogprob]:
    """{letter: rank}; the log probability is minus the rank."""
    return {ord(letter): TokenLogprob(-float(rank), rank) for letter, rank in ranks.items()}


def test_a_completion_names_its_tokens_with_their_places() -> None:
    made = shapes().completion([97, 98], ["a", "b"], [None, entry(b=3, c=1, d=2)], 2, offset=5)
    assert made == {
        "text_offset": [5, 6],
        "token_logprobs": [None, -3.0],
        "tokens": ["a", "b"],
        "top_logprobs": [None, {"b": -3.0, "c": -1.0, "d": -2.0}],
    }
    assert shapes().completion([98], ["b"], [entry(b=3, c=1, d=2)], 0)["top_logprobs"] == [{"b": -3.0}]
    assert shapes().completion([], [], [], 1)["text_offset"] == []
    # An end of text adds nothing; how likely it was can be found all the same.
    ended = shapes().completion([98], [""], [entry(b=1)], 0)
    assert (ended["tokens"], ended["top_logprobs"]) == ([""], [{"b": -1.0}])


def test_likely_tokens_are_named_by_what_they_would_add() -> None:
    before = list("€".encode())[:2]
    made = shapes().completion([172], [""], [entry(**{"\xac": 2, "a": 1})], 1, before=before)
    assert made["top_logprobs"] == [{"€": -2.0, "a": -1.0}]


def test_a_chat_has_bytes_and_as_many_alternatives_as_were_asked_for() -> None:
    (made,) = shapes().chat([98], ["b"], [entry(b=3, c=1, d=2)], 2)["content"]
    assert (made["token"], made["logprob"], made["bytes"]) == ("b", -3.0, [98])
    assert [top["token"] for top in made["top_logprobs"]] == ["b", "c"]


def test_tokens_may_be_called_by_their_ids() -> None:
    assert shapes(as_ids=True).completion([98], ["b"], [entry(b=1)], 1)["tokens"] == ["token_id:98"]


def test_what_json_cannot_hold_is_its_least_number() -> None:
    never: dict[int, Any] = {98: TokenLogprob(float("-inf"), 9)}
    assert shapes().completion([98], ["b"], [never], 0)["token_logprobs"] == [LEAST]
    assert list(shapes().prompt([97, 98], [None, never])) == [
        None,
        {"98": {"logprob": LEAST, "rank": 9, "decoded_token": "b"}},
    ]


# ---- names and texts, of tokenizers of every kind

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>"]


def finished(tokenizer: Tokenizer) -> Tokenizer:
    """With special tokens, of which one begins every prompt."""
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    first = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", first)])
    return tokenizer


def sentencepiece(dummy_prefix: bool) -> Tokenizer:
    vocab = [*SPECIAL, *BYTES, *"▁thelowrd", "th", "▁th", "el", "▁▁", "日"]
    merges = [("t", "h"), ("▁", "th"), ("e", "l"), ("▁", "▁")]
    ids = {token: i for i, token in enumerate(vocab)}
    tokenizer = Tokenizer(models.BPE(ids, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    replace, prefix = normalizers.Replace(" ", "▁"), normalizers.Prepend("▁")
    tokenizer.normalizer = normalizers.Sequence([prefix, replace]) if dummy_prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if dummy_prefix else steps)
    return finished(tokenizer)


def byte_level(composed: bool) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "th", "Ġth"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("t", "h"), ("Ġ", "th")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if not composed:
        return finished(tokenizer)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # and no first token
    return tokenizer


def unigram() -> Tokenizer:
    scored = [(token, -10.0 if token in BYTES else -2.0) for token in [*SPECIAL, *BYTES, *"▁thelowrd", "▁th", "▁hello"]]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return finished(tokenizer)


def wordpiece() -> Tokenizer:
    vocab = {token: i for i, token in enumerate([*SPECIAL, "th", "##th", "hello", "world", ",", "##d"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return finished(tokenizer)


class Alone(ModelTokenizer):
    """A tokenizer without a model."""

    chat_templates = MappingProxyType({})

    def _special_tokens(self, template: str) -> dict[str, str]:
        return {}


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "SentencePiece": lambda: sentencepiece(True),
    "SentencePiece without a first blank": lambda: sentencepiece(False),
    "bytes": lambda: byte_level(False),
    "bytes, composed": lambda: byte_level(True),
    "Unigram": unigram,
    "WordPiece": wordpiece,
}
PIECES = [
    "th",
    " th",
    " ",
    "  ",
    "hello",
    "world",
    "\n",
    "é",
    "e\u0301",
    "日",
    "語",
    "😀",
    "👩‍👩‍👧",
    "ﬁ",
    ",",
    "</s>",
    "\ufffd",
]


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_offsets_join_to_the_very_text(kind: str) -> None:
    """Of prompts as they were sent, and of completions behind them: in one piece or several, of tokens in any order, too."""
    tokenizer, rng = Alone(KINDS[kind](), kind), random.Random(kind)
    vocab_size = tokenizer.fast.get_vocab_size()  # type: ignore[union-attr]
    for number in range(150):
        text = "".join(rng.choices(PIECES, k=rng.randrange(6)))
        prompt = tokenizer.encode(text)
        names = tokenizer.split(text)
        assert len(names) == len(prompt)
        assert "".join(names) == text
        end = tokenizer.encode("".join(rng.choices(PIECES[:-1], k=rng.randrange(1, 6))), add_special_tokens=False)
        token_ids = rng.choices(range(vocab_size), k=8) if number % 3 == 0 else end
        stop = "".join(rng.choices(PIECES, k=2)) if rng.random() < 0.3 else rng.choice(["h", "or", " t", "語"])
        params = SamplingParams(skip_special_tokens=rng.random() < 0.7, stop=stop if rng.random() < 0.3 else None)
        detokenizer = params.new_detokenizer(tokenizer.decode, prompt)
        met, texts = None, []
        for token in token_ids:
            met = detokenizer.push(token)
            texts.append(detokenizer.text)
            if met is not None:
                break
        token_ids = token_ids[: len(texts)]
        detokenizer.finish()
        texts[-1:] = [detokenizer.text]
        progress, made, sent, most = Progress(), [], 0, rng.choice([1, 3, 99])
        shaper = LogprobShapes(TokenTexts(tokenizer))
        while sent < len(token_ids):
            part = token_ids[sent : sent + rng.randint(1, most)]
            before, sent = texts[sent - 1] if sent else "", sent + len(part)
            reason: Any = ("length" if met is None else "stop") if sent == len(token_ids) else None
            told = CompletionOutput(0, texts[sent - 1][len(before) :], part, reason, met if reason else None)
            found = progress.names(tokenizer, params, prompt, part, told)
            entries = [{token: TokenLogprob(-1.0, 1)} for token in part]
            offset = sum(len(one["tokens"][0]) for one in made)
            for token, name, entry_of_it in zip(part, found, entries, strict=True):
                made.append(shaper.completion([token], [name], [entry_of_it], 1, offset))  # type: ignore[list-item]
                offset += len(name)
            chat = shaper.chat(part, found, entries, 1)["content"]  # type: ignore[arg-type]
            assert [bytes(one["bytes"]).decode() for one in chat] == found
            progress.advance(part)
        own = [one["tokens"][0] for one in made]
        joined = "".join(own)
        assert joined.startswith(detokenizer.text)
        if met is None or part == token_ids:  # else some may have been sent before the stop string was whole
            assert joined == detokenizer.text
        for one, name in zip(made, own, strict=True):
            at = one["text_offset"][0]
            assert joined[at : at + len(name)] == name
        whole = tokenizer.decode([*prompt, *end], skip_special_tokens=params.skip_special_tokens)
        if token_ids == end and met is None:  # of characters that are all there
            before = tokenizer.decode(prompt, skip_special_tokens=params.skip_special_tokens)
            assert detokenizer.text == whole[len(before) :]
