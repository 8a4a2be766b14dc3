"""Keys of an architecture: read, or without effect, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoengine.errors import UnsupportedModel
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.gguf.keys import WITHOUT_EFFECT, Keys


def keys(**values: Any) -> Keys:
    """Those of a file; "__" stands for a dot."""
    metadata = {f"llama.{key.replace('__', '.')}": value for key, value in values.items()}
    return Keys(GGUFFile(Path("m.gguf"), {"general.architecture": "llama"} | metadata, {}, []), ["llama", "qwen2"])


def test_a_number_is_read_whole_or_not_and_equal_in_all_layers() -> None:
    for value, expected in ((7, 7), (np.array([7, 7], np.uint32), 7), (2**40, 2**40)):
        found = keys(block_count=value).number("block_count")
        assert (found, type(found)) == (expected, int)
    assert keys(rope__freq_base=0.5).number("rope.freq_base") == 0.5
    assert keys(rope__freq_base=5).number("rope.freq_base") == 5


NO_COUNTS = [-1, 7.0, True, "7", ["7"], np.array([7, 8]), np.array([], np.uint32), np.array([True, True])]


@pytest.mark.parametrize(
    ("key", "value"),
    [*(("block_count", value) for value in NO_COUNTS)]
    + [("rope.freq_base", value) for value in (float("nan"), float("inf"), -1.0, "1.0")],
    ids=repr,
)
def test_what_is_no_number_is_refused_by_name(key: str, value: Any) -> None:
    kind = "count" if key == "block_count" else "number"
    with pytest.raises(UnsupportedModel, match=rf"llama\.{key} .*; supported is a {kind}"):
        keys(**{key: value}).number(key)


def test_a_missing_key_is_its_default_or_an_error() -> None:
    assert keys().number("block_count", default=3) == 3
    assert keys().text("rope.scaling.type", default="linear") == "linear"
    with pytest.raises(UnsupportedModel, match=r"no llama\.block_count"):
        keys().number("block_count")


def test_a_key_that_llama_cpp_knows_is_read_or_refused_and_any_other_is_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = keys(block_count=2, swin_norm=True, new_thing=1)
    found.number("block_count")
    with pytest.raises(UnsupportedModel, match=r"llama\.swin_norm True, which is not supported"):
        found.check_rest()
    found.flag("swin_norm", False)
    found.check_rest()
    assert "m.gguf has 'llama.new_thing' (1), which are not known fields" in caplog.text


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_a_key_is_refused_only_with_a_value_that_has_an_effect(key: str) -> None:
    for value in WITHOUT_EFFECT[key]:
        keys(**{key: value}).check_rest()
    for value in (0.25, np.array([0.0])):
        with pytest.raises(UnsupportedModel, match=f"llama.{key}"):
            keys(**{key: value}).check_rest()


def test_keys_of_others_and_of_the_making_of_a_model_have_any_value(caplog: pytest.LogCaptureFixture) -> None:
    of_pictures = ("vision.block_count", "mm.tokens_per_image", "image_token_id", "image_token_index", "mrope_sections")
    of_others = ("vocab_size", "pooling_type", "embedding_length_out", "rope.dimension_sections", *of_pictures)
    keys(**dict.fromkeys(of_others, "anything")).check_rest()
    file = GGUFFile(Path("m.gguf"), {"general.architecture": "llama", "qwen2.x": 1, "general.name": "x"}, {}, [])
    assert not caplog.text
    file.metadata["tokenizer.ggml.tone"] = 1
    Keys(file, ["llama"]).check_rest()
    assert "'tokenizer.ggml.tone' (1)" in caplog.text
