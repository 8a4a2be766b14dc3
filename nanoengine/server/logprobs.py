"""Log probabilities as clients read them: OpenAI's two shapes, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from nanoengine.outputs import TokenLogprobs
from nanoengine.server.text import TokenTexts

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class LogprobShapes:
    """Makes them, with the names that a request wants for tokens.

    Args:
        texts: of tokens.
        as_ids: name tokens "token_id:N".
    """

    def __init__(self, texts: TokenTexts, as_ids: bool = False):
        self._texts = texts
        self._as_ids = as_ids

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._texts[token]

    def completion(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], num_top: int, offset: int = 0
    ) -> dict[str, Any]:
        """Of /v1/completions.

        Args:
            token_ids: the tokens.
            entries: one for each; None for one that nothing predicts.
            num_top: likeliest tokens at each position; the one that stands there is always among them.
            offset: characters before the first.
        """
        names = [self.name(token) for token in token_ids]
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        return {
            "text_offset": offsets,
            "token_logprobs": [
                None if entry is None else _finite(entry[token].logprob)
                for token, entry in zip(token_ids, entries, strict=True)
            ],
            "tokens": names,
            "top_logprobs": [
                None if entry is None else {self.name(t): _finite(p) for t, p in _ranked(token, entry, num_top + 1)}
                for token, entry in zip(token_ids, entries, strict=True)
            ],
        }

    def chat(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
        """Of /v1/chat/completions."""
        return {
            "content": [
                self._chat_entry(token, entry[token].logprob)
                | {"top_logprobs": [self._chat_entry(t, p) for t, p in _ranked(token, entry, num_top)]}
                for token, entry in zip(token_ids, entries, strict=True)
            ]
        }

    def _chat_entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.name(token),
            "logprob": _finite(logprob),
            "bytes": list(self._texts[token].encode("utf-8", errors="replace")),
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


def _ranked(token: int, entry: TokenLogprobs, count: int) -> Iterator[tuple[int, float]]:
    """The token that stands there, then the others, the likeliest first; at most so many."""
    order = sorted(entry, key=lambda t: (t != token, entry[t].rank))
    return islice(((t, entry[t].logprob) for t in order), count)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
