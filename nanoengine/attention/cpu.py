"""Paged attention in plain torch: it runs on every device, and it is the oracle that other backends are tested against.

Unwritten slots may hold anything, NaN included, so nothing here reads a slot that no token was written to.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.attention.backend import AttentionMetadata
from nanoengine.config import ModelConfig


class TorchAttention:
    """The reference. It gathers K/V from their blocks, then calls `scaled_dot_product_attention`."""

    name = "torch"
    description = "plain torch gather + scaled_dot_product_attention"

    def __init__(self, block_size: int):
        self.block_size = block_size

    @staticmethod
    def why_not(device: torch.device, dtype: torch.dtype, model: ModelConfig, block_size: int) -> str | None:  # noqa: ARG004
        return None

    def kv_shape(self, num_blocks: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks, self.block_size, num_kv_heads, head_dim)

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        written = slot_mapping >= 0
        slots = slot_mapping[written]
        k_cache.view(-1, *k.shape[1:]).index_copy_(0, slots, k[written])
        v_cache.view(-1, *v.shape[1:]).index_copy_(0, slots, v[written])

    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        """Each sequence by itself: its new tokens against all that is in the cache up to them."""
        out = torch.empty_like(q)
        start = 0
        for i, (query_len, seq_len) in enumerate(zip(metadata.query_lens_list, metadata.seq_lens_list, strict=True)):
            slots = self._slots(metadata.block_tables[i], torch.arange(seq_len, device=q.device))
            k, v = (cache.flatten(0, 1)[slots].transpose(0, 1)[None] for cache in (k_cache, v_cache))
            queries = q[start : start + query_len].transpose(0, 1)[None]  # [1, num_heads, query_len, head_dim]
            # Query j sees the first seq_len - query_len + j + 1 tokens; without history that is torch's own causal mask.
            fresh = query_len == seq_len
            visible = None if fresh else _causal_mask(query_len, seq_len, q.device)
            attended = F.scaled_dot_product_attention(
                queries, k, v, attn_mask=visible, is_causal=fresh, scale=scale, enable_gqa=True
            )
            out[start : start + query_len] = attended[0].transpose(0, 1)
            start += query_len
        return out

    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        """One query per sequence, all sequences at once, padded to the longest."""
        positions = torch.arange(max(metadata.seq_lens_list), device=q.device)
        visible = positions < metadata.seq_lens[:, None]  # [num_seqs, max_seq_len]
        # Padding repeats the last token: it is masked, but it must be finite, since NaN times zero is NaN.
        slots = self._slots(metadata.block_tables, torch.minimum(positions, metadata.seq_lens[:, None] - 1))
        k, v = (cache.flatten(0, 1)[slots].transpose(1, 2) for cache in (k_cache, v_cache))
        # The query heads that share a K/V head stand where queries stand: each K/V is read once for all of them.
        grouped = q.unflatten(1, (k.shape[1], -1))  # [num_seqs, num_kv_heads, group, head_dim]
        attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=visible[:, None, None], scale=scale)
        return attended.flatten(1, 2)  # [num_seqs, num_heads, head_dim]

    def _slots(self, block_tables: Tensor, positions: Tensor) -> Tensor:
        """Slots of token positions, for one block table or one per row."""
        blocks = block_tables.gather(-1, positions // self.block_size)
        return blocks.long() * self.block_size + positions % self.block_size


def _causal_mask(query_len: int, seq_len: int, device: torch.device) -> Tensor:
    return torch.ones(query_len, seq_len, dtype=torch.bool, device=device).tril(seq_len - query_len)
