"""bad_words: the last token of a word is not sampled where its other tokens stand before it in the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.device import Device
from nanoengine.core.messages import Started
from nanoengine.sampling.drafted import Drafts, Verified
from nanoengine.sampling.row_processor import RowProcessor, asking

NO_TOKEN = -1
"""In the history of an output that has not so many tokens."""


class Words(NamedTuple):
    """The bad words of a row: each ends with one token, and has a condition for each token before that."""

    row: int
    last_tokens: np.ndarray  # [num_words]
    word_of: np.ndarray  # [num_conditions]: which word it is a condition of
    back: np.ndarray  # [num_conditions]: 1 is the newest token of the output
    expected: np.ndarray  # [num_conditions]: the token that must stand there

    @classmethod
    def of(cls, row: int, words: Sequence[Sequence[int]]) -> Words:
        conditions = [
            (word, len(tokens) - 1 - place, token)
            for word, tokens in enumerate(words)
            for place, token in enumerate(tokens[:-1])
        ]
        columns = np.array(conditions, dtype=np.int64).reshape(-1, 3).T
        return cls(row, np.array([tokens[-1] for tokens in words], dtype=np.int64), *columns)


class BadWords(RowProcessor[Words]):
    """The device keeps the end of each output, as the host may not have seen it yet."""

    def __init__(self, num_rows: int, device: Device):
        super().__init__(num_rows, device)
        # The last tokens of each output, as many as a word can want before its last one; the newest stands last.
        self._history = torch.full((num_rows, 0), NO_TOKEN, dtype=torch.int64, device=device.torch_device)

    def start(self, started: Sequence[Started]) -> None:
        begun = [(start, params.bad_word_tokens) for start, params in asking(started) if params.bad_word_tokens]
        if not begun:
            return
        missing = max(len(word) for _, words in begun for word in words) - 1 - self._history.shape[1]
        if missing > 0:  # longer words than any before: those of other rows look back no further than they did
            self._history = torch.nn.functional.pad(self._history, (missing, 0), value=NO_TOKEN)
        width = self._history.shape[1]
        if width:
            ends = np.full((len(begun), width), NO_TOKEN, dtype=np.int64)
            for end, (start, _) in zip(ends, begun, strict=True):
                last = start.token_ids[max(start.sampling.num_prompt_tokens, len(start.token_ids) - width) :]
                end[width - len(last) :] = last
            places = self.device.send(np.array([start.row for start, _ in begun], dtype=np.int64))
            self._history.index_copy_(0, places, self.device.send(ends))
        for start, words in begun:
            self.put(start.row, Words.of(start.row, words))

    def pack(self, numbers: np.ndarray, pieces: list[Words]) -> Sequence[np.ndarray]:
        """Rows and samples; of all words sample and last token; of all conditions word, what must stand where, of which row."""
        num_words = [len(words.last_tokens) for words in pieces]
        num_conditions = [len(words.word_of) for words in pieces]
        first_words = np.cumsum([0, *num_words[:-1]])
        rows, *fields = zip(*pieces, strict=True)
        columns = [np.concatenate(field) for field in fields]
        columns[1] = columns[1] + np.repeat(first_words, num_conditions)
        owners = np.repeat(np.arange(len(pieces)), num_conditions)
        return np.array(rows, dtype=np.int64), numbers, np.repeat(numbers, num_words), *columns, owners

    def apply(self, logits: Tensor, numbers: np.ndarray, rows: np.ndarray, drafts: Drafts | None) -> None:
        places, own, samples, last_tokens, word_of, back, expected, owners = self.send(numbers, rows)
        ends = self._history.index_select(0, places)
        if drafts is not None:
            ends = drafts.extend(ends, own)
        differ = ends[owners, ends.shape[1] - back] != expected
        num_differing = torch.zeros_like(last_tokens).index_add_(0, word_of, differ.long())
        offsets = torch.where(num_differing > 0, 0.0, -torch.inf).to(logits.dtype)
        logits.index_put_((samples, last_tokens), offsets, accumulate=True)  # words may share their last token

    def observe(
        self, logits: Tensor, tokens: Tensor, numbers: np.ndarray, rows: np.ndarray, verified: Verified | None
    ) -> None:
        if not self._history.shape[1]:
            return
        if verified is not None:  # of each row the last sample that is a token; all before it in its run are
            numbers = numbers[np.flatnonzero(np.diff(rows[numbers], prepend=-1))]
        places, samples = self.send(numbers, rows)[:2]
        ends = self._history.index_select(0, places)
        if verified is not None:
            samples = verified.last.index_select(0, samples)
            ends = verified.drafts.extend(ends, samples)
        sampled = tokens.index_select(0, samples)[:, None]
        self._history.index_copy_(0, places, torch.cat((ends[:, 1:], sampled), dim=1))
