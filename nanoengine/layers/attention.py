"""Attention with norms over all heads of q together, and all of k (OLMo 2)."""

from __future__ import annotations

from torch import Tensor

from nanoengine.attention.backend import AttentionBackend
from nanoengine.core.attention import AttentionSpec
from nanoengine.core.layers import Angles, Attention, RMSNorm


class WideNormAttention(Attention):
    """The norms are applied before all that a backend may do in one go."""

    def __init__(
        self,
        layer: int,
        num_kv_heads: int,
        head_dim: int,
        spec: AttentionSpec,
        backend: AttentionBackend,
        *norms: RMSNorm,
    ):
        super().__init__(layer, num_kv_heads, head_dim, spec, backend)
        self.wide_norms = norms

    def write(
        self, qkv: Tensor, angles: Angles | None, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        first = 0
        for norm in self.wide_norms:
            part = qkv[:, first : first + norm.weight.shape[0]]
            part.copy_(norm(part.contiguous()))
            first += norm.weight.shape[0]
        return super().write(qkv, angles, k_cache, v_cache, slot_mapping)
