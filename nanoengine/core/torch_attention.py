"""Paged attention in plain torch: it runs on every device, with bounded memory."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.core.attention import AttentionSpec, CoreAttentionBackend, KVLayer, Runs

MAX_SCORES = 1 << 24
"""Most scores of a head that a prefill computes at once."""


class CausalTorchAttention(CoreAttentionBackend):
    """Copies the K/V of a sequence out of its blocks, then calls `scaled_dot_product_attention`."""

    name = "torch"

    def kv_shape(self, num_blocks: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks, self.block_size, num_kv_heads, head_dim)

    def write_kv(self, k: Tensor, v: Tensor, kv: KVLayer, slot_mapping: Tensor) -> None:
        if slot_mapping.numel() and slot_mapping.min() < 0:
            written = slot_mapping >= 0
            slot_mapping, k, v = slot_mapping[written], k[written], v[written]
        for cache, rows in zip(kv, (k, v), strict=True):
            cache.flatten(0, 1).index_copy_(0, slot_mapping, rows)

    def prefill(self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        """Each sequence by itself, in slices of its queries: its new tokens against all up to them."""
        out, start = torch.empty_like(q), 0
        gqa = q.shape[1] != kv[0].shape[-2]
        for table, query_len, seq_len in zip(runs.block_tables, runs.query_lens_list, runs.seq_lens_list, strict=True):
            history = max(0, seq_len - query_len)  # of a padding row, too, which sees nothing
            positions = torch.arange(seq_len, dtype=torch.int64, device=q.device)
            slots = self.slots(table, positions)
            # Whole rows are copied: faster than general indexing.
            k, v = (cache.flatten(0, 1).index_select(0, slots).transpose(0, 1)[None] for cache in kv)
            size = max(1, MAX_SCORES // max(1, seq_len))
            for first in range(history, seq_len, size):
                last = min(first + size, seq_len)
                visible = None if first == 0 else positions[:last] <= positions[first:last, None]
                rows = slice(start + first - history, start + last - history)
                qkv = q[rows].transpose(0, 1)[None], k[:, :, :last], v[:, :, :last]
                attended = F.scaled_dot_product_attention(
                    *qkv, visible, is_causal=visible is None, scale=spec.scale, enable_gqa=gqa
                )
                out[rows] = attended[0].transpose(0, 1)
            start += query_len
        return out

    def decode(self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        """As a prefill, with the lengths on the device: the host may know upper bounds alone."""
        exact = replace(runs, seq_lens_list=runs.seq_lens.tolist())
        return self.prefill(q, kv, exact, spec, sinks)

    def slots(self, block_tables: Tensor, positions: Tensor) -> Tensor:
        """Slots of token positions, for one block table or one per row."""
        blocks = block_tables.gather(-1, positions // self.block_size)
        return blocks.long() * self.block_size + positions % self.block_size
