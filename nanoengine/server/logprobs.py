"""Log probabilities as clients read them: OpenAI's two shapes, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, TypeVar

from nanoengine.sampling.token_logprobs import TokenLogprobs
from nanoengine.server.text import MOST_PARTS, TokenTexts

E = TypeVar("E")

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(slots=True)
class Progress:
    """How far the stream of one choice has come."""

    num_tokens: int = 0
    num_chars: int = 0  # of the names of its tokens
    last: list[int] = field(default_factory=list)  # tokens that may be parts of the next character

    def advance(self, token_ids: Sequence[int]) -> None:
        self.num_tokens += len(token_ids)
        self.last = [*self.last, *token_ids][-MOST_PARTS:]


class LogprobShapes:
    """Makes them, with the names that a request wants for tokens.

    Args:
        texts: of tokens.
        as_ids: name tokens "token_id:N".
    """

    def __init__(self, texts: TokenTexts, as_ids: bool = False):
        self._texts = texts
        self._as_ids = as_ids

    def name(self, token: int, before: Sequence[int] = ()) -> str:
        return f"token_id:{token}" if self._as_ids else self._texts.after(before, token)

    def completion(
        self,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs | None],
        num_top: int,
        offset: int = 0,
        before: Sequence[int] = (),
    ) -> dict[str, Any]:
        """Of /v1/completions.

        Args:
            token_ids: the tokens.
            entries: one for each; None for one that nothing predicts.
            num_top: likeliest tokens at each position; the one that stands there is always among them.
            offset: characters before the first.
            before: tokens before the first, those that may be parts of its first character.
        """
        steps = _with_context(before, token_ids, entries)
        names = [self.name(token, context) for token, _, context in steps]
        return {
            "text_offset": list(accumulate((len(name) for name in names[:-1]), initial=offset)) if names else [],
            "token_logprobs": [None if entry is None else _finite(entry[t].logprob) for t, entry, _ in steps],
            "tokens": names,
            "top_logprobs": [
                None
                if entry is None
                else {self.name(t, context): _finite(p) for t, p in _ranked(token, entry, num_top + 1)}
                for token, entry, context in steps
            ],
        }

    def chat(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], num_top: int, before: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Of /v1/chat/completions. Arguments as for `completion`, but that num_top counts the token that stands there."""
        return {
            "content": [
                self._chat_entry(token, entry[token].logprob, context)
                | {"top_logprobs": [self._chat_entry(t, p, context) for t, p in _ranked(token, entry, num_top)]}
                for token, entry, context in _with_context(before, token_ids, entries)
            ]
        }

    def _chat_entry(self, token: int, logprob: float, before: Sequence[int]) -> dict[str, Any]:
        text = self._texts.after(before, token)
        return {
            "token": f"token_id:{token}" if self._as_ids else text,
            "logprob": _finite(logprob),
            "bytes": list(text.encode("utf-8", errors="replace")),
        }

    def prompt(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """Of a prompt: a table by token id for each of its tokens, None for the first."""
        return [
            None
            if entry is None
            else {
                str(t): {"logprob": _finite(p), "rank": entry[t].rank, "decoded_token": self._texts[t]}
                for t, p in _ranked(token, entry, len(entry))
            }
            for token, entry in zip(token_ids, entries, strict=True)
        ]


def _with_context(
    before: Sequence[int], token_ids: Sequence[int], entries: Sequence[E]
) -> list[tuple[int, E, Sequence[int]]]:
    """Each token with its entry and the tokens right before it."""
    all_ids = [*before, *token_ids]
    first = len(before)
    return [
        (token, entry, all_ids[max(0, first + i - MOST_PARTS) : first + i])
        for i, (token, entry) in enumerate(zip(token_ids, entries, strict=True))
    ]


def _ranked(token: int, entry: TokenLogprobs, count: int) -> Iterator[tuple[int, float]]:
    """The token that stands there, then the others, the likeliest first; at most so many."""
    order = sorted(entry.items(), key=lambda pair: (pair[0] != token, pair[1].rank))
    return islice(((t, own.logprob) for t, own in order), count)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
