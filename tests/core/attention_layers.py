"""An attention layer over a backend that notes its calls; what comes out with real backends is tested in
tests/kernels/attention.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nanoengine.core.attention import AttentionMetadata, AttentionSpec
from nanoengine.core.kernels import CoreKernels
from nanoengine.core.layers import Angles, PagedAttention, RMSNorm, WeightFactory
from tests.core.test_layers import angles_at

CPU = torch.device("cpu")
SPEC = AttentionSpec(0.25)
HEADS, KV_HEADS, DIM = 4, 2, 8
CONFIG: Any = SimpleNamespace(num_kv_heads=KV_HEADS, head_dim=DIM)
SINKS = torch.randn(HEADS)
WIDTH = (HEADS + 2 * KV_HEADS) * DIM


class Recorder:
    """A backend that notes its calls."""

    def __init__(self, *, offers: bool = False):
        self.calls: list[tuple[Any, ...]] = []
        self.rotate_and_write = self._rotate_and_write if offers else None

    def _rotate_and_write(self, qkv: Tensor, *rest: object) -> Tensor:
        self.calls.append(("rotate_and_write", qkv, *rest))
        return qkv[:, : HEADS * DIM].unflatten(-1, (HEADS, DIM)) + 1

    def write_kv(self, *what: object) -> None:
        self.calls.append(("write_kv", *what))

    def attend(self, q: Tensor, *rest: object) -> Tensor:
        self.calls.append(("attend", q, *rest))
        return q + 2


def norm_of(eps: float = 1e-6) -> RMSNorm:
    norm = RMSNorm(WeightFactory(CoreKernels(), torch.float32, CPU), DIM, eps)
    norm.weight.copy_(torch.rand(DIM) + 0.5)
    return norm


def step() -> tuple[Tensor, Angles, AttentionMetadata]:
    """Projections, angles and metadata of three tokens, in a model of three layers."""
    one = torch.ones(1, dtype=torch.int32)
    caches = [(torch.zeros(1), torch.zeros(1)) for _ in range(3)]
    starts = torch.tensor([0, 3], dtype=torch.int32)
    slots = torch.tensor([4, 5, 6])
    metadata = AttentionMetadata(
        starts, 3 * one, one[None], [3], [3], kv_cache=caches, slot_mapping=slots, num_decodes=0
    )
    return torch.randn(3, WIDTH), angles_at(torch.arange(3), DIM, 1e4), metadata


def layer_over(backend: Recorder, *norms: RMSNorm, kind: type[PagedAttention] = PagedAttention) -> PagedAttention:
    """The second layer of a model."""
    layer = kind(1, CONFIG, SPEC, backend, *norms)  # type: ignore[arg-type]
    layer.sinks = SINKS
    return layer


def check_attended(backend: Recorder, out: Tensor, q: Tensor, metadata: AttentionMetadata) -> None:
    """The last call attends with q to the cache of the layer, by its spec and sinks, and its result is that of the layer."""
    name, given, *rest = backend.calls[-1]
    assert name == "attend"
    torch.testing.assert_close(given, q)
    assert torch.equal(out, given + 2)
    for got, expected in zip(rest, (metadata.kv_cache[1], metadata, SPEC, SINKS), strict=True):
        assert got is expected
