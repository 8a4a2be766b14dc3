"""LongText: tokens of a long text that must come, as far as they are used. llguidance makes tokens of all of it for each mask."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer

MAX_FORCED = 256
"""Bytes of a text that must come, of which tokens are made at once; a step uses 16 tokens."""


class LongText:
    def __init__(self, tokenizer: LLTokenizer):
        self.tokenizer = tokenizer

    def tokens(self, matcher: LLMatcher, last: int | None) -> list[int] | None:
        """The next tokens, at least one, where more than `MAX_FORCED` bytes must come; None where not.

        Args:
            last: that the matcher has read; the text goes on behind it.
        """
        text = bytes(matcher.compute_ff_bytes())
        if len(text) <= MAX_FORCED:
            return None
        size = next(size for size in range(MAX_FORCED, 0, -1) if text[size] & 0xC0 != 0x80)  # between two characters
        text = text[:size]
        found: list[int] = []
        if last is not None and not self.tokenizer.is_special_token(last):
            found = self.tokenizer.tokenize_bytes(self.tokenizer.decode_bytes([last]) + text)
        found = found[1:] if found[:1] == [last] else self.tokenizer.tokenize_bytes(text)
        if not found or self.tokenizer.decode_bytes(found) != text:
            return None
        return found[: max(1, len(found) // 2)]  # the last ones may depend on what follows
