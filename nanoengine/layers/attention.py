"""Attention: from the projected q, k and v to what the heads saw. The backend knows where K/V are kept."""

from __future__ import annotations

from torch import Tensor

from nanoengine.attention.backend import AttentionBackend
from nanoengine.core.attention import AttentionMetadata, AttentionSpec
from nanoengine.layers.norm import RMSNorm
from nanoengine.layers.rotary import Angles, apply_rotary


class Attention:
    """Causal self-attention of one layer over the paged KV cache.

    Args:
        layer: its number, which is also that of its K/V in the cache.
        num_kv_heads, head_dim: heads of k and of v, and the size of every head.
        spec: what is computed.
        backend: what computes it. Norms, rotations and the write are done one after the other, unless it offers them in one
            go, as this layer needs them.
        q_norm, k_norm: norms over each head of q and of k, or over all heads of each together, if there are any.
        sinks: [num_heads] float32, if the spec asks for them.
    """

    def __init__(
        self,
        layer: int,
        num_kv_heads: int,
        head_dim: int,
        spec: AttentionSpec,
        backend: AttentionBackend,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        sinks: Tensor | None = None,
    ):
        self.layer = layer
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.spec, self.sinks = spec, sinks
        self.backend = backend
        self.q_norm, self.k_norm = q_norm, k_norm
        self.wide_norms: tuple[RMSNorm, RMSNorm] | None = None
        if q_norm is not None and k_norm is not None and q_norm.weight.shape[0] != head_dim:
            self.wide_norms, self.q_norm, self.k_norm = (q_norm, k_norm), None, None
        self._eps = 0.0 if self.q_norm is None else self.q_norm.eps
        alike = (
            k_norm.eps == self._eps if self.q_norm is not None and k_norm is not None else self.q_norm is self.k_norm
        )
        self._rotate_and_write = backend.rotate_and_write if alike else None

    def __call__(self, qkv: Tensor, angles: Angles | None, metadata: AttentionMetadata) -> Tensor:
        """[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] -> [num_tokens, num_heads, head_dim].

        Without angles nothing is rotated.
        """
        k_cache, v_cache = metadata.kv_cache[self.layer]
        q = self.write(qkv, angles, k_cache, v_cache, metadata.slot_mapping)
        return self.backend.attend(q, k_cache, v_cache, metadata, self.spec, self.sinks)

    def write(
        self, qkv: Tensor, angles: Angles | None, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        """Norm and rotate q and k, write K and V, and return q: [num_tokens, num_heads, head_dim]."""
        if self.wide_norms is not None:
            self._norm_all_heads(qkv, *self.wide_norms)
        if self._rotate_and_write is not None:
            q_weight = None if self.q_norm is None else self.q_norm.weight
            k_weight = None if self.k_norm is None else self.k_norm.weight
            cos, sin = (None, None) if angles is None else angles
            return self._rotate_and_write(qkv, q_weight, k_weight, self._eps, cos, sin, k_cache, v_cache, slot_mapping)
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((heads.shape[1] - 2 * self.num_kv_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        q, k = (x if norm is None else norm(x) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        if angles is not None:
            q, k = apply_rotary(q, angles), apply_rotary(k, angles)
        self.backend.write_kv(k, v, k_cache, v_cache, slot_mapping)
        return q

    def _norm_all_heads(self, qkv: Tensor, q_norm: RMSNorm, k_norm: RMSNorm) -> None:
        """Norm q and k in their places, each over all of its heads."""
        first = 0
        for norm in (q_norm, k_norm):
            part = qkv[:, first : first + norm.weight.shape[0]]
            part.copy_(norm(part.contiguous()))
            first += norm.weight.shape[0]
