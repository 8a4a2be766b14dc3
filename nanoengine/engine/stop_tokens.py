"""StopTokens: which tokens end any of the running sequences, so that a step in which none of them came need not look at each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from nanoengine.engine.messages import UNKNOWN


class StopTokens:
    """The stop tokens of some sequences. Most have the same ones."""

    def __init__(self) -> None:
        self._counts: Counter[frozenset[int]] = Counter()
        self._any = frozenset([UNKNOWN])

    def add(self, tokens: frozenset[int]) -> None:
        self._counts[tokens] += 1
        if self._counts[tokens] == 1:
            self._any |= tokens

    def remove(self, tokens: frozenset[int]) -> None:
        self._counts[tokens] -= 1
        if not self._counts[tokens]:
            del self._counts[tokens]
            self._any = frozenset([UNKNOWN]).union(*self._counts)

    def may_be_in(self, tokens: Iterable[int]) -> bool:
        """Whether one of these tokens may end a sequence; UNKNOWN, where no token could be sampled, does."""
        return not self._any.isdisjoint(tokens)
