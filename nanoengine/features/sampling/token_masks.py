"""Masks of the tokens that may be sampled: allowed_token_ids, and the masks of grammars.

A mask has a bit for each token of the vocabulary in the order of their ids, in little-endian words of 32 bits, as those of
xgrammar and llguidance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.device import Device
from nanoengine.core.messages import Started
from nanoengine.features.sampling.row_processor import RowProcessor, row_slices, with_params

OFFSETS = np.where((np.arange(256)[:, None] >> np.arange(8)) & 1, np.float32(0), np.float32(-np.inf))
"""[256, 8] float32: for each value of a byte, 0 where a bit is set and -inf elsewhere. It is added, so that NaN stays NaN."""


def apply_masks(logits: Tensor, samples: Tensor, masks: Tensor) -> None:
    """Set the logits of tokens whose bits are not set in a mask to -inf.

    Args:
        logits: [n, vocab_size] float32, changed.
        samples: [m] int32 or int64: indices of the rows of logits.
        masks: [m, words] int32.
    """
    if logits.is_cpu:  # torch would wake its threads beside those of the kernels, and wait for them
        rows = logits.numpy()
        with np.errstate(invalid="ignore"):  # inf becomes NaN
            for sample, mask in zip(samples.tolist(), masks.numpy().view(np.uint8), strict=True):
                rows[sample] += OFFSETS.take(mask, axis=0).reshape(-1)[: logits.shape[1]]
        return
    table = torch.from_numpy(OFFSETS).to(logits)
    for part in row_slices(len(samples)):
        of_bytes = table.index_select(0, masks[part].view(torch.uint8).flatten().int())
        logits.index_add_(0, samples[part], of_bytes.view(len(masks[part]), -1)[:, : logits.shape[1]])


class TokenMasks(RowProcessor[np.ndarray]):
    """The masks of `allowed_token_ids`, [words] int32 for each row that has them."""

    def __init__(self, num_rows: int, vocab_size: int, device: Device):
        super().__init__(num_rows, device)
        self.words = -(-vocab_size // 32)

    def start(self, started: Sequence[Started]) -> None:
        for start, params in with_params(started):
            if params.allowed_token_ids is not None:
                bits = np.zeros(32 * self.words, dtype=bool)
                bits[list(params.allowed_token_ids)] = True
                self.put(start.row, np.packbits(bits, bitorder="little").view(np.int32))

    def pack(self, numbers: np.ndarray, pieces: list[np.ndarray]) -> Sequence[np.ndarray]:
        """The sample [n] and the mask [n, words] of each row."""
        return numbers, np.stack(pieces)

    def apply(self, logits: Tensor, numbers: np.ndarray, rows: np.ndarray, drafts: Any) -> None:
        apply_masks(logits, *self.send(numbers, rows))
