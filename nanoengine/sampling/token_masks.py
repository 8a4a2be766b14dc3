"""Which tokens may be sampled at all: allowed_token_ids, and masks that come with a step, such as those of a grammar.

A mask is a bit for each token of the vocabulary in the order of their ids, in little-endian words of 32 bits, as xgrammar and
llguidance write them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.device import Device
from nanoengine.core.messages import Started
from nanoengine.sampling.masks import mask_bytes
from nanoengine.sampling.row_processor import RowProcessor, asking, row_slices


class Masks(NamedTuple):
    """Of one row; a token must be in both."""

    of_request: np.ndarray | None  # [num_bytes] uint8
    of_step: np.ndarray | None

    def both(self) -> np.ndarray:
        return np.bitwise_and.reduce([mask for mask in self if mask is not None])


class TokenMasks(RowProcessor[Masks]):
    """Leaves -inf of the logits that a mask does not hold."""

    def __init__(self, num_rows: int, vocab_size: int, device: Device):
        super().__init__(num_rows, device)
        self.vocab_size = vocab_size
        self._shifts = torch.arange(8, dtype=torch.uint8, device=device.torch_device)

    def start(self, started: Sequence[Started]) -> None:
        for start, params in asking(started):
            if params.allowed_token_ids is not None:
                bits = np.zeros(8 * mask_bytes(self.vocab_size), dtype=bool)
                bits[list(params.allowed_token_ids)] = True
                self.put(start.row, Masks(np.packbits(bits, bitorder="little"), None))

    def set(self, masks: Sequence[tuple[int, bytes | None]]) -> None:
        """Masks of rows; each holds until the next one, or until its row begins anew. None: no mask."""
        for row, words in masks:
            of_request = self.pieces[row].of_request if row in self.pieces else None
            of_step = None if words is None else np.frombuffer(words, dtype=np.uint8)
            self.end([row])
            if of_request is not None or of_step is not None:
                self.put(row, Masks(of_request, of_step))

    def pack(self, numbers: np.ndarray, pieces: list[Masks]) -> Sequence[np.ndarray]:
        """Sample and mask of each row, in words."""
        return numbers, np.stack([piece.both() for piece in pieces]).view(np.int32)

    def apply(self, logits: Tensor, numbers: np.ndarray, rows: np.ndarray, drafts: Any) -> None:
        samples, masks = self.send(numbers, rows)
        for part in row_slices(len(numbers)):
            bits = (masks[part].view(torch.uint8)[:, :, None] >> self._shifts) & 1
            allowed = bits.flatten(1)[:, : self.vocab_size].to(logits.dtype)
            # 0 or -inf, and added: NaN stays what it is. On a CPU a choice between two values would take many times as long.
            logits.index_add_(0, samples[part], 1 - 1 / allowed)
