"""Detokenizer: turns tokens into text as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"  # what decoders put in the place of bytes that are not (yet) a whole character


class Detokenizer:
    """Text of one completion. It only grows; characters that a later token may complete are held back.

    Args:
        decode: token ids to text; the text of a prefix of the ids is a prefix of the text, incomplete characters aside.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self.decode = decode
        self.text = ""  # that is final
        self._window: list[int] = []  # tokens whose text is in `text`, as context, then those whose text is held back
        self._num_context = 0

    def text_from(self, start: int) -> str:
        """The final text from this character on."""
        return self.text[start:]

    def push(self, token_id: int, *, is_stop: bool = False) -> str | None:
        """Take the next token; one that stops the sequence has no text. Returns a string that ends the text here, if any."""
        if not is_stop:
            self._window.append(token_id)
            self._release(self.decode(self._window))
            if self._num_context < len(self._window) and not self.decode([token_id, token_id]):
                self._window.pop()  # it has no text: the window stays short
        return None

    def finish(self) -> None:
        """No more tokens come: release what was held back."""
        self._release(self.decode(self._window), is_last=True)

    def _release(self, decoded: str, *, is_last: bool = False) -> None:
        new = decoded[len(self.decode(self._window[: self._num_context])) :]
        if new and (is_last or not new.endswith(INCOMPLETE)):
            self.text += new
            del self._window[: self._num_context]
            self._num_context = len(self._window)
