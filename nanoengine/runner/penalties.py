"""Repetition, frequency and presence penalties, from counts that the device keeps: the host may not know the last tokens yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoengine.engine.messages import RowSampling, Started
from nanoengine.runner.drafts import Drafts, Verified
from nanoengine.runner.row_rules import RowPieces, row_slices
from nanoengine.runner.stream import Stream, send_array

LEAST_SLOTS = 8
"""Rows that there is room for when the first one comes; from then on room is doubled."""

IN_PROMPT, IN_OUTPUT = 1, 2
"""A count is 2 for every time that a token is in the output, and 1 more if it is in the prompt."""


class Penalized(NamedTuple):
    """A row with penalties."""

    slot: int  # of the counts
    repetition: float
    frequency: float
    presence: float


class Penalties:
    """The rule. Only rows that want it have counts: they take four bytes for each token of the vocabulary.

    Args:
        num_rows: rows are below it.
        vocab_size: number of logits.
        stream: of the logits.
    """

    def __init__(self, num_rows: int, vocab_size: int, stream: Stream):
        self.vocab_size = vocab_size
        self._stream = stream
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=stream.torch_device)  # a row for each slot
        self._free: list[int] = []
        self._pieces = RowPieces[Penalized](num_rows, stream, _pack)
        self.find = self._pieces.find

    def start(self, started: Sequence[Started]) -> None:
        begun = [row for row in started if _is_penalized(row.sampling)]
        if not begun:
            return
        self._make_room(len(begun))
        slots = self._free[-len(begun) :]
        self._count(slots, begun)
        del self._free[-len(begun) :]
        for slot, row in zip(slots, begun, strict=True):
            params = row.sampling.params
            penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
            self._pieces.put(row.row, Penalized(slot, *penalties))

    def _make_room(self, num_slots: int) -> None:
        have, missing = len(self._counts), num_slots - len(self._free)
        if missing > 0:
            more = max(missing, have, LEAST_SLOTS)
            self._counts = torch.cat((self._counts, self._counts.new_zeros(more, self.vocab_size)))
            self._free += range(have, have + more)

    def _count(self, slots: Sequence[int], begun: Sequence[Started]) -> None:
        """The tokens that are there already."""
        prompts, outputs = [], []
        for slot, row in zip(slots, begun, strict=True):
            cells = np.array(row.token_ids, dtype=np.int64) + slot * self.vocab_size
            prompts.append(cells[: row.sampling.num_prompt_tokens])
            outputs.append(cells[row.sampling.num_prompt_tokens :])
        self._counts.index_fill_(0, send_array(np.array(slots, dtype=np.int64), self._stream), 0)
        self._counts.view(-1).index_fill_(0, send_array(np.concatenate(prompts), self._stream), IN_PROMPT)
        self._add(send_array(np.concatenate(outputs), self._stream))

    def _add(self, cells: Tensor, are_tokens: Tensor | None = None) -> None:
        times = torch.full_like(cells, IN_OUTPUT, dtype=torch.int32)
        self._counts.view(-1).index_add_(0, cells, times if are_tokens is None else times * are_tokens)

    def end(self, rows: Iterable[int]) -> None:
        for row in rows:
            if row in self._pieces:
                slot = self._pieces[row].slot
                self._pieces.drop(row)
                self._free.append(slot)

    def apply(self, logits: Tensor, numbers: np.ndarray, rows: np.ndarray, drafts: Drafts | None) -> None:
        samples, slots, penalties = self._pieces.send(numbers, rows)
        for part in row_slices(len(numbers)):
            repetition, frequency, presence = penalties[part].unsqueeze(-1).unbind(1)
            counts = self._counts.index_select(0, slots[part])
            if drafts is not None:
                tokens, stand_before = drafts.before(samples[part])
                counts.scatter_add_(1, tokens.clamp(min=0), stand_before.to(counts.dtype) * IN_OUTPUT)
            x = logits.index_select(0, samples[part])
            # Arithmetic, and no choices between two results: on a CPU those take many times as long.
            seen, times = counts.clamp(max=1).float(), (counts >> 1).float()
            penalty = seen * repetition + (1 - seen)
            x = x.clamp(min=0) / penalty + x.clamp(max=0) * penalty
            x -= frequency * times
            x -= presence * times.clamp(max=1)
            logits.index_copy_(0, samples[part], x)

    def observe(self, tokens: Tensor, numbers: np.ndarray, rows: np.ndarray, verified: Verified | None) -> None:
        samples, slots, _ = self._pieces.send(numbers, rows)
        # A row without a token ends: what is counted in its place no longer matters.
        cells = slots * self.vocab_size + tokens.index_select(0, samples).clamp(min=0)
        self._add(cells, None if verified is None else verified.is_token.index_select(0, samples))


def _is_penalized(sampling: RowSampling) -> bool:
    params = sampling.params
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def _pack(numbers: np.ndarray, pieces: list[Penalized]) -> Sequence[np.ndarray]:
    """Sample, slot and penalties of each row."""
    slots = np.array([piece.slot for piece in pieces], dtype=np.int64)
    return numbers, slots, np.array([piece[1:] for piece in pieces], dtype=np.float32)
