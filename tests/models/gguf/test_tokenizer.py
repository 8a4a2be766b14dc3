"""Tokenizers from the metadata of GGUF files: the same ids as those that they were written from, and as llama.cpp's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from nanoengine.errors import UnsupportedModel
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.gguf.tokenizer import GGUFTokenizer
from nanoengine.models.names import DEMO
from tests.drawn import FAST
from tests.vectors import vectors

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", *"abcd", "▁a", "ab", "ba", "aa", "▁ab", "bc", "abc", "aaa", "aaaa", "cd", "▁▁", "▁▁▁▁", "é", "dé", "bcd"]
WORDS += ["▁abcd"]
TEXTS = st.one_of(st.text(max_size=40), st.text(alphabet="abcd é\n▁<s>你", max_size=40))
LLAMA_CPPS = ["command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm"]
LLAMA_CPPS += ["mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"]
"""Vocabularies that llama.cpp has texts and their ids for, of the kinds that this engine knows."""


def bpe(**changes: Any) -> dict[str, Any]:
    """The demo model's tokenizer as a GGUF file has it."""
    model = json.loads((DEMO / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([CONTROL] + [NORMAL] * (len(tokens) - 1), np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
    } | changes


def sentencepiece(*more: tuple[str, int], **changes: Any) -> dict[str, Any]:
    """A small SentencePiece BPE; `more` tokens, each with its type, come last."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(WORDS), *(kind for _, kind in more)]
    tokens += [text for text, _ in more]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array([0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)], np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | changes


def texts_of(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    return [tokenizer.id_to_token(i) for i in tokenizer.encode(text, **options).ids]


# ---- the same ids


DEMO_ORIGINAL = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
DEMO_ORIGINAL.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
DEMO_BPE = GGUFTokenizer(bpe()).fast
SPM = GGUFTokenizer(sentencepiece()).fast


@FAST
@given(TEXTS)
def test_a_bpe_encodes_and_decodes_as_its_original(text: str) -> None:
    ids = DEMO_BPE.encode(text).ids
    assert ids == DEMO_ORIGINAL.encode(text).ids
    assert DEMO_BPE.decode(ids, skip_special_tokens=False) == text


def merged(text: str, scores: Mapping[str, float]) -> list[str]:
    """SentencePiece's rule, word for word: merge the neighbours of the highest score, of equal ones the first."""
    pieces = list(text)
    while True:
        pairs = [(-scores[pair], i) for i in range(len(pieces) - 1) if (pair := pieces[i] + pieces[i + 1]) in scores]
        if not pairs:
            break
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return [token for piece in pieces for token in ([piece] if piece in scores else [BYTES[b] for b in piece.encode()])]


@FAST
@given(TEXTS.filter(lambda text: "<" not in text))
@example("aba abcd aaaaa")
def test_a_sentencepiece_bpe_merges_by_score(text: str) -> None:
    metadata = sentencepiece()
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"].tolist(), strict=True))
    tokens = texts_of(SPM, text, add_special_tokens=False)
    assert tokens == (merged(("▁" + text).replace(" ", "▁"), scores) if text else [])
    assert SPM.decode(SPM.encode(text).ids) == text.replace("▁", " ")


def test_no_space_comes_first_if_the_file_says_so() -> None:
    tokenizer = GGUFTokenizer(sentencepiece(**{"tokenizer.ggml.add_space_prefix": False})).fast
    assert texts_of(tokenizer, "ab a") == ["<s>", "ab", "▁a"]
    assert tokenizer.decode(tokenizer.encode(" ab").ids) == " ab"


def test_gemma_4_merges_characters_in_lines_and_keeps_breaks_whole() -> None:
    merges = ["a b", "▁ ab"]
    own = sentencepiece(("\n\n", NORMAL), ("ab", NORMAL), **{"tokenizer.ggml.model": "gemma4"})
    tokenizer = GGUFTokenizer(own | {"tokenizer.ggml.merges": merges}).fast
    assert texts_of(tokenizer, "ab ab\n\na") == ["<s>", "ab", "▁ab", "\n\n", "a"]
    assert tokenizer.encode("ab").ids == [1, len(own["tokenizer.ggml.tokens"]) - 1], (
        "of two tokens of one text, the later"
    )
    assert tokenizer.decode(tokenizer.encode(" ab é\n").ids) == " ab é\n"


def test_words_that_are_tokens_need_no_merges_where_the_name_says_so() -> None:
    own = {"tokens": [*"ab", "ba"], "merges": [], "bos_token_id": 0, "token_type": np.full(3, NORMAL)}

    def tokens(pre: str) -> list[str]:
        metadata = bpe(**{f"tokenizer.ggml.{key}": value for key, value in (own | {"pre": pre}).items()})
        return texts_of(GGUFTokenizer(metadata).fast, "ba")

    assert tokens("gpt-2") == ["b", "a"]
    assert tokens("llama-bpe") == ["a", "ba"], "and a prompt begins with the first-of-text token"


# ---- special tokens


def test_special_tokens_are_found_in_text_and_those_for_users_are_shown() -> None:
    tokenizer = GGUFTokenizer(sentencepiece(("<|im_start|>", CONTROL), ("<tool>", USER_DEFINED))).fast
    text = "a<|im_start|>a<tool>a</s>"
    assert texts_of(tokenizer, text) == ["<s>", "▁a", "<|im_start|>", "▁a", "<tool>", "▁a", "</s>"]
    assert "<tool>" in tokenizer.decode(tokenizer.encode(text).ids)
    assert "<|im_start|>" not in tokenizer.decode(tokenizer.encode(text).ids)


def test_the_special_tokens_of_phi_3_take_the_spaces_behind_them() -> None:
    tokens = {}
    for name in ("Phi3 mini", "Llama"):
        metadata = sentencepiece(("<|user|>", CONTROL), ("<|end|>", CONTROL), **{"general.name": name})
        tokens[name] = texts_of(GGUFTokenizer(metadata).fast, "<|user|>\n a")
    assert tokens == {"Phi3 mini": ["<s>", "<|user|>", "▁a"], "Llama": ["<s>", "<|user|>", "▁", "<0x0A>", "▁a"]}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_prompts_begin_and_end_as_the_file_says(first: bool, last: bool) -> None:
    changes = {"tokenizer.ggml.add_bos_token": first, "tokenizer.ggml.add_eos_token": last}
    tokenizer = GGUFTokenizer(sentencepiece(**changes)).fast
    assert texts_of(tokenizer, "a") == ["<s>"] * first + ["▁a"] + ["</s>"] * last
    assert texts_of(tokenizer, "") == ["<s>"] * first + ["</s>"] * last
    assert texts_of(tokenizer, "a", add_special_tokens=False) == ["▁a"]


def test_where_the_file_says_nothing_a_bpe_begins_with_nothing() -> None:
    assert texts_of(GGUFTokenizer(bpe(**{"tokenizer.ggml.bos_token_id": 0})).fast, "a") == ["a"]


@pytest.mark.parametrize(
    ("more", "ids", "expected"),
    [
        ([], {}, ["</s>"]),
        ([("<|im_end|>", CONTROL), ("<|im_start|>", CONTROL)], {}, ["</s>", "<|im_end|>"]),
        ([("<|eot_id|>", NORMAL)], {}, ["</s>", "<|eot_id|>"]),
        ([("<end_of_turn>", CONTROL), ("<eos>", NORMAL)], {}, ["</s>", "<end_of_turn>"]),
        ([("<bye>", CONTROL), ("<later>", CONTROL)], {"eot": "<bye>", "eom": "<later>"}, ["</s>", "<bye>", "<later>"]),
        ([("<|end|>", CONTROL), ("<|return|>", CONTROL)], {}, ["</s>", "<|end|>", "<|return|>"]),
        ([(text, CONTROL) for text in ("<|end|>", "<|return|>", "<|call|>")], {}, ["</s>", "<|return|>", "<|call|>"]),
    ],
)
def test_all_ends_of_a_turn_are_found(more: list[tuple[str, int]], ids: dict[str, str], expected: list[str]) -> None:
    metadata = sentencepiece(*more)
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata |= {f"tokenizer.ggml.{name}_token_id": tokens.index(text) for name, text in ids.items()}
    vocabulary = GGUFTokenizer(metadata)
    assert vocabulary.eos_token_id == 2
    assert [tokens[i] for i in vocabulary.eos_token_ids] == expected
    ends = [vocabulary.fast.token_to_id(text) for text in expected]
    assert vocabulary.fast.decode(ends) == "", "an end is not shown"


def test_an_id_that_says_none_is_none() -> None:
    """The files of llama2.c's stories have no padding, and older ones of Llama 2 one behind their tokens."""
    none = {f"tokenizer.ggml.{name}_token_id": (1 << 32) - 1 for name in ("eot", "seperator", "padding")}
    behind = {"tokenizer.ggml.padding_token_id": len(sentencepiece()["tokenizer.ggml.tokens"])}
    for changes in (none, behind):
        assert GGUFTokenizer(sentencepiece(**changes)).special_tokens.keys() == {
            "bos_token",
            "eos_token",
            "unk_token",
        }
    assert GGUFTokenizer(sentencepiece(**none)).eos_token_ids == [2]


def test_a_tag_that_is_text_ends_nothing() -> None:
    """Qwen's vocabulary has HTML's </s> as a word."""
    own: dict[str, Any] = {"tokens": ["x", "</s>", "<|im_end|>"], "merges": []}
    own |= {"eos_token_id": 2, "token_type": np.array([NORMAL, NORMAL, CONTROL])}
    vocabulary = GGUFTokenizer(bpe(**{f"tokenizer.ggml.{key}": value for key, value in own.items()}))
    assert vocabulary.eos_token_ids == [2]
    assert vocabulary.fast.decode([0, 1, 2]) == "x</s>"


def test_templates_are_given_by_name_with_the_texts_that_they_use() -> None:
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_templates": ["tool_use"]}
    vocabulary = GGUFTokenizer(sentencepiece(**templates, **{"tokenizer.chat_template.tool_use": "tools"}))
    assert vocabulary.chat_templates == {"default": "plain", "tool_use": "tools"}
    assert vocabulary.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert GGUFTokenizer(sentencepiece()).chat_templates == {}


# ---- what is wrong


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert': this engine knows gpt2"),
        ({"tokenizer.ggml.model": 3}, "tokenizer.ggml.model is 3: it must be of type str"),
        ({"tokenizer.ggml.pre": "nobody"}, "tokenizer.ggml.pre is 'nobody', which this engine does not know"),
        ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens is empty"),
        ({"tokenizer.ggml.tokens": ["a", 3]}, "tokenizer.ggml.tokens has 3: it must be a list of strings"),
        ({"tokenizer.ggml.tokens": "ab"}, "tokenizer.ggml.tokens is 'ab': it must be of type list"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "tokenizer.ggml.tokens has 2 tokens, of which only 1 differ"),
        ({"tokenizer.ggml.token_type": np.ones(7)}, "token_type is array.*must have a number for each of 4096 tokens"),
        ({"tokenizer.ggml.token_type": ["a"]}, "token_type is .* for each of 4096 tokens"),
        ({"tokenizer.ggml.merges": ["a"]}, "tokenizer.ggml.merges has 'a': it must be two tokens"),
        ({"tokenizer.ggml.merges": ["a 你"]}, "tokenizer.ggml.merges do not fit tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is None: it must be of type list"),
        ({"tokenizer.ggml.eos_token_id": 4096}, "tokenizer.ggml.eos_token_id is 4096: the file has 4096 tokens"),
        ({"tokenizer.ggml.bos_token_id": -1}, "tokenizer.ggml.bos_token_id is -1: the file has 4096 tokens"),
        ({"tokenizer.ggml.bos_token_id": True}, "tokenizer.ggml.bos_token_id is True: it must be of type int"),
        ({"tokenizer.ggml.add_bos_token": True}, "add_bos_token is true, but tokenizer.ggml.bos_token_id is missing"),
        ({"tokenizer.ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1: it must be of type bool"),
        ({"tokenizer.chat_template": ["a"]}, r"tokenizer.chat_template is \['a'\]: it must be of type str"),
        ({"tokenizer.chat_templates": ["rag"]}, "the GGUF file has no tokenizer.chat_template.rag"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        _ = GGUFTokenizer(bpe(**changes)).fast


@pytest.mark.parametrize("scores", [None, [0.0], np.full(259 + len(WORDS), np.nan), ["a"] * (259 + len(WORDS))])
def test_scores_that_are_none_are_named(scores: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.scores"):
        _ = GGUFTokenizer(sentencepiece(**{"tokenizer.ggml.scores": scores})).fast


@pytest.mark.parametrize("key", ["tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"])
def test_a_missing_value_is_named(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"the GGUF file has no {key}"):
        _ = GGUFTokenizer({name: value for name, value in bpe().items() if name != key}).fast


# ---- llama.cpp's own vectors


def read_vectors(path: Path) -> list[tuple[str, list[int]]]:
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text().splitlines()
    # Some files have a line too many, at the end.
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=False)]


@pytest.mark.parametrize("name", LLAMA_CPPS)
def test_llama_cpps_vectors_give_llama_cpps_ids(name: str) -> None:
    (path,) = vectors(f"vocab/ggml-vocab-{name}.gguf")
    tokenizer = GGUFTokenizer(GGUFFile.open(path).metadata).fast
    cases = read_vectors(path)
    assert len(cases) > 40
    for text, ids in cases:
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
