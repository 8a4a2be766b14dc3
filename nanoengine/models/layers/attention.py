"""Attention with a fused QK norm, RoPE and write where the backend offers it; with QK norms over all heads or after RoPE; with
scaled queries.
"""

from __future__ import annotations

from torch import Tensor

from nanoengine.core.attention import AttentionSpec, KVLayer
from nanoengine.core.layers import Angles, PagedAttention, RMSNorm, apply_rotary
from nanoengine.core.model_config import DenseConfig
from nanoengine.kernels.attention import AttentionBackend


class Attention(PagedAttention):
    """Paged attention over a backend that may have the fused `rotate_and_write`."""

    backend: AttentionBackend

    def write(self, qkv: Tensor, angles: Angles | None, kv: KVLayer, slot_mapping: Tensor) -> Tensor:
        if self.backend.rotate_and_write is None:
            return super().write(qkv, angles, kv, slot_mapping)
        q_weight, k_weight = (norm.weight for norm in self.norms) if self.norms else (None, None)
        cos, sin = (None, None) if angles is None else angles
        changes = q_weight, k_weight, self.norms[0].eps if self.norms else 0.0, cos, sin
        return self.backend.rotate_and_write(qkv, changes, kv, slot_mapping)


class WideNormAttention(Attention):
    """Attention with QK norms over all heads (OLMo 2), before the fused part of the backend."""

    def __init__(
        self, layer: int, config: DenseConfig, spec: AttentionSpec, backend: AttentionBackend, *norms: RMSNorm
    ):
        super().__init__(layer, config, spec, backend)
        self.wide_norms = norms

    def write(self, qkv: Tensor, angles: Angles | None, kv: KVLayer, slot_mapping: Tensor) -> Tensor:
        width = self.num_kv_heads * self.head_dim
        q, k, _ = qkv.split((qkv.shape[1] - 2 * width, width, width), dim=1)
        for norm, part in zip(self.wide_norms, (q, k), strict=True):
            part.copy_(norm(part.contiguous()))
        return super().write(qkv, angles, kv, slot_mapping)


class LateNormAttention(Attention):
    """Attention with QK norms after RoPE (Hunyuan)."""

    def write(self, qkv: Tensor, angles: Angles | None, kv: KVLayer, slot_mapping: Tensor) -> Tensor:
        assert angles is not None
        rotated = qkv[:, : qkv.shape[1] - self.num_kv_heads * self.head_dim].unflatten(-1, (-1, self.head_dim))
        rotated.copy_(apply_rotary(rotated, angles))
        return super().write(qkv, None, kv, slot_mapping)


class ScaledAttention(Attention):
    """Attention whose queries are multiplied by the last of the angles: see `QueryScale`."""

    def write(self, qkv: Tensor, angles: Angles | None, kv: KVLayer, slot_mapping: Tensor) -> Tensor:
        assert angles is not None
        qkv[:, : qkv.shape[1] - 2 * self.num_kv_heads * self.head_dim].mul_(angles[-1])
        return super().write(qkv, angles[:-1] or None, kv, slot_mapping)
