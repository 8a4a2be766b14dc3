"""Attention: from the projected q, k and v to what the heads saw. The backend knows where K/V are kept."""

from __future__ import annotations

from torch import Tensor

from nanoengine.attention.backend import AttentionBackend, AttentionMetadata
from nanoengine.engine.messages import Phase
from nanoengine.layers.norm import RMSNorm
from nanoengine.layers.rotary import Angles


class Attention:
    """Causal self-attention of one layer over the paged KV cache.

    Args:
        layer: its number, which is also that of its K/V in the cache.
        scale: factor of the scores, head_dim ** -0.5.
        q_norm, k_norm: norms over each head of q and of k.
        backend: the implementation.
    """

    def __init__(self, layer: int, scale: float, q_norm: RMSNorm, k_norm: RMSNorm, backend: AttentionBackend):
        self.layer = layer
        self.scale = scale
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.backend = backend

    def __call__(self, qkv: Tensor, angles: Angles, metadata: AttentionMetadata) -> Tensor:
        """[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] -> [num_tokens, num_heads, head_dim]."""
        k_cache, v_cache = metadata.kv_cache[self.layer]
        q = self.backend.rotate_and_write(
            qkv, self.q_norm, self.k_norm, angles, k_cache, v_cache, metadata.slot_mapping
        )
        attend = self.backend.decode if metadata.phase is Phase.DECODE else self.backend.prefill
        return attend(q, k_cache, v_cache, metadata, self.scale)
