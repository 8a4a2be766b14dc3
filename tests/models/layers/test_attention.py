"""Attention that writes in one go; with norms over all heads together, or queries that grow, before the write in any case."""

from __future__ import annotations

import pytest
import torch

from nanoengine.core.layers import RMSNorm, WeightFactory
from nanoengine.kernels.reference.operations import TorchKernels
from nanoengine.models.layers.attention import Attention, ScaledAttention, WideNormAttention
from tests.core.attention_layers import DIM, HEADS, KV_HEADS, Recorder, check_attended, layer_over, norm_of, step


@pytest.mark.parametrize("offers", [True, False])
def test_q_and_k_are_normed_over_all_of_their_heads(offers: bool) -> None:
    backend = Recorder(offers=offers)
    qkv, _, metadata = step()
    factory = WeightFactory(TorchKernels(), torch.float32, torch.device("cpu"))
    norms = [RMSNorm(factory, heads * DIM, 1e-6) for heads in (HEADS, KV_HEADS)]
    for norm in norms:
        norm.weight.uniform_(0.5, 1.5)
    q, k, v = qkv.clone().split((HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM), dim=1)
    layer = layer_over(backend, *norms, kind=WideNormAttention)
    layer(qkv, None, metadata)
    name, *given = backend.calls[0]
    expected = [norms[0](q), norms[1](k), v]
    if offers:
        assert name == "rotate_and_write"
        assert torch.equal(given[0], torch.cat(expected, dim=1))
        assert given[1][:2] == (None, None), "they are not applied a second time"
    else:
        assert name == "write_kv"
        assert torch.equal(given[0].flatten(1), expected[1])
        assert torch.equal(given[1].flatten(1), v)
        assert torch.equal(backend.calls[1][1].flatten(1), expected[0])


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("rotated", [True, False])
def test_it_writes_in_one_go_where_that_is_offered_and_then_attends(norms: bool, rotated: bool) -> None:
    backend = Recorder(offers=True)
    qkv, angles, metadata = step()
    both = [norm_of(), norm_of()] if norms else []
    out = layer_over(backend, *both, kind=Attention)(qkv, angles if rotated else None, metadata)
    (name, *given), _ = backend.calls
    assert name == "rotate_and_write"
    weights = [norm.weight for norm in both] or [None, None]
    cos, sin = angles if rotated else (None, None)
    expected = (qkv, *weights, 1e-6 if norms else 0.0, cos, sin, metadata.kv_cache[1], metadata.slot_mapping)
    given = [given[0], *given[1], *given[2:]]
    for got, right in zip(given, expected, strict=True):
        assert got is right or got == right
    check_attended(backend, out, qkv[:, : HEADS * DIM].unflatten(-1, (HEADS, DIM)) + 1, metadata)


@pytest.mark.parametrize("offers", [True, False])
def test_queries_alone_are_multiplied_and_nothing_is_rotated(offers: bool) -> None:
    backend = Recorder(offers=offers)
    qkv, _, metadata = step()
    factors = torch.rand(len(qkv), 1) + 1
    q, k, v = qkv.clone().split((HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM), dim=1)
    layer_over(backend, kind=ScaledAttention)(qkv, (factors,), metadata)
    name, *given = backend.calls[0]
    if offers:
        assert name == "rotate_and_write"
        assert torch.equal(given[0], torch.cat((q * factors, k, v), dim=1))
        assert given[1][3:] == (None, None)
    else:
        assert torch.equal(given[0].flatten(1), k)
        assert torch.equal(backend.calls[1][1].flatten(1), q * factors)
