"""Embedding and head: rows by id, products with rows."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.layers.embedding import Embedding, LMHead
from nanoengine.layers.factory import Factory


def filled(factory: Factory, vocab_size: int = 7, hidden_size: int = 4) -> tuple[Embedding, Tensor]:
    """An embedding, and the weight that it was filled with."""
    embedding, weight = Embedding(factory, vocab_size, hidden_size), torch.randn(vocab_size, hidden_size)
    embedding.rows().copy_(weight)
    return embedding, weight


def test_token_ids_pick_rows(factory: Factory) -> None:
    embedding, weight = filled(factory)
    out = embedding(torch.tensor([3, 0, 6, 3]))
    assert torch.equal(out, torch.stack([weight[i] for i in (3, 0, 6, 3)]))


def test_a_tied_head_multiplies_with_the_embedding(factory: Factory) -> None:
    embedding, weight = filled(factory)
    head, hidden = LMHead(factory, embedding, tied=True), torch.randn(3, 4)
    torch.testing.assert_close(head(hidden).double(), hidden.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    embedding.rows().copy_(torch.zeros(7, 4))
    assert not head(hidden).any()


def test_an_untied_head_has_a_weight_of_its_own(factory: Factory) -> None:
    embedding, _ = filled(factory)
    head = LMHead(factory, embedding, tied=False)
    assert head.rows().shape == embedding.rows().shape
    weight, hidden = torch.randn(7, 4), torch.randn(3, 4)
    head.rows().copy_(weight)
    embedding.rows().copy_(torch.zeros(7, 4))
    torch.testing.assert_close(head(hidden).double(), hidden.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
