"""Embedding of token ids, and the head that turns hidden states into logits; the two may share one weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """Rows of [vocab_size, hidden_size], by token id."""

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:  # [num_tokens] -> [num_tokens, hidden_size]
        return F.embedding(token_ids, self.weight)


class LMHead(nn.Module):
    """Hidden states to logits. With `tied`, its weight is that of the embedding."""

    def __init__(self, embedding: Embedding, *, tied: bool):
        super().__init__()
        self.weight = (
            embedding.weight if tied else nn.Parameter(torch.empty_like(embedding.weight), requires_grad=False)
        )

    def forward(self, hidden: Tensor) -> Tensor:  # [num_tokens, hidden_size] -> [num_tokens, vocab_size]
        return F.linear(hidden, self.weight)
