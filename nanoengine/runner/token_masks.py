"""Which tokens may be sampled at all: allowed_token_ids, and masks that come with a step, such as those of a grammar.

A mask is a bit for each token of the vocabulary in the order of their ids, in little-endian words of 32 bits, as xgrammar and
llguidance write them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoengine.engine.messages import Started
from nanoengine.runner.drafts import Drafts, Verified
from nanoengine.runner.row_rules import RowPieces, row_slices
from nanoengine.runner.stream import Stream


class Masks(NamedTuple):
    """Of one row; a token must be in both."""

    of_request: np.ndarray | None  # [num_bytes] uint8
    of_step: np.ndarray | None

    def both(self) -> np.ndarray:
        masks = [mask for mask in self if mask is not None]
        return np.bitwise_and.reduce(masks)


class TokenMasks:
    """The rule that leaves -inf of what a mask does not hold.

    Args:
        num_rows: rows are below it.
        vocab_size: number of logits.
        stream: of the logits.
    """

    def __init__(self, num_rows: int, vocab_size: int, stream: Stream):
        self.vocab_size = vocab_size
        self.num_bytes = -(-vocab_size // 32) * 4
        self._shifts = torch.arange(8, dtype=torch.uint8, device=stream.torch_device)
        self._pieces = RowPieces[Masks](num_rows, stream, _pack)
        self.find = self._pieces.find

    def start(self, started: Sequence[Started]) -> None:
        for row in started:
            allowed = row.sampling.params.allowed_token_ids
            if allowed is not None:
                bits = np.zeros(8 * self.num_bytes, dtype=bool)
                bits[list(allowed)] = True
                self._pieces.put(row.row, Masks(np.packbits(bits, bitorder="little"), None))

    def set(self, masks: Sequence[tuple[int, bytes | None]]) -> None:
        """Masks of rows; each holds until the next one, or until its row begins anew. None: no mask."""
        for row, words in masks:
            of_request = self._pieces[row].of_request if row in self._pieces else None
            self._pieces.drop(row)
            of_step = None if words is None else np.frombuffer(words, dtype=np.uint8)
            assert of_step is None or len(of_step) == self.num_bytes, f"a mask has {self.num_bytes} bytes"
            if of_request is not None or of_step is not None:
                self._pieces.put(row, Masks(of_request, of_step))

    def end(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._pieces.drop(row)

    def apply(self, logits: Tensor, numbers: np.ndarray, rows: np.ndarray, drafts: Drafts | None) -> None:
        samples, masks = self._pieces.send(numbers, rows)
        for part in row_slices(len(numbers)):
            bits = (masks[part].view(torch.uint8)[:, :, None] >> self._shifts) & 1
            allowed = bits.flatten(1)[:, : self.vocab_size].to(logits.dtype)
            # 0 or -inf, and added: NaN stays what it is. On a CPU a choice between two values would take many times as long.
            logits.index_add_(0, samples[part], 1 - 1 / allowed)

    def observe(self, tokens: Tensor, numbers: np.ndarray, rows: np.ndarray, verified: Verified | None) -> None:
        """Whoever makes masks knows the tokens."""


def _pack(numbers: np.ndarray, pieces: list[Masks]) -> Sequence[np.ndarray]:
    """Sample and mask of each row, in words."""
    return numbers, np.stack([piece.both() for piece in pieces]).view(np.int32)
