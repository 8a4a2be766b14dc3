"""Embedding and head: rows by id, products with rows."""

from __future__ import annotations

import torch

from nanoengine.layers.embedding import Embedding, LMHead


def filled(vocab_size: int = 7, hidden_size: int = 4) -> Embedding:
    embedding = Embedding(vocab_size, hidden_size)
    embedding.weight.normal_()
    return embedding


def test_token_ids_pick_rows() -> None:
    embedding = filled()
    out = embedding(torch.tensor([3, 0, 6, 3]))
    assert torch.equal(out, torch.stack([embedding.weight[i] for i in (3, 0, 6, 3)]))


def test_a_tied_head_multiplies_with_the_embedding() -> None:
    embedding = filled()
    head = LMHead(embedding, tied=True)
    hidden = torch.randn(3, 4)
    torch.testing.assert_close(
        head(hidden).double(), hidden.double() @ embedding.weight.double().T, rtol=1e-5, atol=1e-5
    )
    embedding.weight.zero_()
    assert not head(hidden).any()


def test_an_untied_head_has_a_weight_of_its_own() -> None:
    embedding = filled()
    head = LMHead(embedding, tied=False)
    assert head.weight.shape == embedding.weight.shape
    head.weight.normal_()
    weight, hidden = head.weight.clone(), torch.randn(3, 4)
    embedding.weight.zero_()
    torch.testing.assert_close(head(hidden).double(), hidden.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
