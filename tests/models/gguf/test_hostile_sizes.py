"""What a header says is bounded before it is multiplied: memory and work of hostile vocabularies and metadata."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.errors import InvalidWeights, NanoEngineError, UnsupportedModel
from nanoengine.models.gguf import sentencepiece, tokenizer
from nanoengine.models.gguf.file import GGUFFile, _check_part
from tests.drawn import FAST

MIB = 1 << 20
KINDS = ("gpt2", "llama", "gemma4")


def outcome(function: Callable[[], Any], most: int) -> str:
    """ "" or the named error, and nothing has taken more than `most` bytes."""
    tracemalloc.start()
    try:
        function()
        return ""
    except NanoEngineError as error:
        return str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < most


def vocabulary(model: str, tokens: list[str], merges: list[str] = [], kind: int = 1) -> dict[str, Any]:  # noqa: B006
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *tokens],
        "tokenizer.ggml.scores": np.zeros(3 + len(tokens), np.float32),
        "tokenizer.ggml.token_type": np.full(3 + len(tokens), kind, np.int32),
        "tokenizer.ggml.merges": merges,
    }


def test_tokens_that_are_merged_in_too_many_ways_are_counted_while_they_are_made() -> None:
    """All <^i b^j: the cube of the size, as tokens with < keep all pairs."""
    tokens = ["<" * i + "b" * j for i in range(64) for j in range(64) if i + j]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentencepiece, "MAX_MERGES", 20_000)
        error = outcome(lambda: tokenizer.GGUFTokenizer(vocabulary("llama", tokens)).fast, 16 * MIB)
    assert "more than 20000 ways" in error


@FAST
@given(data=st.data())
def test_any_vocabulary_is_read_or_refused_within_its_limits(data: st.DataObject) -> None:
    signs = data.draw(st.sampled_from(["ab", "a", "ab▁", "äあ🦙"]))
    shapes = st.tuples(st.integers(0, 40), st.integers(0, 40))
    runs = [signs[0] * i + signs[-1] * j for i, j in data.draw(st.lists(shapes, max_size=400))]
    tokens = data.draw(st.sampled_from([runs, [signs[0] * i for i in range(1, 600)], [f"{i:04}" for i in range(3000)]]))
    tokens = [*dict.fromkeys(filter(None, tokens))]
    merges = [f"{tokens[0]} {tokens[-1]}"] * data.draw(st.sampled_from([0, 1, 10_000])) if tokens else []
    metadata = vocabulary(data.draw(st.sampled_from(KINDS)), tokens, merges, data.draw(st.integers(0, 4)))
    length = data.draw(st.sampled_from([0, 3 + len(tokens), 3_000_000]))
    metadata[data.draw(st.sampled_from([*metadata]))] = np.ones(length, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "MAX_CHARS", 10_000)
        patch.setattr(sentencepiece, "MAX_MERGES", 5_000)
        outcome(lambda: tokenizer.GGUFTokenizer(metadata).fast, 16 * MIB)


def test_parts_are_compared_without_room_for_the_longest_of_their_strings_each() -> None:
    tokens = ["a" * 100_000, *map(str, range(20_000))]
    parts = [GGUFFile(Path("x"), {"split.no": i, "split.count": 2, "tokens": list(tokens)}, {}, []) for i in range(2)]
    assert outcome(lambda: _check_part(parts[1], parts[0], 1, 2), MIB) == ""
    parts[1].metadata["tokens"][-1] = "other"
    with pytest.raises(InvalidWeights, match="disagree about tokens"):
        _check_part(parts[1], parts[0], 1, 2)


def test_what_is_too_long_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="has 9000012 characters: at most 8000000 are read"):
        tokenizer.GGUFTokenizer(vocabulary("gpt2", ["a" * 9_000_000]))
