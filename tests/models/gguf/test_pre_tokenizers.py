"""How text is cut into words under the names of `tokenizer.ggml.pre`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.errors import UnsupportedModel
from nanoengine.models.gguf.pre_tokenizers import _KINDS, find_pre_tokenizer
from tests.drawn import FAST


def words(name: str, text: str) -> list[str]:
    return [text[start:end] for _, (start, end) in find_pre_tokenizer(name).build().pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "it's 1234  ok\n\n x", ["it", "'s", " 1234", " ", " ok", "\n\n", " x"]),
        ("smollm", "it's 12  ok", ["it", "'s", " ", "1", "2", " ", " ok"]),
        ("llama-bpe", "IT'S 12345 (x)\n\n", ["IT", "'S", " ", "123", "45", " (", "x", ")\n\n"]),
        ("qwen2", "IT'S 123 \n x", ["IT", "'S", " ", "1", "2", "3", " \n", " x"]),
        ("tekken", "getHTTPName 12 it's/\n", ["get", "HTTPName", " ", "1", "2", " it", "'s", "/\n"]),
        ("gpt-4o", "getHTTPName 1234 It's/\n", ["get", "HTTPName", " ", "123", "4", " It's", "/\n"]),
        ("kimi-k2", "ab中文getName 1234 it's/\n", ["ab", "中文", "get", "Name", " ", "123", "4", " it's", "/\n"]),
        ("seed-coder", "IT'S 12 (x)\n", ["IT", "'S", " ", "1", "2", " (", "x", ")", "\n"]),
        ("bailingmoe2", "IT'S 12 (x)\n\n y", ["IT", "'S", " ", "1", "2", " (", "x", ")\n\n", " y"]),
        ("exaone-moe", "it's a 12", ["it", "'s", " a", " ", "1", "2"]),
        ("tiny_aya", "n 1234567", ["n", " ", "1", "234", "567"]),
        ("superbpe", "n 1234567", ["n ", "1", "234", "567"]),
        ("bloom", "a b, c12", ["a", " b", ",", " c12"]),
        ("viking", "a b, c12", ["a", " b", ",", " c", "1", "2"]),
        ("youtu", "가a、中b 12", ["가", "a", "、", "中", "b", " ", "1", "2"]),
        ("falcon", "a.b 12345", ["a", ".", "b", " ", "123", "45"]),
        ("deepseek-coder", "a b\n\n12", ["a", " b", "\n", "\n", "1", "2"]),
        ("deepseek-v3", "(abc 1234", ["(abc", " ", "123", "4"]),
        ("default", "a.b 12345", ["a", ".", "b", " ", "123", "45"]),
    ],
)
def test_text_is_cut_as_the_models_were_trained(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected


BUILT = {names: kind.build() for names, kind in _KINDS.items()}


@FAST
@given(st.text(max_size=30))
def test_nothing_is_lost_or_moved(text: str) -> None:
    for names, pre_tokenizer in BUILT.items():
        spans = [span for _, span in pre_tokenizer.pre_tokenize_str(text)]
        assert sorted(spans) == spans, names
        assert {at for start, end in spans for at in range(start, end)} == set(range(len(text))), names


def test_an_unknown_name_is_named_and_so_are_the_known_ones() -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer.ggml.pre is 'afmoe', which .* knows .*qwen2"):
        find_pre_tokenizer("afmoe")
