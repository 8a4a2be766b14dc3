"""LongText: the first tokens of a long forced text. llguidance would tokenize all of it for each mask."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer

MAX_FORCED = 256
"""Bytes of a forced text that are tokenized at once; a step uses 16 tokens."""


class LongText:
    def __init__(self, tokenizer: LLTokenizer):
        self.tokenizer = tokenizer

    def tokens(self, matcher: LLMatcher, last: int | None) -> list[int] | None:
        """The next tokens, at least one, where more than `MAX_FORCED` bytes are forced; None otherwise.

        Args:
            last: the last token of the matcher; the text continues behind it.
        """
        text = bytes(matcher.compute_ff_bytes())
        if len(text) <= MAX_FORCED:
            return None
        size = next(size for size in range(MAX_FORCED, 0, -1) if text[size] & 0xC0 != 0x80)  # between two characters
        text = text[:size]
        tokens: list[int] = []
        if last is not None and not self.tokenizer.is_special_token(last):
            tokens = self.tokenizer.tokenize_bytes(self.tokenizer.decode_bytes([last]) + text)
        tokens = tokens[1:] if tokens[:1] == [last] else self.tokenizer.tokenize_bytes(text)
        if not tokens or self.tokenizer.decode_bytes(tokens) != text:
            return None
        return tokens[: max(1, len(tokens) // 2)]  # the last ones may depend on the rest of the text
