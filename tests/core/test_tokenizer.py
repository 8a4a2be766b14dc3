"""Text to token ids and back by tokenizer.json, and the tokens that end a text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel

from nanoengine.core.errors import InvalidPrompt, ModelNotFound, UnsupportedModel
from nanoengine.core.tokenizer import Tokenizer, read_eos_token_ids, read_tokenizer
from tests.support import byte_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With one token per byte, and an end of text (256); the file asks for truncation and padding."""
    tokenizer = byte_tokenizer().backend_tokenizer
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("text", ["some text", "größer", "👩‍👩‍👧", "x" * 5000, ""])
def test_a_text_comes_back(folder: Path, text: str) -> None:
    tokenizer = read_tokenizer(folder)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens_have_text_only_if_it_is_wanted(folder: Path) -> None:
    tokenizer = read_tokenizer(folder)
    ids = tokenizer.encode("a<|endoftext|>b")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode([*ids, 299]) == "ab", "models pad their vocabularies: such an id can be sampled"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|endoftext|>b"
    assert tokenizer.decode(ids * 1000, skip_special_tokens=False) == "a<|endoftext|>b" * 1000


def test_half_a_surrogate_pair_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidPrompt, match="not valid Unicode"):
        read_tokenizer(folder).encode("\ud800")


def test_a_text_without_tokens_is_refused() -> None:
    tokenizer = Tokenizer(FastTokenizer(WordLevel({"a": 0}, unk_token="?")), "the tokenizer in x")
    with pytest.raises(InvalidPrompt, match="the tokenizer in x cannot encode"):
        tokenizer.encode("b")


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelNotFound, match=str(tmp_path)):
        read_tokenizer(tmp_path)


def write(folder: Path, name: str, eos: object) -> None:
    (folder / name).write_text(json.dumps({"eos_token_id": eos}))


def test_a_pipe_is_no_tokenizer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ModelNotFound, match=r"no tokenizer\.json that can be read"):
        read_tokenizer(tmp_path)


def test_every_file_may_name_an_end(tmp_path: Path) -> None:
    assert read_eos_token_ids(tmp_path, 300) == []
    write(tmp_path, "config.json", 11)
    assert read_eos_token_ids(tmp_path, 300) == [11]
    write(tmp_path, "generation_config.json", [7, 11, 300])
    assert read_eos_token_ids(tmp_path, 300) == [7, 11], "300 is beyond the vocabulary"
    write(tmp_path, "generation_config.json", None)
    assert read_eos_token_ids(tmp_path, 300) == [11]


@pytest.mark.parametrize("eos", ["0", [1.5], {"a": 1}, True], ids=str)
def test_an_end_that_is_no_token_is_refused(tmp_path: Path, eos: object) -> None:
    write(tmp_path, "config.json", eos)
    with pytest.raises(UnsupportedModel, match="eos_token_id"):
        read_eos_token_ids(tmp_path, 300)
