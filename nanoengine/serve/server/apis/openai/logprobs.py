"""Log probabilities as clients read them: OpenAI's two shapes, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice
from typing import Any, Generic, NamedTuple, TypeVar

from nanoengine.core.detokenizer import Detokenizer
from nanoengine.core.outputs import CompletionOutput
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.features.sampling.stop_detokenizer import StopDetokenizer
from nanoengine.features.sampling.token_logprobs import TokenLogprobs
from nanoengine.models.tokenizer import ModelTokenizer
from nanoengine.serve.aio.request_stream import Delta
from nanoengine.serve.server.token_texts import MOST_PARTS, TokenTexts

E = TypeVar("E")

LEAST = -9999.0
"""The log probability that stands for minus infinity, which JSON does not have."""


@dataclass(slots=True)
class Progress:
    """The part of one choice that was streamed."""

    num_tokens: int = 0
    num_chars: int = 0  # of the texts of its tokens
    last: list[int] = field(default_factory=list)  # its last tokens: they may be the beginning of the next character
    text: Detokenizer | None = None  # its pieces are the texts of the tokens
    num_beyond: int = 0  # characters of these texts that the choice does not have: a stop string may cut them off

    def names(
        self,
        tokenizer: ModelTokenizer,
        params: SamplingParams,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        delta: Delta | CompletionOutput,
    ) -> list[str]:
        """The text that each of the next tokens adds to this choice: of the last ones, up to the stop string that ended it."""
        if self.text is None:
            decode = partial(tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
            self.text = StopDetokenizer(decode, prompt=prompt, include_stop=params.include_stop_str_in_output)
            self.last = list(prompt[-MOST_PARTS:])
        is_cut, reason = isinstance(delta.stop_reason, str), delta.finish_reason
        names = names_of(self.text, token_ids, reason is not None, reason == "stop" and not is_cut)
        self.num_beyond += sum(map(len, names)) - len(delta.text)
        for i in reversed(range(len(names) if is_cut else 0)):
            num_left = len(names[i]) - self.num_beyond
            self.num_beyond, names[i] = max(-num_left, 0), names[i][: max(num_left, 0)]
        return names

    def advance(self, token_ids: Sequence[int]) -> None:
        self.num_tokens += len(token_ids)
        self.last = [*self.last, *token_ids][-MOST_PARTS:]


def names_of(text: Detokenizer, token_ids: Sequence[int], is_last: bool, is_stopped: bool = False) -> list[str]:
    """The text that each of the next tokens adds: nothing while a character is incomplete, then the whole character. The texts
    of all tokens, joined, are the whole text.

    Args:
        text: of the tokens before; it is continued.
        token_ids: the next tokens.
        is_last: no more tokens will come.
        is_stopped: the last of them is the one that ended the completion.
    """
    names: list[str] = []
    start = len(text.text)
    for i, token in enumerate(token_ids, 1):
        text.push(token, is_stop=is_stopped and i == len(token_ids))
        names.append(text.text_from(start))
        start += len(names[-1])
    if is_last and names:
        text.finish()
        names[-1] += text.text_from(start)
    return names


class TokenPosition(NamedTuple, Generic[E]):
    """A token in a text."""

    token: int
    name: str  # the text that it adds
    entry: E
    before: Sequence[int]  # the tokens right before it


class LogprobShapes:
    """Makes the JSON of log probabilities.

    Args:
        texts: of tokens.
        as_ids: tokens are named "token_id:N", and not by their texts.
    """

    def __init__(self, texts: TokenTexts, as_ids: bool = False):
        self._texts = texts
        self._as_ids = as_ids

    def completion(
        self,
        token_ids: Sequence[int],
        names: Sequence[str],
        entries: Sequence[TokenLogprobs | None],
        num_top: int,
        offset: int = 0,
        before: Sequence[int] = (),
    ) -> dict[str, Any]:
        """The field `logprobs` of /v1/completions.

        Args:
            token_ids: the tokens.
            names: the text that each adds.
            entries: log probabilities at each position; None: there are none, as of the first token of a prompt.
            num_top: the number of likeliest tokens at each position, beside the token itself.
            offset: characters before the first.
            before: tokens before the first, those that may be parts of its first character.
        """
        positions = _token_positions(token_ids, names, entries, before)
        return {
            "text_offset": list(accumulate(map(len, names[:-1]), initial=offset)) if names else [],
            "token_logprobs": [
                None if each.entry is None else _finite(each.entry[each.token].logprob) for each in positions
            ],
            "tokens": [self._shown(each.token, each.name) for each in positions],
            "top_logprobs": [
                None if each.entry is None else self._table(self._top(each, each.entry, num_top + 1))
                for each in positions
            ],
        }

    def chat(
        self,
        token_ids: Sequence[int],
        names: Sequence[str],
        entries: Sequence[TokenLogprobs],
        num_top: int,
        before: Sequence[int] = (),
    ) -> dict[str, Any]:
        """The field `logprobs` of /v1/chat/completions. Arguments as for `completion`, but `num_top` counts the token itself."""
        return {
            "content": [
                self._chat_entry(each.token, each.name, each.entry[each.token].logprob)
                | {"top_logprobs": [self._chat_entry(*top) for top in self._top(each, each.entry, num_top)]}
                for each in _token_positions(token_ids, names, entries, before)
            ]
        }

    def _top(self, position: TokenPosition[Any], entry: TokenLogprobs, count: int) -> Iterator[tuple[int, str, float]]:
        """The token of a position and the likeliest others, each with its text and its log probability. Here a token that adds no
        text, such as the end of a text, has the text of its vocabulary entry.
        """
        for token, logprob in _ranked(position.token, entry, count):
            name = position.name if token == position.token else ""
            yield token, name or self._texts.after(position.before, token), logprob

    def _table(self, top: Iterable[tuple[int, str, float]]) -> dict[str, float]:
        table: dict[str, float] = {}
        for token, name, logprob in top:
            table.setdefault(self._shown(token, name), _finite(logprob))  # of tokens with equal texts, the likeliest
        return table

    def _shown(self, token: int, name: str) -> str:
        return f"token_id:{token}" if self._as_ids else name

    def _chat_entry(self, token: int, name: str, logprob: float) -> dict[str, Any]:
        return {
            "token": self._shown(token, name),
            "logprob": _finite(logprob),
            "bytes": list(name.encode("utf-8", errors="replace")),
        }

    def prompt(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> Iterator[dict[str, Any] | None]:
        """The field `prompt_logprobs`: for each token of the prompt a table by token id; None for the first token."""
        for token, _, entry, before in _token_positions(token_ids, [""] * len(token_ids), entries):
            if entry is None:
                yield None
                continue
            yield {
                str(t): {"logprob": _finite(p), "rank": entry[t].rank, "decoded_token": self._texts.after(before, t)}
                for t, p in _ranked(token, entry, len(entry))
            }


def _token_positions(
    token_ids: Sequence[int], names: Sequence[str], entries: Sequence[E], before: Sequence[int] = ()
) -> list[TokenPosition[E]]:
    all_ids = [*before, *token_ids]
    contexts = [all_ids[max(0, i - MOST_PARTS) : i] for i in range(len(before), len(all_ids))]
    return [TokenPosition(*fields) for fields in zip(token_ids, names, entries, contexts, strict=True)]


def _ranked(token: int, entry: TokenLogprobs, count: int) -> Iterator[tuple[int, float]]:
    """The token itself, then the others, the likeliest first; `count` of them at most."""
    order = sorted(entry.items(), key=lambda pair: (pair[0] != token, pair[1].rank))
    return islice(((t, logprob.logprob) for t, logprob in order), count)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
