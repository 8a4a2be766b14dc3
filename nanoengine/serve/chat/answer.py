"""ChatAnswer: the next turn of a conversation in pieces, and its statistics."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

from nanoengine.builder import is_installed
from nanoengine.llm import LLM


class AnswerPiece(NamedTuple):
    """Text, which may be a thought that comes before the answer itself."""

    text: str
    is_thought: bool = False


@dataclass(frozen=True, slots=True)
class Stats:
    """Numbers of tokens and seconds of an answer. `reason`: its finish reason; "abort" if the user stopped it."""

    num_prompt: int
    num_cached: int
    num_tokens: int
    first: float | None
    seconds: float
    reason: str | None

    @property
    def rate(self) -> float | None:
        """Tokens per second, after the first."""
        if self.first is None or self.num_tokens < 2 or self.seconds <= self.first:
            return None
        return (self.num_tokens - 1) / (self.seconds - self.first)

    def __str__(self) -> str:
        parts = [] if self.rate is None else [f"{self.rate:.0f} tok/s"]
        if self.first is not None:
            parts.append(f"{1000 * self.first:.0f} ms to the first token")
        parts.append(f"{self.num_cached} of {self.num_prompt} prompt tokens were cached")
        if self.reason == "length":
            parts.append("cut off: max_tokens, or the model's length, was reached")
        return ", ".join(parts)


class ChatAnswer:
    """Iterate over it once. Closing the iterator, or Ctrl-C, ends the answer.

    Raises:
        InvalidPrompt, InvalidSamplingParams: the conversation is too long, or the parameters do not suit the model.
    """

    def __init__(self, llm: LLM, messages: Sequence[Mapping[str, Any]], params: Any, adapter: Any = None):
        self.llm = llm
        self.parser = None
        if is_installed("tool_calls"):  # it parses thoughts
            prompt = llm.chats.prompt(messages)
            params = prompt.params(params)
            self.parser = prompt.parser()
            token_ids = llm.tokenizer.encode(prompt.text, add_special_tokens=False)
        else:
            token_ids = llm.tokenizer.encode_chat(messages)
        [self.request] = llm.make_requests(token_ids, params)
        llm.adapt([self.request], adapter)
        self._first: float | None = None
        self._seconds = 0.0

    def __iter__(self) -> Generator[AnswerPiece, None, None]:
        start = perf_counter()
        try:
            with closing(self.llm.stream_request(self.request)) as texts:
                for text in texts:
                    self._first = perf_counter() - start if self._first is None else self._first
                    yield from self._pieces(text)
            if self.parser is not None:
                yield from self._read(self.parser.finish())
        finally:
            self._seconds = perf_counter() - start

    def _pieces(self, text: str) -> Iterator[AnswerPiece]:
        if self.parser is None:
            yield AnswerPiece(text)
        else:
            yield from self._read(self.parser.push(text))

    def _read(self, events: Sequence[Any]) -> Iterator[AnswerPiece]:
        from nanoengine.features.tool_calls.answer_parser import Reasoning

        for event in events:  # without tools there are no calls
            if event.text:
                yield AnswerPiece(event.text, isinstance(event, Reasoning))

    @property
    def stats(self) -> Stats:
        output = self.request.output()
        first = getattr(output.metrics, "ttft", None)  # the engine's, where somebody observes it
        completion = output.outputs[0]
        return Stats(
            len(output.prompt_token_ids),
            output.num_cached_tokens,
            len(completion.token_ids),
            self._first if first is None else first,
            self._seconds,
            completion.finish_reason,
        )
