"""What can be checked of params only beside a model and its tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine.core.errors import InvalidSamplingParams
from nanoengine.features.sampling.params import SamplingParams


class Model:
    """Ten tokens, of which 2 ends a text; a word is a list of digits."""

    vocab_size, max_model_len, eos_token_ids = 10, 100, (2,)

    def encode(self, text: str) -> list[int]:
        return [int(letter) for letter in text.strip()]


BOTH_END = {"allowed_token_ids": [2, 3], "stop_token_ids": [3]}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, None),
        ({"stop_token_ids": [9], "logit_bias": {9: 1}, "allowed_token_ids": [0, 9]}, None),
        ({"min_tokens": 99, "max_tokens": None}, None),
        ({"top_k": 2**31 - 1, "max_tokens": 2**31 - 1}, None),
        ({"stop_token_ids": [3, 10]}, "stop_token_ids holds 10: the vocabulary has 10 tokens"),
        ({"logit_bias": {10: 1.0}}, "logit_bias holds 10: the vocabulary has 10 tokens"),
        ({"allowed_token_ids": [10]}, "allowed_token_ids holds 10: the vocabulary has 10 tokens"),
        ({"min_tokens": 100, "max_tokens": None}, "min_tokens is 100, but max_model_len.* is 100"),
        (BOTH_END | {"min_tokens": 1}, "min_tokens forbids each of the 2 tokens"),
        (BOTH_END | {"min_tokens": 1, "ignore_eos": True}, None),
        (BOTH_END, None),
        (BOTH_END | {"min_tokens": 1, "allowed_token_ids": [2, 3, 4]}, None),
    ],
    ids=str,
)
def test_what_the_model_cannot_hold_is_named(params: dict[str, Any], message: str | None) -> None:
    own = SamplingParams(**params)
    if message is None:
        assert own.for_model(Model()) is own
        return
    with pytest.raises(InvalidSamplingParams, match=message):
        own.for_model(Model())
