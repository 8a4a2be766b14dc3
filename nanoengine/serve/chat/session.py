"""Session: a conversation with a model, without a terminal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Generator
from contextlib import closing
from typing import Any

from nanoengine.errors import InvalidSamplingParams, NanoEngineError, PromptTooLong, shown
from nanoengine.llm import LLM
from nanoengine.serve.chat.answer import AnswerPiece, ChatAnswer, Stats

SETTINGS: tuple[str, ...] = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "stop")
SETTINGS += ("repetition_penalty", "presence_penalty", "frequency_penalty")

FREE, FREED = 1 / 4, 1 / 2
"""Parts of the model's context: a conversation that leaves less than the first for an answer loses its oldest turns, until it
leaves the second. The prefix cache has what is left of it then, until it is as long again."""


class ChatError(Exception):
    """A command of the user cannot be done; the message says why."""


class Session:
    """The messages of a conversation, and the parameters of its answers.

    Args:
        llm: a model.
        params: sampling parameters of all answers; `/set` changes them.
        system: a system message; empty: none.
        adapter: a LoRARequest for all answers, or None.
    """

    def __init__(self, llm: LLM, params: Any, system: str = "", adapter: Any = None):
        self.llm, self.params, self.system, self.adapter = llm, params, system, adapter
        self.messages: list[dict[str, str]] = []
        self.stats: list[Stats] = []
        """The statistics of all answers, also of those that were forgotten."""
        self.num_left_out = 0
        """The first messages that the model no longer reads: its context is full."""
        self._defaults = params
        self._num_retries = 0  # of the last message

    def ask(self, text: str) -> Generator[AnswerPiece, None, None]:
        """The answer to a message, as it comes. The text so far stays in the conversation, also if it is stopped in the middle.

        Raises:
            NanoEngineError: the model cannot answer; the message is then no part of the conversation.
        """
        self._num_retries = 0
        return self._answer([*self.messages, {"role": "user", "content": text}])

    def retry(self) -> Generator[AnswerPiece, None, None]:
        """Another answer to the last message, instead of the last answer; of the next seed, where there is one.

        Raises:
            ChatError: there is no message yet.
            NanoEngineError: as `ask`.
        """
        last = next((i for i in reversed(range(len(self.messages))) if self.messages[i]["role"] == "user"), None)
        if last is None:
            raise ChatError("nothing was asked yet")
        self._num_retries += 1
        return self._answer(self.messages[: last + 1])

    def _answer(self, turns: list[dict[str, str]]) -> Generator[AnswerPiece, None, None]:
        return self._pieces(self._fitting(turns), turns)

    def _fitting(self, turns: list[dict[str, str]]) -> ChatAnswer:
        """The answer to as many of the last turns as leave room for it; at least to the last one."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        starts = [i for i, message in enumerate(turns) if message["role"] == "user" and i >= self.num_left_out] or [
            len(turns) - 1
        ]
        most = self.llm.engine.max_model_len
        free = min(most * FREE, self.params.max_tokens or most)
        last = starts[-1]
        params = self.params
        if params.seed is not None:
            params = dataclasses.replace(params, seed=params.seed ^ self._num_retries)  # it keeps within 64 bits
        for start in starts:
            wanted = free if start == self.num_left_out else most * FREED
            try:
                answer = ChatAnswer(self.llm, [*system, *turns[start:]], params, self.adapter)
            except PromptTooLong:
                if start == last:
                    raise
                continue
            if start == last or most - len(answer.request.prompt_token_ids) >= wanted:
                break
        self.num_left_out = start
        return answer

    def _pieces(self, answer: ChatAnswer, turns: list[dict[str, str]]) -> Generator[AnswerPiece, None, None]:
        before, said = self.messages, {"role": "assistant", "content": ""}
        self.messages = [*turns, said]
        try:
            with closing(iter(answer)) as pieces:  # at once: what is no longer read is no longer computed
                for piece in pieces:
                    said["content"] += "" if piece.is_thought else piece.text
                    yield piece
        except NanoEngineError:
            self.messages = before
            raise
        finally:
            self.stats.append(answer.stats)

    def reset(self) -> None:
        """Forget the messages; the system message stays."""
        self.messages, self.num_left_out = [], 0

    def set(self, name: str, value: str) -> None:
        """Change a sampling parameter; "default" gives back what it was at first. Raises ChatError."""
        if name not in SETTINGS:
            raise ChatError(f"{name} cannot be set: {', '.join(SETTINGS)} can")
        parsed: Any = value
        if value == "default":
            parsed = getattr(self._defaults, name)
        elif name != "stop":
            try:
                parsed = None if value == "none" else json.loads(value)
            except ValueError:
                raise ChatError(f"{name} must be a number, not {shown(value)}") from None
        try:
            self.params = dataclasses.replace(self.params, **{name: parsed})
        except InvalidSamplingParams as error:
            raise ChatError(str(error)) from error
