"""Detokenizer: turns the tokens of a completion into text."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from os.path import commonprefix

INCOMPLETE = "\ufffd"  # replacement character of decoders, for bytes that are not (yet) a whole character
MOST_INCOMPLETE = 3  # bytes of a character before its last one: so many replacements may still change
NUM_CONTEXT = 8  # last tokens of a prompt that are decoded with the first of a completion
# Tokens in the window of a long text without a whole end. 4 bytes prove that a run of bytes is no character. The last 3
# replacements stand for at most 9 bytes, and of the last 12 bytes at most 3 belong to a character that begins before.
NUM_FIRST, NUM_LAST = 4, 12


class Detokenizer:
    """Text of one completion. It only grows; characters that a later token may complete are held back.

    Args:
        decode: token ids to text; the text of a prefix of the ids is a prefix of the text, incomplete characters aside.
        prompt: the tokens before: decoders drop a space at the beginning of a text, and of that alone.
    """

    text = ""  # final text
    due = 0  # number of tokens of the sequence at which to call `read`

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()):
        self.decode = decode
        self.num_tokens = len(prompt)  # tokens of the sequence that were read
        # The tokens that are decoded again: context, whose text is final, then tokens whose text may change.
        self._window = list(prompt[-NUM_CONTEXT:])
        self._num_context = len(self._window)
        self._window_text, self._is_new = "", True  # characters of the window that are in the text; whether it has none

    def text_from(self, start: int) -> str:
        """The final text from this character on."""
        return self.text[start:]

    def read(self, token_ids: Sequence[int], stop_token_ids: Container[int] = ()) -> str | None:
        """Read the new tokens of the sequence, up to a string that ends the text; returns that string, if any."""
        for token in token_ids[self.num_tokens :]:
            if (stop := self.push(token, is_stop=token in stop_token_ids)) is not None:
                return stop
        return None

    def push(self, token_id: int, *, is_stop: bool = False) -> str | None:
        """Read the next token; a stop token has no text. Returns a string that ends the text here, if any."""
        self.num_tokens += 1
        if not is_stop:
            self.text += self._decode_next(token_id)
        return None

    def finish(self) -> None:
        """The last token was read: release the held text."""
        self.text += self._release(is_last=True)

    def _decode_next(self, token_id: int) -> str:
        """New final text at the next token."""
        self._window.append(token_id)
        new = self._release()
        if self._num_context < len(self._window) and not self.decode([token_id, token_id]):
            self._window.pop()  # it has no text: the window stays short
        return new

    def _release(self, *, is_last: bool = False) -> str:
        """New final text: complete characters. The window stays short, also for many tokens without a complete character."""
        window, decoded = self._window, self.decode(self._window)
        if self._is_new:
            self._window_text = commonprefix([decoded, self.decode(window[: self._num_context])])  # noqa: RUF071
        end = len(decoded if is_last else decoded.rstrip(INCOMPLETE))
        if len(window) - self._num_context > MOST_INCOMPLETE:  # more than a character can be waiting for
            end = max(end, len(decoded) - MOST_INCOMPLETE)
        new = decoded[len(self._window_text) : end]
        self._is_new = self._is_new and not new
        num_held = len(decoded) - len(self._window_text) - len(new)
        if new and end == len(decoded):  # the window ends at a character: these tokens become the context of the next
            del window[: self._num_context]
            self._num_context = len(window)
        elif len(window) - self._num_context > 2 * (NUM_FIRST + NUM_LAST):
            del window[self._num_context + NUM_FIRST : -NUM_LAST]
        shown = self.decode(window)
        self._window_text = shown[: len(shown) - num_held]
        return new
