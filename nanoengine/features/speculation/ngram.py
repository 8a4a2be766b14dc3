"""Prompt lookup: a text that repeats itself goes on as it went on the last time."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq


class NgramProposer:
    """Guesses what followed the latest earlier occurrence of the longest suffix of a sequence, in its prompt or its output.

    Sequences share nothing. An index takes about 0.4 KB for each token of a sequence that is still running.

    Args:
        min_tokens: of the shortest suffix that is looked for; 1 guesses at every word that was seen before.
        max_tokens: of the longest one. Each length up to it is indexed, which takes time and memory.

    Source: prompt lookup decoding (Saxena, 2023), https://github.com/apoorvumang/prompt-lookup-decoding.
    """

    def __init__(self, min_tokens: int = 2, max_tokens: int = 5):
        self._sizes = range(min_tokens, max_tokens + 1)

    def begin(self, prompt: Seq[int]) -> NgramSequenceProposer:
        proposer = NgramSequenceProposer(self._sizes)
        proposer.read(prompt)
        return proposer


class NgramSequenceProposer:
    """Follows a source: the place behind an earlier occurrence of what the sequence ends in.

    While tokens come as the source has them, it stays the source: no other place has more in common with the end. Otherwise the
    index has the latest place with the most in common, as far as its sizes go. So the guess depends on the tokens alone, and
    not on how many of them each call brings.

    A guess has at most as many tokens as its source has in common with the end: two may be chance, but a copy soon has many.
    """

    __slots__ = ("_latest", "_num_common", "_num_read", "_of_prompt", "_sizes", "_source", "_window")

    def __init__(self, sizes: range):
        self._sizes = sizes
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram -> the position behind its latest occurrence
        self._of_prompt: Mapping[tuple[int, ...], int] = {}  # the same, of a prompt that other completions have too
        self._window: tuple[int, ...] = ()  # the last tokens that were read, as many as the largest n-gram has
        self._num_read = 0
        self._source: int | None = None
        self._num_common = 0  # tokens before the source that are those of the end

    def fork(self) -> NgramSequenceProposer:
        fork = NgramSequenceProposer(self._sizes)
        fork._of_prompt, fork._window, fork._num_read = self._latest, self._window, self._num_read
        fork._source, fork._num_common = self._source, self._num_common
        return fork

    def propose(self, token_ids: Seq[int], most: int) -> list[int]:
        self.read(token_ids)
        source, most = self._source, min(most, self._num_common)
        if source is None or most <= 0:
            return []
        guess = list(token_ids[source : source + most])
        if len(guess) < most:  # a loop: what follows is once more what has just been guessed
            guess = (guess * (most // len(guess) + 1))[:most]
        return guess

    def read(self, token_ids: Seq[int]) -> None:
        """Take note of the tokens that came since the last call."""
        latest, of_prompt, sizes = self._latest, self._of_prompt, self._sizes
        window, source, num_common = self._window, self._source, self._num_common
        keep = 1 - sizes[-1]
        for position in range(self._num_read, len(token_ids)):
            token = token_ids[position]
            window = (*window[keep:], token) if keep else (token,)
            if source is not None and token_ids[source] == token:
                source += 1
                num_common += 1
            else:
                source, num_common = None, 0
                for size in sizes:
                    found = latest.get(window[-size:]) or of_prompt.get(window[-size:])
                    if found is None:
                        break  # a longer n-gram would hold this one
                    source, num_common = found, size
            # At the very beginning a window may be shorter than a size. It does no harm: later windows are longer.
            for size in sizes:
                latest[window[-size:]] = position + 1
        self._window, self._source, self._num_common = window, source, num_common
        self._num_read = len(token_ids)
