"""Paged attention in plain torch: it runs on every device, with bounded memory."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.core.attention import AttentionBackend, AttentionSpec, KVLayer, Runs

MAX_SCORES = 1 << 24
"""Most scores of a head that a prefill computes at once."""


class TorchAttention(AttentionBackend):
    """It gathers what is seen from its blocks, then calls `scaled_dot_product_attention`.

    For other kinds of attention, a subclass overrides `first_seen`, `visible`, `slice_size`, `gather` and `attention`.
    """

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
        """Each sequence by itself, in slices of its queries: its new tokens against what they see of the cache."""
        out, start = torch.empty_like(q), 0
        for table, query_len, seq_len in zip(runs.block_tables, runs.query_lens_list, runs.seq_lens_list, strict=True):
            history = max(0, seq_len - query_len)  # of a padding row, too, which sees nothing
            origin = self.first_seen(history, spec)  # position of the first key that is gathered
            slots = self.slots(table, torch.arange(origin, seq_len, dtype=torch.int64, device=q.device))[None]
            k, v = (self.gather(cache, slots, q.dtype) for cache in kv)
            size = self.slice_size(seq_len - origin, q.shape[1], spec)
            for first in range(history, seq_len, size):
                last, seen = min(first + size, seq_len), self.first_seen(first, spec)
                visible = None  # the queries see each other, and no more
                if seen < first or self.first_seen(last - 1, spec) > first:
                    queries, keys = (torch.arange(i, last, dtype=torch.int64, device=q.device) for i in (first, seen))
                    visible = self.visible(queries[:, None], keys, spec)
                rows = slice(start + first - history, start + last - history)
                k_seen, v_seen = (each[:, :, seen - origin : last - origin] for each in (k, v))
                attended = self.attention(q[rows].transpose(0, 1)[None], k_seen, v_seen, visible, spec, sinks)
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

    def first_seen(self, position: int, spec: AttentionSpec) -> int:
        """The first position that the token at a position sees."""
        return 0

    def visible(self, queries: Tensor, keys: Tensor, spec: AttentionSpec) -> Tensor:
        """Whether the tokens at positions [num_queries, 1] see those at positions [num_keys]."""
        return keys <= queries

    def slice_size(self, num_keys: int, num_heads: int, spec: AttentionSpec) -> int:
        """How many queries of a prefill are computed at once."""
        return max(1, MAX_SCORES // max(1, num_keys))

    def gather(self, cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """K or V of slots [num_seqs, count], as [num_seqs, num_kv_heads, count, head_dim] of the dtype of the queries."""
        rows = cache.flatten(0, 1).index_select(0, slots.flatten())  # copies whole rows: faster than general indexing
        return rows.unflatten(0, slots.shape).transpose(1, 2)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, spec: AttentionSpec, sinks: Tensor | None
    ) -> Tensor:
        """Attention of gathered K/V: q and the result are [num_seqs, num_heads, num_queries, head_dim], k and v [num_seqs,
        num_kv_heads, num_keys, head_dim]. In a decode, the query heads of a K/V head stand as queries of that one head.

        Args:
            visible: which keys each query sees, to be broadcast to [num_seqs, 1, num_queries, num_keys]. None: there is a
                query for each key, and each sees its own key and those before it.
        """
        is_causal, gqa = visible is None, q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, visible, is_causal=is_causal, scale=spec.scale, enable_gqa=gqa)
