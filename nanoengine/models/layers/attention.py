"""Attention that norms, rotates and writes in one go where the backend offers that; with norms over all heads together, or behind
the rotation; and with queries that grow.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from nanoengine.core.attention import AttentionMetadata, AttentionSpec, KVLayer
from nanoengine.core.layers import Angles, PagedAttention, RMSNorm, apply_rotary
from nanoengine.core.model_config import DenseConfig
from nanoengine.kernels.attention import AttentionBackend, WriteInOneGo
from nanoengine.kernels.operations import Changes, Write


class Attention(PagedAttention):
    """The core's, over a backend that may offer `rotate_and_write`."""

    backend: AttentionBackend

    def write(self, qkv: Tensor, angles: Angles | None, kv: KVLayer, slot_mapping: Tensor) -> Tensor:
        if self.backend.rotate_and_write is None:
            return super().write(qkv, angles, kv, slot_mapping)
        return WriteInOneGo(self.backend, self._changes(angles), kv, slot_mapping)(qkv)

    def _changes(self, angles: Angles | None) -> Changes:
        q_weight, k_weight = (norm.weight for norm in self.norms) if self.norms else (None, None)
        cos, sin = (None, None) if angles is None else angles
        return q_weight, k_weight, self.norms[0].eps if self.norms else 0.0, cos, sin

    def writing(self, angles: Angles | None, metadata: AttentionMetadata) -> Write:
        """`write` of a step; where nothing else is done, a product may do the same as it ends."""
        kv, slots = metadata.kv_cache[self.layer], metadata.slot_mapping
        if type(self) is Attention and self.backend.rotate_and_write is not None:
            return WriteInOneGo(self.backend, self._changes(angles), kv, slots)
        return partial(self.write, angles=angles, kv=kv, slot_mapping=slots)

    def attend(self, q: Tensor, metadata: AttentionMetadata) -> Tensor:
        """[num_tokens, num_heads, head_dim], as q."""
        return self.backend.attend(q, metadata.kv_cache[self.layer], metadata, self.spec, self.sinks)


class WideNormAttention(Attention):
    """With norms over all heads of q together, and all of k (OLMo 2), before all that a backend may do in one go."""

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
    """With norms over each head of q and k behind the rotation (Hunyuan)."""

    def write(self, qkv: Tensor, angles: Angles | None, kv: KVLayer, slot_mapping: Tensor) -> Tensor:
        assert angles is not None
        rotated = qkv[:, : qkv.shape[1] - self.num_kv_heads * self.head_dim].unflatten(-1, (-1, self.head_dim))
        rotated.copy_(apply_rotary(rotated, angles))
        return super().write(qkv, None, kv, slot_mapping)


class ScaledAttention(Attention):
    """Queries are multiplied by factors that stand behind the angles, or in their place: see `QueryScale`."""

    def write(self, qkv: Tensor, angles: Angles | None, kv: KVLayer, slot_mapping: Tensor) -> Tensor:
        assert angles is not None
        qkv[:, : qkv.shape[1] - 2 * self.num_kv_heads * self.head_dim].mul_(angles[-1])
        return super().write(qkv, angles[:-1] or None, kv, slot_mapping)
