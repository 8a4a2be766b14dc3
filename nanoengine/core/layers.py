"""The layers of a decoder. Their weights are unset until a checkpoint is loaded into their slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.core.attention import AttentionMetadata, AttentionSpec, CoreAttentionBackend, KVLayer
from nanoengine.core.kernels import CoreKernels, Weight, WeightSlot
from nanoengine.core.model_config import DenseConfig

Angles = tuple[Tensor, ...]
"""Cosines and sines, each [num_tokens, 1, head_dim / 2], float32."""


@dataclass(frozen=True)
class WeightFactory:
    """Makes the weights of layers, in the memory layout of the kernels."""

    kernels: CoreKernels
    dtype: torch.dtype
    device: torch.device

    def weight(self, inputs: int, *outputs: int) -> Weight:
        """A weight matrix of one projection, or of several side by side."""
        return self.kernels.new_weight(sum(outputs), inputs, self.dtype, self.device)


class Linear:
    """y = x W^T + b. The output may be several projections of one input, side by side: they cost one product."""

    def __init__(self, factory: WeightFactory, in_features: int, *out_features: int, bias: bool = False):
        self.kernels, self.out_features = factory.kernels, out_features
        self.weight = factory.weight(in_features, *out_features)
        size = sum(out_features)
        self.bias = torch.empty(size, dtype=factory.dtype, device=factory.device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:  # [num_tokens, in_features] -> [num_tokens, sum(out_features)]
        return self.kernels.linear(x, self.weight, self.bias)

    def slots(self, prefix: str, *names: str) -> dict[str, WeightSlot]:
        """Slots of the tensors `prefix.name` of a checkpoint, one for each projection; a single name has them all."""
        slots: dict[str, WeightSlot] = {}
        first = 0
        counts = self.out_features if len(names) > 1 else (sum(self.out_features),)
        for name, count in zip(names, counts, strict=True):
            slots[f"{prefix}.{name}.weight"] = self.weight.rows(first, count)
            if self.bias is not None:
                slots[f"{prefix}.{name}.bias"] = self.bias[first : first + count]
            first += count
        return slots


class RMSNorm:
    """x / rms(x) * weight over the last dimension, computed in float32 (Zhang and Sennrich, 2019).

    `add_and_norm` is the norm of x + residual, or of x without a residual, and that sum. It may overwrite the residual."""

    def __init__(self, factory: WeightFactory, size: int, eps: float):
        self.kernels, self.eps = factory.kernels, eps
        self.weight = torch.empty(size, dtype=torch.float32, device=factory.device)

    def slot(self) -> WeightSlot:
        return self.weight

    def __call__(self, x: Tensor) -> Tensor:  # [..., size] -> the same
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self(x), x
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)


class RotaryTable:
    """RoPE: the rotary angles of each position (Su et al., RoFormer, 2021), the same in every layer."""

    table: Tensor  # [max_len, 2, head_dim / 2] float32: cosines and sines

    def __init__(self, head_dim: int, theta: float, device: torch.device):
        self.head_dim, self.theta, self.device = head_dim, theta, device

    def frequencies(self, max_len: int) -> Tensor:
        """Radians per position of each pair of dimensions: [head_dim / 2] float32."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=self.device) / self.head_dim
        return 1.0 / self.theta**exponents

    def prepare(self, max_len: int) -> None:
        """Compute the table of positions below `max_len`, before any recording: recordings hold its address."""
        positions = torch.arange(max_len, dtype=torch.float32, device=self.device)
        angles = positions[:, None] * self.frequencies(max_len)
        self.table = angles.new_empty(max_len, 2, self.head_dim // 2)  # large for a long context: nothing is copied
        torch.cos(angles, out=self.table[:, 0])
        torch.sin(angles, out=self.table[:, 1])

    def __call__(self, positions: Tensor) -> Angles:  # [num_tokens]
        cos, sin = self.table.index_select(0, positions).split(1, dim=1)
        return cos, sin


def apply_rotary(x: Tensor, angles: Angles) -> Tensor:
    """RoPE: rotate the pairs (x[i], x[i + head_dim / 2]) of every head; x is [num_tokens, num_heads, head_dim]."""
    cos, sin = angles
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class PagedAttention:
    """Causal self-attention of layer `layer` over its K/V in the paged cache: `backend` computes it by `spec`.

    `norms` are the QK norms: over each head of q, and of k, with one eps; or there are none.
    """

    sinks: Tensor | None = None  # [num_heads] float32, if the spec asks for them

    def __init__(
        self, layer: int, config: DenseConfig, spec: AttentionSpec, backend: CoreAttentionBackend, *norms: RMSNorm
    ):
        self.layer, self.num_kv_heads, self.head_dim = layer, config.num_kv_heads, config.head_dim
        self.spec, self.backend, self.norms = spec, backend, norms

    def __call__(self, qkv: Tensor, angles: Angles | None, metadata: AttentionMetadata) -> Tensor:
        """[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] -> [num_tokens, num_heads, head_dim]."""
        kv = metadata.kv_cache[self.layer]
        q = self.write(qkv, angles, kv, metadata.slot_mapping)
        return self.backend.attend(q, kv, metadata, self.spec, self.sinks)

    def write(self, qkv: Tensor, angles: Angles | None, kv: KVLayer, slot_mapping: Tensor) -> Tensor:
        """QK norm and RoPE, then write K and V; returns q. Without angles there is no RoPE."""
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((heads.shape[1] - 2 * self.num_kv_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        q, k = (norm(x) for norm, x in zip(self.norms, (q, k), strict=True)) if self.norms else (q, k)
        if angles is not None:
            q, k = apply_rotary(q, angles), apply_rotary(k, angles)
        self.backend.write_kv(k, v, kv, slot_mapping)
        return q
