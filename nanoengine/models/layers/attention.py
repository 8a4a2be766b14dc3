"""Attention with a fused QK norm, RoPE and write where the backend offers it; with QK norms over all heads or after RoPE; with
scaled queries.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from nanoengine.core.attention import AttentionMetadata, AttentionSpec, KVLayer
from nanoengine.core.layers import Angles, PagedAttention, RMSNorm, apply_rotary
from nanoengine.core.model_config import DenseConfig
from nanoengine.kernels.attention import AttentionBackend, WriteInOneGo
from nanoengine.kernels.operations import Changes, Write
from nanoengine.models.model_config import ModelConfig


def attention_spec(config: ModelConfig, layer: int) -> AttentionSpec:
    """The attention spec of a layer; those of all layers determine the backend before the model is built."""
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    window = config.layer(layer).window
    has_chunks = config.has_chunks and window is not None
    return AttentionSpec(scale, window, has_chunks, config.has_sinks, config.attention_soft_cap)


class Attention(PagedAttention):
    """Paged attention over a backend that may have the fused `rotate_and_write`."""

    backend: AttentionBackend

    def write(self, qkv: Tensor, angles: Angles | None, kv: KVLayer, slot_mapping: Tensor) -> Tensor:
        if self.backend.rotate_and_write is None:
            return super().write(qkv, angles, kv, slot_mapping)
        return WriteInOneGo(self.backend, self._qk_norm_rope(angles), kv, slot_mapping)(qkv)

    def _qk_norm_rope(self, angles: Angles | None) -> Changes:
        q_weight, k_weight = (norm.weight for norm in self.norms) if self.norms else (None, None)
        cos, sin = (None, None) if angles is None else angles
        return q_weight, k_weight, self.norms[0].eps if self.norms else 0.0, cos, sin

    def writing(self, angles: Angles | None, metadata: AttentionMetadata) -> Write:
        """The `write` of a step as an object, which a product may fuse."""
        kv, slots = metadata.kv_cache[self.layer], metadata.slot_mapping
        if type(self) is Attention and self.backend.rotate_and_write is not None:
            return WriteInOneGo(self.backend, self._qk_norm_rope(angles), kv, slots)
        return partial(self.write, angles=angles, kv=kv, slot_mapping=slots)

    def attend(self, q: Tensor, metadata: AttentionMetadata) -> Tensor:
        """[num_tokens, num_heads, head_dim], as q."""
        return self.backend.attend(q, metadata.kv_cache[self.layer], metadata, self.spec, self.sinks)


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
