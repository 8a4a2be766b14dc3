"""The attention layer: it writes to its own layer's cache before it reads, and lets the stated phase choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nanoengine.attention.backend import AttentionMetadata
from nanoengine.engine.messages import Phase
from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.layers.attention import Attention
from nanoengine.layers.norm import RMSNorm


class Recorder:
    """A backend that notes its calls."""

    name = description = "recorder"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def rotate_and_write(self, qkv: Tensor, *rest: object) -> Tensor:
        self.calls.append(("write", qkv, *rest))
        return qkv[:, :16].unflatten(-1, (2, 8))

    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        self.calls.append(("prefill", q, k_cache, v_cache, metadata, scale))
        return q + 1

    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        self.calls.append(("decode", q, k_cache, v_cache, metadata, scale))
        return q + 2


@pytest.mark.parametrize(("phase", "offset"), [(Phase.PREFILL, 1), (Phase.DECODE, 2)])
def test_it_writes_then_attends_by_the_phase_that_the_step_states(phase: Phase, offset: int) -> None:
    backend = Recorder()
    caches = [(torch.zeros(1), torch.zeros(1)) for _ in range(3)]
    one = torch.ones(1, dtype=torch.int32)  # one new token of a fresh sequence: it could be either phase
    slots = torch.tensor([4])
    metadata = AttentionMetadata(phase, caches, torch.tensor([0, 1]), one, one[None], slots, [1], [1])
    qkv, angles = torch.randn(1, 32), (torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))
    q_norm, k_norm = (RMSNorm(TorchKernels(), 8, 1e-6) for _ in range(2))
    out = Attention(1, 0.25, q_norm, k_norm, backend)(qkv, angles, metadata)  # type: ignore[arg-type]
    q = qkv[:, :16].unflatten(-1, (2, 8))
    assert torch.equal(out, q + offset)
    write, attend = backend.calls
    assert [write[0], attend[0]] == ["write", phase.value]
    for got, expected in zip(write[1:], (qkv, q_norm, k_norm, angles, *caches[1], slots), strict=True):
        assert got is expected
    assert torch.equal(attend[1], q)
    assert attend[2] is caches[1][0]
    assert attend[3] is caches[1][1]
    assert attend[5] == 0.25
