"""Embedding of token ids, and the head that turns hidden states into logits; the two may share one weight."""

from __future__ import annotations

from torch import Tensor

from nanoengine.kernels.interface import Destination
from nanoengine.layers.factory import Factory


class Embedding:
    """Rows of [vocab_size, hidden_size], by token id."""

    def __init__(self, factory: Factory, vocab_size: int, hidden_size: int):
        self.kernels = factory.kernels
        self.weight = factory.weight(vocab_size, hidden_size)

    def __call__(self, token_ids: Tensor) -> Tensor:  # [num_tokens] -> [num_tokens, hidden_size]
        return self.kernels.embed(token_ids, self.weight)

    def rows(self) -> Destination:
        """All rows, to be filled from a checkpoint."""
        return self.weight.rows(0, self.weight.shape[0])


class LMHead:
    """Hidden states to logits in float32. With `tied`, its weight is that of the embedding."""

    def __init__(self, factory: Factory, embedding: Embedding, *, tied: bool):
        self.kernels = factory.kernels
        self.weight = embedding.weight if tied else factory.weight(*embedding.weight.shape)

    def __call__(self, hidden: Tensor) -> Tensor:  # [num_tokens, hidden_size] -> [num_tokens, vocab_size]
        return self.kernels.logits(hidden, self.weight)

    def rows(self) -> Destination:
        """All rows, to be filled from a checkpoint."""
        return self.weight.rows(0, self.weight.shape[0])
