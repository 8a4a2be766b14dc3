"""TokenTexts: the texts of single tokens, for log probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from nanoengine.core.detokenizer import INCOMPLETE
from nanoengine.models.tokenizer import ModelTokenizer

MOST_PARTS = 4
"""Tokens before one that may be parts of the same character."""


class TokenTexts:
    """The texts of single tokens, for log probabilities."""

    def __init__(self, tokenizer: ModelTokenizer):
        self._tokenizer = tokenizer
        self._texts: dict[int, tuple[str, str]] = {}  # alone, where a decoder may drop a space; in a text

    def after(self, before: Sequence[int], token: int) -> str:
        """The text that a token adds to those before it: nothing while a character is incomplete, then the whole character."""
        if token not in self._texts:
            alone = self._decode([token])
            self._texts[token] = alone, self._decode([token, token])[len(alone) :]
        alone, text = self._texts[token]
        if INCOMPLETE not in text:
            return text if alone == text or self._tokenizer.decode(before) else alone
        for count in range(1, len(before) + 1):
            whole = self._decode([*before[-count:], token])
            if not whole.endswith(INCOMPLETE):
                return whole[len(self._decode(before[-count:]).rstrip(INCOMPLETE)) :]
        return ""

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
