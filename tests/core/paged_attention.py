"""Backends of the core in the contract of all backends, and what they ask of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from nanoengine.core.torch_attention import CausalTorchAttention


def in_contract(backend: type[CausalTorchAttention]) -> Any:
    """A backend whose cache is never int8 and that writes K and V by themselves, with the words that the contract uses."""

    class InContract(backend):  # type: ignore[misc, valid-type]
        block_major, rotate_and_write = False, None

    return InContract


def attention_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(sequences, queries of each, keys of each) of every call of torch's attention from now on."""
    calls: list[tuple[int, int, int]] = []
    attend = F.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, *rest: Tensor, **options: object) -> Tensor:
        calls.append((k.shape[0], q.shape[2], k.shape[2]))
        return attend(q, k, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    return calls
