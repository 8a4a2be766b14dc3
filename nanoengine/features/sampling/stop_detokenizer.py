"""StopDetokenizer: turns tokens into text, delays text that may still change, and matches stop strings."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from threading import Lock

from nanoengine.core.detokenizer import INCOMPLETE, Detokenizer
from nanoengine.features.thought import ThoughtReader

CONTEXTS = (8, 32, 256)
"""Last tokens of a prompt for the context of the first token: the next number where so many have no text."""

MAX_DELAYED = 32
"""Most tokens that are decoded at once, where the text is not read yet and cannot end the sequence: many tokens cost two calls of
`decode`, as one does. The engine's steps wait meanwhile, so there is a limit."""


class StopDetokenizer(Detokenizer):
    """The text of one completion. It only grows: released text is final.

    Two kinds of text are delayed: an incomplete character, which a later token may complete, and the beginning of a possible stop
    string that is cut off.

    Args:
        decode: token ids to text; the text of a prefix of the ids is a prefix of the text, incomplete characters aside.
        stop: strings that end the text.
        prompt: the tokens before: decoders drop a space at the beginning of a text only.
        include_stop: the text ends behind its stop string or token, and not before it.
        min_tokens: with fewer tokens no string ends the text.
        until: is called with each new piece of the text; a result ends the text behind it, and is the reason.
        thought: detects the start of the answer: no string ends the text before it, and `min_tokens` are of the answer.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        *,
        prompt: Sequence[int] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        until: Callable[[str], str | None] | None = None,
        thought: ThoughtReader | None = None,
    ):
        super().__init__(decode)
        self.num_tokens, self._lock = len(prompt), Lock()
        self._min_tokens = len(prompt) + min_tokens
        self._stop = tuple(stop)
        self._include_stop, self._until, self._thought = include_stop, until, thought
        self._answer_start = 0  # in the text
        if not self._stop and until is None:
            self._thought = None  # nothing depends on the start of the answer
            # Sequences that start in one step have different phases: not all of their texts are made behind the same step.
            self.due = len(prompt) + 1 + id(self) // 64 % MAX_DELAYED
        self._text = ""  # all complete characters so far
        self._num_released = 0
        self._prompt: Sequence[int] | None = prompt  # until the first token comes

    @property
    def text(self) -> str:  # type: ignore[override]
        """The text that is final."""
        return self._text[: self._num_released]

    def text_from(self, start: int) -> str:
        """The final text from this character on."""
        return self._text[start : self._num_released]

    def read(self, token_ids: Sequence[int], stop_token_ids: Container[int] = ()) -> str | None:
        if self._stop or self._until is not None:
            return super().read(token_ids, stop_token_ids)
        with self._lock:  # the engine's thread, and readers of the text
            self.due = 0  # after an error: at the next token again
            num_whole = len(token_ids) - (token_ids[-1] in stop_token_ids)
            if num_whole > self.num_tokens + 1:
                with suppress(Exception):  # `push` raises it, at the token at fault
                    self._push_whole(token_ids[self.num_tokens : num_whole])
            super().read(token_ids, stop_token_ids)
            self.due = len(token_ids) + MAX_DELAYED
        return None

    def _push_whole(self, token_ids: Sequence[int]) -> None:
        """As `push` for all tokens up to the last one with whole characters, if their text has only whole characters."""
        for end in range(len(token_ids), 0, -1):
            last = self.decode(token_ids[end - 1 : end])
            if last and INCOMPLETE not in last:
                break
        else:
            return
        if self._prompt is not None:
            self._begin_behind(self._prompt)
        decoded = self.decode([*self._window, *token_ids[:end]])
        if INCOMPLETE not in decoded and decoded.startswith(self._window_text):
            self.num_tokens += end
            self._append(decoded[len(self._window_text) :], True, False)
            self._is_new = False
            self._window, self._num_context, self._window_text = [token_ids[end - 1]], 1, last

    def push(self, token_id: int, *, is_stop: bool = False) -> str | None:
        """Add the next token; returns the stop string that it completed, if any: the text ends there."""
        is_answer = self._thought is None or self._reads_answer(self._thought, token_id)
        self.num_tokens += 1
        self._min_tokens += not is_answer
        if is_stop and not self._include_stop:
            return None
        if self._prompt is not None:
            self._begin_behind(self._prompt)
        return self._append(self._decode_next(token_id), is_answer, self.num_tokens >= self._min_tokens)

    def finish(self) -> None:
        """The last token was added: release delayed text, incomplete characters included."""
        self._text += self.decode(self._window)[len(self._window_text) :]
        self._end_at(len(self._text))

    def _reads_answer(self, thought: ThoughtReader, token_id: int) -> bool:
        """Read a token; returns whether it is of the answer."""
        thought.read([token_id])
        return thought.answer_start is not None and thought.answer_start < thought.num_read

    def _begin_behind(self, prompt: Sequence[int]) -> None:
        """Fill the window with the last tokens of the prompt, until they have some text: special tokens have none."""
        for count in CONTEXTS:
            self._window = list(prompt[-count:])
            self._window_text = self.decode(self._window)
            if count >= len(prompt) or self._window_text.strip(INCOMPLETE):
                break
        self._num_context, self._prompt = len(self._window), None

    def _end_at(self, end: int) -> None:
        self._text = self._text[:end]
        self._window, self._num_context, self._window_text = [], 0, ""
        self._num_released = end

    def _append(self, new: str, is_answer: bool, match_stop: bool) -> str | None:
        """Add text, and match stop strings. A stop string that ends before `min_tokens` is text."""
        start = len(self._text)
        self._text += new
        reason = None if self._until is None else self._until(new)
        if not is_answer:
            self._num_released = self._answer_start = len(self._text)
            return None
        first = self._answer_start
        matches = [(self._text.find(stop, max(start - len(stop) + 1, first)), stop) for stop in self._stop]
        matches = [(position, stop) for position, stop in matches if position >= 0]
        if match_stop and matches:
            position, stop = min(matches)
            self._end_at(position + len(stop) if self._include_stop else position)
            return stop
        if match_stop and reason is not None:
            self._end_at(len(self._text))
            return reason
        begun = [0] if self._include_stop else [0, *(_num_begun(self._text[first:], stop) for stop in self._stop)]
        self._num_released = len(self._text) - max(begun)
        return None


def _num_begun(text: str, stop: str) -> int:
    """The length of the longest proper prefix of a stop string that is a suffix of the text."""
    end = text[max(len(text) - len(stop) + 1, 0) :]
    return next((len(end) - i for i in range(len(end)) if stop.startswith(end[i:])), 0)
