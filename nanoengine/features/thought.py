"""ThoughtReader: detects the end of a model's thought and the begin of its answer, token by token."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LONGEST_MARK = 256
"""Last characters of a text that are searched for the end of a thought."""

LONGEST_MARK_TOKENS = 32
"""Last tokens of a complete text that are searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """The marks of a model's thought before its answer. Parameters of the answer (a grammar, stop strings and tokens,
    `min_tokens`, `allowed_token_ids`, biases of tokens that end it) do not hold before the answer begins.

    Args:
        end: an expression; the answer begins behind the token with which the text has a match.
        begin: the token, and the text, with which a thought begins the output. None: the prompt has begun the thought.
        last: the token with which such a match ends; None: any token.
        calls: tokens that begin a call of a tool: they end a thought, and are the first of the answer.
        forced: tokens that end the thought at its budget.
        body: an expression; the thought may be ended behind its last match with the text. None: anywhere.
    """

    end: str
    begin: tuple[int, str] | None = None
    last: int | None = None
    calls: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    body: str | None = None

    def count(self, token_ids: Sequence[int], decode: Callable[..., str]) -> int:
        """The number of tokens before the answer in a complete output."""
        if self.begin is not None:
            number, mark = self.begin
            start = decode(token_ids[: len(mark) + 8], skip_special_tokens=False).lstrip()
            if number not in token_ids[:8] and not start.startswith(mark):
                return 0
        end = re.compile(self.end)
        for i, token in enumerate(token_ids):
            if token in self.calls:
                return i
            if self.last is None or token == self.last:
                tail = token_ids[max(0, i + 1 - LONGEST_MARK_TOKENS) : i + 1]
                if end.search(decode(tail, skip_special_tokens=False)):
                    return i + 1
        return len(token_ids)


class ThoughtReader:
    """The reader of one output, until its answer begins.

    Args:
        decode: see `Tokenizer.decode`.
        budget: most tokens of the thought, its marks not counted; None: no limit.
    """

    def __init__(self, thought: Thought, decode: Callable[..., str], budget: int | None = None):
        self.thought, self._decode, self.budget = thought, decode, budget
        self.answer_start: int | None = None
        """The number of output tokens before the answer; None: the answer has not begun."""
        self.num_read = self.num_thought = 0
        self.has_begun = thought.begin is None  # the prompt has begun it
        self._is_in_body = thought.body is None
        self._forced: list[int] | None = None  # remaining forced tokens; None: the budget is not used up
        self._end, self._body = re.compile(thought.end), thought.body and re.compile(f"(?:{thought.body})$")
        self._tail = ""
        if self.has_begun:
            self._limit()

    @property
    def is_open(self) -> bool:
        """Whether the answer has not begun."""
        return self.answer_start is None

    @property
    def forced_token(self) -> int | None:
        """The only allowed next token, where the thought has used its budget."""
        return self._forced[0] if self._forced else None

    @property
    def begins(self) -> tuple[int, ...]:
        """Tokens that would begin a thought now."""
        return (self.thought.begin[0],) if self.is_open and self.thought.begin and not self.has_begun else ()

    def read(self, token_ids: Sequence[int]) -> None:
        """Read the next tokens of the output; those of the answer are only counted."""
        for token in token_ids:
            if self.is_open:
                self._read_one(token)
            self.num_read += 1

    def _read_one(self, token: int) -> None:
        text = self._decode([token], skip_special_tokens=False)
        if not self.has_begun:
            self._read_begin(token, text)
            return
        self._tail = (self._tail + text)[-LONGEST_MARK:]
        self.num_thought += self._is_in_body
        if self._forced:
            self._forced.pop(0)
        has_ended = self._end.search(self._tail) is not None if self._forced is None else not self._forced
        if token in self.thought.calls:
            self.answer_start = self.num_read
        elif has_ended:
            self.answer_start = self.num_read + 1
        if self._body:
            self._is_in_body = self._body.search(self._tail) is not None or (
                self._is_in_body and not text.startswith("<|")
            )
        self._limit()

    def _read_begin(self, token: int, text: str) -> None:
        assert self.thought.begin is not None
        number, mark = self.thought.begin
        self._tail += text
        text = self._tail.strip()
        if token == number or text.startswith(mark):
            self.has_begun = True
            self._limit()
        elif not mark.startswith(text):
            self.answer_start = 0

    def _limit(self) -> None:
        is_used_up = self.budget is not None and self.num_thought >= self.budget
        if is_used_up and self.is_open and self._is_in_body and self._forced is None:
            self._forced = list(self.thought.forced)

    # ---- DraftConstraint

    def forced(self, most: int) -> list[int]:
        """No draft: the end of a thought is short, and forced token by token."""
        return []

    def allowed(self, drafts: list[int]) -> list[int]:
        """The drafts before the first behind which sampling would depend on whether they are accepted."""
        if not self.is_open:
            return drafts
        if self._forced or not self.has_begun:
            return []
        copy = self.copy()
        for count, token in enumerate(drafts):
            copy.read([token])
            if not copy.is_open or copy.forced_token is not None:
                return drafts[:count]
        return drafts

    def copy(self) -> ThoughtReader:
        copy = ThoughtReader(self.thought, self._decode, self.budget)
        vars(copy).update(vars(self))
        copy._forced = None if self._forced is None else self._forced.copy()
        return copy
