"""Attention: writes this step's K/V into the cache and lets the backend read the rest."""

from __future__ import annotations

from torch import Tensor, nn

from nanoengine.attention.backend import AttentionBackend, AttentionMetadata
from nanoengine.engine.messages import Phase


class Attention(nn.Module):
    """Causal self-attention of one layer over the paged KV cache.

    Args:
        layer: its number, which is also that of its K/V in the cache.
        scale: factor of the scores, head_dim ** -0.5.
        backend: the implementation.
    """

    def __init__(self, layer: int, scale: float, backend: AttentionBackend):
        super().__init__()
        self.layer = layer
        self.scale = scale
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> Tensor:
        """q is [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim]; returns q's shape."""
        k_cache, v_cache = metadata.kv_cache[self.layer]
        self.backend.write_kv(k, v, k_cache, v_cache, metadata.slot_mapping)
        attend = self.backend.decode if metadata.phase is Phase.DECODE else self.backend.prefill
        return attend(q, k_cache, v_cache, metadata, self.scale)
