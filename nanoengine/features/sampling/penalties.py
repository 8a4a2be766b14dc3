"""Repetition, frequency and presence penalties, from counts on the device: the host may not know the last tokens yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.device import Device
from nanoengine.core.messages import Started
from nanoengine.features.sampling.row_processor import RowProcessor, row_slices, with_params

if TYPE_CHECKING:
    from nanoengine.features.speculation.verification import Drafts, Verified

IN_PROMPT, IN_OUTPUT = 1, 2
"""The count of a token is 2 for each occurrence in the output, plus 1 if it is in the prompt."""


class Penalized(NamedTuple):
    """The penalties of a row."""

    row: int
    repetition: float
    frequency: float
    presence: float


class Penalties(RowProcessor[Penalized]):
    """The three penalties. Counts take four bytes for each row and token of the vocabulary, allocated with the first penalty.
    They never grow: memory for old and new counts at once would be more than in the measured largest steps.
    """

    forbids = False

    def __init__(self, num_rows: int, vocab_size: int, device: Device):
        super().__init__(num_rows, device)
        self.shape = num_rows, vocab_size
        self._counts: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        """[num_rows, vocab_size] int32; only those of rows with penalties were ever written."""
        if self._counts is None:
            self._counts = torch.empty(self.shape, dtype=torch.int32, device=self.device.torch_device)
        return self._counts

    def start(self, started: Sequence[Started]) -> None:
        begun = [(start, params) for start, params in with_params(started) if params.is_penalized]
        if not begun:
            return
        prompts, outputs = [], []  # cells of known tokens
        for start, params in begun:
            cells = np.array(start.token_ids, dtype=np.int64) + start.row * self.shape[1]
            prompts.append(cells[: start.sampling.num_prompt_tokens])
            outputs.append(cells[start.sampling.num_prompt_tokens :])
            penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
            self.put(start.row, Penalized(start.row, *penalties))
        send = self.device.send
        self.counts.index_fill_(0, send(np.array([start.row for start, _ in begun], dtype=np.int64)), 0)
        self.counts.view(-1).index_fill_(0, send(np.concatenate(prompts)), IN_PROMPT)
        self._add(send(np.concatenate(outputs)))

    def _add(self, cells: Tensor, are_tokens: Tensor | None = None) -> None:
        times = torch.full_like(cells, IN_OUTPUT, dtype=torch.int32)
        self.counts.view(-1).index_add_(0, cells, times if are_tokens is None else times * are_tokens)

    def pack(self, numbers: np.ndarray, pieces: list[Penalized]) -> Sequence[np.ndarray]:
        """For each row: its sample [n], its number [n] and its penalties [n, 3]."""
        rows = np.array([piece.row for piece in pieces], dtype=np.int64)
        return numbers, rows, np.array([piece[1:] for piece in pieces], dtype=np.float32)

    def apply(self, logits: Tensor, numbers: np.ndarray, rows: np.ndarray, drafts: Drafts | None) -> None:
        samples, of_rows, penalties = self.send(numbers, rows)
        for part in row_slices(len(numbers)):
            repetition, frequency, presence = penalties[part].unsqueeze(-1).unbind(1)
            counts = self.counts.index_select(0, of_rows[part])
            if drafts is not None:
                tokens, are_before = drafts.before(samples[part])
                counts.scatter_add_(1, tokens.clamp(min=0), are_before.to(counts.dtype) * IN_OUTPUT)
            x = logits.index_select(0, samples[part])
            # Arithmetic instead of `torch.where`, which takes many times as long on a CPU.
            seen, times = counts.clamp(max=1).float(), (counts >> 1).float()
            penalty = seen * repetition + (1 - seen)
            x = x.clamp(min=0) / penalty + x.clamp(max=0) * penalty
            x -= frequency * times
            x -= presence * times.clamp(max=1)
            logits.index_copy_(0, samples[part], x)

    def observe(
        self, logits: Tensor, tokens: Tensor, numbers: np.ndarray, rows: np.ndarray, verified: Verified | None
    ) -> None:
        samples, of_rows, _ = self.send(numbers, rows)
        # A row without a token ends: its counts no longer matter.
        cells = of_rows * self.shape[1] + tokens.index_select(0, samples).clamp(min=0)
        self._add(cells, None if verified is None else verified.is_token.index_select(0, samples))
