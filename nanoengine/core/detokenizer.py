"""Detokenizer: turns tokens into text as they come, holds back what may still change, and finds stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

INCOMPLETE = "\ufffd"
"""What decoders put in the place of bytes that are not (yet) a whole character."""

MOST_INCOMPLETE = 3
"""Bytes of a character that may be there before its last one comes, and so replacements that may still go away."""


class Detokenizer:
    """Text of one completion. It grows only: what was released is never taken back.

    Two kinds of text are held back: an incomplete character, which a later token may complete, and the beginning of what
    may become a stop string that is cut off.

    Args:
        decode: token ids to text; the text of a prefix of the ids is a prefix of the text, incomplete characters aside.
        stop: strings that end the text.
        include_stop: the text ends behind its stop, and not before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = (), *, include_stop: bool = False):
        self._decode = decode
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._begun = [0] * len(self._stop)  # characters of each stop that the text ends with
        self._text = ""  # all complete characters so far
        self._num_released = 0
        # The last tokens: those that are not decoded for good, and a few before them as context.
        self._window: list[int] = []
        self._num_context = 0  # how many tokens of the window are context
        self._window_text = ""  # characters of the window that are in _text already

    @property
    def text(self) -> str:
        """The text that is final."""
        return self._text[: self._num_released]

    def text_from(self, start: int) -> str:
        """The text that is final, from this character on: what is new to whoever has seen that many."""
        return self._text[start : self._num_released]

    def push(self, token_id: int, *, match_stop: bool = True) -> str | None:
        """Take the next token; returns the stop string that it completed, if any: the text ends there."""
        self._window.append(token_id)
        decoded = self._decode(self._window)
        ends_whole = not decoded.endswith(INCOMPLETE)
        complete = decoded.rstrip(INCOMPLETE)
        if len(self._window) - self._num_context > MOST_INCOMPLETE:  # more than a character can be waiting for
            complete = decoded[: max(len(complete), len(decoded) - MOST_INCOMPLETE)]
        new = complete[len(self._window_text) :]
        if ends_whole and new:
            # The window ends at a character: these tokens become the context of the next.
            del self._window[: self._num_context]
            self._num_context = len(self._window)
            self._window_text = self._decode(self._window)
        elif new:
            self._window_text = complete
        elif ends_whole and not self._decode([token_id, token_id]):
            self._window.pop()  # a token without text, and not a space that has none only because it is the first
        return self._append(new, match_stop)

    def finish(self) -> None:
        """No more tokens come: release what was held back, incomplete characters included."""
        self._text += self._decode(self._window)[len(self._window_text) :]
        self._window, self._num_context, self._window_text = [], 0, ""
        self._num_released = len(self._text)

    def _append(self, new: str, match_stop: bool) -> str | None:
        if not self._stop:
            self._text += new
            self._num_released = len(self._text)
            return None
        old = len(self._text)
        self._text += new
        if match_stop:
            # Only a stop that ends in the new text: an earlier one ended before `min_tokens`, and is text.
            found = [(self._text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self._stop]
            position, stop = min(((at, stop) for at, stop in found if at >= 0), default=(-1, ""))
            if position >= 0:
                end = position + len(stop) if self._include_stop else position
                self._text = self._text[:end]
                self._window, self._num_context, self._window_text = [], 0, ""
                self._num_released = end
                return stop
        num_held = 0 if self._include_stop else self._follow_stops(new)
        self._num_released = len(self._text) - num_held
        return None

    def _follow_stops(self, new: str) -> int:
        """Length of the longest end of the text that begins a stop string; what is new of the text moves it on.

        By Knuth, Morris and Pratt: a character costs the same, however long the stops are.
        """
        for i, stop in enumerate(self._stop):
            fallbacks, begun = _fallbacks(stop), self._begun[i]
            for character in new:
                while begun and (begun == len(stop) or stop[begun] != character):
                    begun = fallbacks[begun - 1]
                begun += stop[begun] == character
            # All of it is text where it was not to be heeded; it may begin again within itself.
            self._begun[i] = fallbacks[begun - 1] if begun == len(stop) else begun
        return max(self._begun)


@lru_cache(maxsize=1024)
def _fallbacks(stop: str) -> tuple[int, ...]:
    """For each beginning of a string, the length of the longest shorter beginning that it ends with."""
    lengths = [0]
    for character in stop[1:]:
        length = lengths[-1]
        while length and stop[length] != character:
            length = lengths[length - 1]
        lengths.append(length + (stop[length] == character))
    return tuple(lengths)
