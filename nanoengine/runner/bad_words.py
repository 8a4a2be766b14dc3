"""bad_words: the last token of a word is not sampled where its other tokens stand before it in the output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoengine.engine.messages import Started
from nanoengine.runner.drafts import Drafts, Verified
from nanoengine.runner.row_rules import RowPieces
from nanoengine.runner.stream import Stream, send_array

NO_TOKEN = -1
"""In the history of an output that has not so many tokens."""


class Words(NamedTuple):
    """The bad words of a row: each ends with one token, and has a condition for each token before that."""

    row: int
    last_tokens: np.ndarray  # [num_words]
    word_of: np.ndarray  # [num_conditions]: which word it is a condition of
    back: np.ndarray  # [num_conditions]: 1 is the newest token of the output
    expected: np.ndarray  # [num_conditions]: the token that must stand there


class BadWords:
    """The rule. The device keeps the end of each output, as the host may not have seen it yet.

    Args:
        num_rows: rows are below it.
        stream: of the logits.
    """

    def __init__(self, num_rows: int, stream: Stream):
        self._stream = stream
        # The last tokens of each output, as many as a word can want before its last one; the newest stands last.
        self._history = torch.full((num_rows, 0), NO_TOKEN, dtype=torch.int64, device=stream.torch_device)
        self._pieces = RowPieces[Words](num_rows, stream, _pack)
        self.find = self._pieces.find

    def start(self, started: Sequence[Started]) -> None:
        begun = [row for row in started if row.sampling.bad_words]
        if not begun:
            return
        self._widen(max(len(word) for row in begun for word in row.sampling.bad_words) - 1)
        width = self._history.shape[1]
        if width:
            ends = np.full((len(begun), width), NO_TOKEN, dtype=np.int64)
            for end, row in zip(ends, begun, strict=True):
                last = row.token_ids[max(row.sampling.num_prompt_tokens, len(row.token_ids) - width) :]
                end[width - len(last) :] = last
            places = send_array(np.array([row.row for row in begun], dtype=np.int64), self._stream)
            self._history.index_copy_(0, places, send_array(ends, self._stream))
        for row in begun:
            self._pieces.put(row.row, _words(row.row, row.sampling.bad_words))

    def _widen(self, width: int) -> None:
        """Longer words than any before: the words of other rows look back no further than they did."""
        missing = width - self._history.shape[1]
        if missing > 0:
            self._history = torch.nn.functional.pad(self._history, (missing, 0), value=NO_TOKEN)

    def end(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._pieces.drop(row)

    def apply(self, logits: Tensor, numbers: np.ndarray, rows: np.ndarray, drafts: Drafts | None) -> None:
        places, own, samples, last_tokens, word_of, back, expected, owners = self._pieces.send(numbers, rows)
        ends = self._history.index_select(0, places)
        if drafts is not None:
            ends = drafts.extend(ends, own)
        differ = ends[owners, ends.shape[1] - back] != expected
        num_differing = torch.zeros_like(last_tokens).index_add_(0, word_of, differ.long())
        offsets = torch.where(num_differing > 0, 0.0, -torch.inf)
        logits.index_put_((samples, last_tokens), offsets, accumulate=True)  # words may share their last token

    def observe(self, tokens: Tensor, numbers: np.ndarray, rows: np.ndarray, verified: Verified | None) -> None:
        if not self._history.shape[1]:
            return
        if verified is not None:  # of each row the last sample that is a token; all before it in its run are
            numbers = numbers[np.flatnonzero(np.diff(rows[numbers], prepend=-1))]
        places, samples = self._pieces.send(numbers, rows)[:2]
        ends = self._history.index_select(0, places)
        if verified is not None:
            samples = verified.last.index_select(0, samples)
            ends = verified.drafts.extend(ends, samples)
        sampled = tokens.index_select(0, samples)[:, None]
        self._history.index_copy_(0, places, torch.cat((ends[:, 1:], sampled), dim=1))


def _words(row: int, bad_words: Sequence[Sequence[int]]) -> Words:
    conditions = [
        (word, len(tokens) - 1 - place, token)
        for word, tokens in enumerate(bad_words)
        for place, token in enumerate(tokens[:-1])
    ]
    columns = np.array(conditions, dtype=np.int64).reshape(-1, 3).T
    return Words(row, np.array([tokens[-1] for tokens in bad_words], dtype=np.int64), *columns)


def _pack(numbers: np.ndarray, pieces: list[Words]) -> Sequence[np.ndarray]:
    """Rows and samples; of all words sample and last token; of all conditions word, what must stand where, and of which row."""
    num_words = [len(words.last_tokens) for words in pieces]
    num_conditions = [len(words.word_of) for words in pieces]
    first_words = np.cumsum([0, *num_words[:-1]])
    rows, *fields = zip(*pieces, strict=True)
    columns = [np.concatenate(field) for field in fields]
    columns[1] = columns[1] + np.repeat(first_words, num_conditions)
    owners = np.repeat(np.arange(len(pieces)), num_conditions)
    return np.array(rows, dtype=np.int64), numbers, np.repeat(numbers, num_words), *columns, owners
