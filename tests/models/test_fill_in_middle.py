"""Filling in the middle: which marks a model has, and in which order they stand."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken

from nanoengine.errors import InvalidPrompt
from nanoengine.models.fill_in_middle import END_NAMES, FILE_NAMES, NAMES, fill_tokens
from nanoengine.models.gguf.tokenizer import GGUFTokenizer
from nanoengine.models.tokenizer import HFTokenizer
from tests.models.gguf.test_tokenizer import bpe
from tests.support import byte_tokenizer


def with_tokens(folder: Path, *texts: str) -> HFTokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(text) for text in texts if text]})
    tokenizer.save_pretrained(folder)
    return HFTokenizer(folder)


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
def test_marks_are_found_by_the_texts_of_their_tokens(names: tuple[str, str, str], tmp_path: Path) -> None:
    tokenizer = with_tokens(tmp_path, *names, FILE_NAMES[0], *END_NAMES[:2])
    marks = fill_tokens(tokenizer)
    assert (marks.prefix, marks.suffix, marks.middle, marks.file) == (*names, FILE_NAMES[0])
    known = [name for name in (*names, FILE_NAMES[0], *END_NAMES[:2]) if name]
    assert sorted(marks.ends) == sorted(tokenizer.fast.token_to_id(name) for name in known)
    ids = tokenizer.encode(marks.prompt("ab", "cd"))
    assert [tokenizer.decode([i], skip_special_tokens=False) for i in ids] == (
        [names[0], "a", "b", names[1], "c", "d", names[2]] if names[2] else [names[1], "c", "d", names[0], "a", "b"]
    )


def test_other_files_come_first(tmp_path: Path) -> None:
    marks = fill_tokens(with_tokens(tmp_path, *NAMES[0], FILE_NAMES[0]))
    text = marks.prompt("a", "b", [("x.py", "x = 1"), ("y.py", "y = 2")])
    assert text == ("<|file_sep|>x.py\nx = 1\n<|file_sep|>y.py\ny = 2\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>")


def test_a_part_of_the_marks_is_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidPrompt, match="has no tokens for filling in the middle"):
        fill_tokens(with_tokens(tmp_path, *NAMES[0][:2]))


@pytest.mark.parametrize("keys", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")])
def test_a_gguf_file_names_marks_of_its_own(keys: tuple[str, ...]) -> None:
    """Its tokens are found in a text though the file calls them normal ones, and a part of the keys names none."""
    metadata = bpe()
    tokens = metadata["tokenizer.ggml.tokens"]
    own = [len(tokens) - 1, len(tokens) - 3, len(tokens) - 2]
    named = {f"tokenizer.ggml.{key}_token_id": i for key, i in zip(keys, own, strict=True)}
    for i, text in zip(own, ("[before]", "[behind]", "[between]"), strict=True):
        tokens[i] = text
    metadata["tokenizer.ggml.merges"] = [
        merge for merge in metadata["tokenizer.ggml.merges"] if merge.replace(" ", "") in tokens
    ]
    tokenizer = GGUFTokenizer(metadata | named)
    marks = fill_tokens(tokenizer)
    assert marks.prompt("a", "b") == "[before]a[behind]b[between]"
    assert [own.index(i) for i in tokenizer.encode(marks.prompt("a", "b")) if i in own] == [0, 1, 2]
    with pytest.raises(InvalidPrompt, match="has no tokens"):
        fill_tokens(GGUFTokenizer(metadata | dict(list(named.items())[:2])))
