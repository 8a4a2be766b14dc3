"""Delimiters: a search for fixed texts in streamed text."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Delimiters:
    """Searches for the first of several texts."""

    def __init__(self, texts: Iterable[str]):
        longest_first = sorted(set(texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._beginnings = {text[:size] for text in longest_first for size in range(1, len(text))}
        self._max_partial = max(map(len, longest_first), default=1) - 1

    def find(self, text: str, start: int, is_last: bool) -> tuple[re.Match[str] | None, int]:
        """The first delimiter from `start` on, and the end of the text that has none, whatever text follows."""
        match = self._pattern.search(text, start)
        safe_end = len(text)
        if not is_last:
            sizes = range(min(self._max_partial, len(text) - start), 0, -1)
            safe_end -= next((size for size in sizes if text[-size:] in self._beginnings), 0)
        if match is None or match.start() >= safe_end:
            return None, safe_end
        return match, match.start()


def past_space(text: str, at: int, more: str = "") -> int:
    """The first index from `at` on whose character is neither white space nor one of `more`."""
    while at < len(text) and (text[at].isspace() or text[at] in more):
        at += 1
    return at
