"""Attention with norms over all heads together: they are applied before the write, whatever the backend offers."""

from __future__ import annotations

import pytest
import torch

from nanoengine.core.attention import AttentionSpec
from nanoengine.core.layers import Factory, RMSNorm
from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.layers.attention import WideNormAttention
from tests.core.test_attention_layer import DIM, HEADS, KV_HEADS, Recorder, step


@pytest.mark.parametrize("offers", [True, False])
def test_q_and_k_are_normed_over_all_of_their_heads(offers: bool) -> None:
    backend = Recorder(offers=offers)
    qkv, _, metadata = step()
    factory = Factory(TorchKernels(), torch.float32, torch.device("cpu"))
    norms = [RMSNorm(factory, heads * DIM, 1e-6) for heads in (HEADS, KV_HEADS)]
    for norm in norms:
        norm.weight.uniform_(0.5, 1.5)
    q, k, v = qkv.clone().split((HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM), dim=1)
    layer = WideNormAttention(1, KV_HEADS, DIM, AttentionSpec(0.25), backend, *norms)  # type: ignore[arg-type]
    layer(qkv, None, metadata)
    name, *given = backend.calls[0]
    expected = [norms[0](q), norms[1](k), v]
    if offers:
        assert name == "rotate_and_write"
        assert torch.equal(given[0], torch.cat(expected, dim=1))
        assert given[1:3] == [None, None], "they are not applied a second time"
    else:
        assert name == "write_kv"
        assert torch.equal(given[0].flatten(1), expected[1])
        assert torch.equal(given[1].flatten(1), v)
        assert torch.equal(backend.calls[1][1].flatten(1), expected[0])
