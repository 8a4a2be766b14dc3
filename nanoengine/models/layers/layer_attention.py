"""Attention with the head size and the number of KV heads of each layer, and with a norm of V (Gemma 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.core.attention import AttentionMetadata, KVLayer
from nanoengine.core.kernels import WeightSlot
from nanoengine.core.layers import Angles, Linear, RMSNorm, apply_rotary
from nanoengine.core.qwen3 import DenseAttention
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.models.layers.attention import Attention, attention_spec
from nanoengine.models.layers.factory import Factory
from nanoengine.models.layers.norm import OffsetNorm
from nanoengine.models.layers.slots import Unused
from nanoengine.models.model_config import ModelConfig


class LayerAttention(DenseAttention):
    """Attention without the projections that its layer lacks: V equal to K, or K/V of an earlier layer."""

    prefix = "self_attn"

    def __init__(self, config: ModelConfig, layer: int, factory: Factory, backend: AttentionBackend):
        facts, spec = config.layer(layer), attention_spec(config, layer)
        size, kv_heads = facts.head_dim or config.head_dim, facts.num_kv_heads or config.num_kv_heads
        q_size, kv_size = config.num_heads * size, kv_heads * size
        count = 1 if facts.kv_layer is not None else 2 if facts.v_is_k else 3
        self.qkv_names = ("q_proj", "k_proj", "v_proj")[:count]
        self.qkv_proj = Linear(factory, config.hidden_size, *(q_size, kv_size, kv_size)[:count], bias=config.qkv_bias)
        self.o_proj = Linear(factory, q_size, config.hidden_size, bias=config.o_bias)
        self.norms = tuple(OffsetNorm(factory, config, size) for _ in range(min(count, 2)))
        if facts.kv_layer is None:
            normed = NormedAttention(layer, config, spec, backend, *self.norms)
            normed.v_norm, normed.v_is_k = OffsetNorm(factory, config, size), facts.v_is_k
            normed.v_norm.weight.fill_(1.0)
            self.attention: Attention = normed
        else:
            self.attention = QueryAttention(facts.kv_layer, config, spec, backend, *self.norms)
        self.attention.head_dim, self.attention.num_kv_heads = size, kv_heads
        unused = {"k_proj": (kv_size, config.hidden_size), "v_proj": (kv_size, config.hidden_size), "k_norm": (size,)}
        self.unused = {} if facts.kv_layer is None else unused

    def __call__(
        self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None, angles: Angles | None, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(norm, OffsetNorm)
        qkv, residual = norm.then_linear(hidden, residual, self.qkv_proj)
        return self.o_proj(self.attention(qkv, angles, metadata).flatten(-2)), residual

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        unused = {f"{prefix}.{name}.weight": Unused(*shape) for name, shape in self.unused.items()}
        return super().slots(prefix) | unused


class SizedAttention(Attention):
    """Attention over a cache whose slots are as large as those of this layer, or larger."""

    def __call__(self, qkv: Tensor, angles: Angles | None, metadata: AttentionMetadata) -> Tensor:
        kv = self.backend.of_layer(metadata.kv_cache[self.layer], self.num_kv_heads, self.head_dim)
        q = self.write(qkv, angles, kv, metadata.slot_mapping)
        return self.backend.attend(q, kv, metadata, self.spec, self.sinks)


class NormedAttention(SizedAttention):
    """Attention with a norm of V; without a projection of V, V is the output of `k_proj`."""

    v_norm: RMSNorm
    v_is_k: bool

    def write(self, qkv: Tensor, angles: Angles | None, kv: KVLayer, slot_mapping: Tensor) -> Tensor:
        last = qkv[:, -self.num_kv_heads * self.head_dim :]
        v = self.v_norm(last.unflatten(-1, (-1, self.head_dim)).contiguous()).flatten(-2)
        if self.v_is_k:
            qkv = torch.cat((qkv, v), 1)
        else:
            last.copy_(v)
        return super().write(qkv, angles, kv, slot_mapping)


class QueryAttention(SizedAttention):
    """Attention over the K/V of the earlier layer `layer`."""

    def write(self, qkv: Tensor, angles: Angles | None, kv: KVLayer, slot_mapping: Tensor) -> Tensor:
        q = self.norms[0](qkv.unflatten(-1, (-1, self.head_dim)))
        return q if angles is None else apply_rotary(q, angles)
