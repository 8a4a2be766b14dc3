"""Marks: finds texts in a text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Marks:
    """Finds the first of some texts."""

    def __init__(self, texts: Iterable[str]):
        found = sorted(set(texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, found)) or "(?!)")
        self._beginnings = {text[:size] for text in found for size in range(1, len(text))}
        self._most = max(map(len, found), default=1) - 1

    def find(self, text: str, start: int, is_last: bool) -> tuple[re.Match[str] | None, int]:
        """The first mark from a place on, and the place up to which there is no mark, whatever text follows."""
        match = self._pattern.search(text, start)
        held = len(text)
        if not is_last:
            sizes = range(min(self._most, len(text) - start), 0, -1)
            held -= next((size for size in sizes if text[-size:] in self._beginnings), 0)
        if match is None or match.start() >= held:
            return None, held
        return match, match.start()


def past_space(text: str, at: int, more: str = "") -> int:
    """The first place from `at` on that has neither white space nor one of some more characters."""
    while at < len(text) and (text[at].isspace() or text[at] in more):
        at += 1
    return at
