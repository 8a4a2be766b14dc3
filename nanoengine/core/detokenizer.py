"""Detokenizer: turns the tokens of a completion into text."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from os.path import commonprefix

INCOMPLETE = "\ufffd"  # what decoders put in the place of bytes that are not (yet) a whole character
NUM_CONTEXT = 8  # last tokens of a prompt that are decoded with the first of a completion


class Detokenizer:
    """Text of one completion. It only grows; characters that a later token may complete are held back.

    Args:
        decode: token ids to text; the text of a prefix of the ids is a prefix of the text, incomplete characters aside.
        prompt: the tokens before: decoders drop a space at the beginning of a text, and of that alone.
    """

    due = 0  # the number of tokens of the sequence from which on `read` is to be called; until then some may wait

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()):
        self.decode = decode
        self.num_tokens = len(prompt)  # those of the sequence that it has taken
        self.text = ""  # that is final
        # Tokens whose text was told, as context, then those whose text is held back.
        self._window = list(prompt[-NUM_CONTEXT:])
        self._num_context = len(self._window)

    def text_from(self, start: int) -> str:
        """The final text from this character on."""
        return self.text[start:]

    def read(self, token_ids: Sequence[int], stop_token_ids: Container[int] = ()) -> str | None:
        """Take those of the sequence's tokens that are new, up to a string that ends the text; returns that, if any."""
        for token in token_ids[self.num_tokens :]:
            if (stop := self.push(token, is_stop=token in stop_token_ids)) is not None:
                return stop
        return None

    def push(self, token_id: int, *, is_stop: bool = False) -> str | None:
        """Take the next token; one that stops the sequence has no text. Returns a string that ends the text here, if any."""
        self.num_tokens += 1
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
        new = decoded[len(commonprefix([decoded, self.decode(self._window[: self._num_context])])) :]  # noqa: RUF071
        if new and (is_last or not new.endswith(INCOMPLETE)):
            self.text += new
            del self._window[: self._num_context]
            self._num_context = len(self._window)
