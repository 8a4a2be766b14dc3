"""Paged attention in plain torch: it runs on every device, and it is the oracle that other backends are tested against.

Unwritten slots may hold anything, NaN included, so nothing here reads a slot that no token was written to.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.attention.backend import AttentionSpec, Runs
from nanoengine.attention.two_kernels import TwoKernels
from nanoengine.model_config import ModelConfig

MAX_SCORES = 1 << 24
"""Most scores per head that a prefill computes at once: it bounds memory, however long the history."""

MAX_GATHERED_TOKENS = 1 << 17
"""Most tokens of K/V that a decode copies out of the cache at once, padding included."""

SHORT = 64
"""Sequences up to this length are never worth a group of their own."""


class TorchAttention(TwoKernels):
    """The reference. It gathers K/V from their blocks, then calls `scaled_dot_product_attention`."""

    name = "torch"
    description = "plain torch gather + scaled_dot_product_attention"
    capturable = False
    captures_prompts = False
    block_major = False  # it looks tokens up in one flat list of slots
    rotate_and_write = None

    def __init__(self, block_size: int):
        self.block_size = block_size

    @staticmethod
    def why_not(device: torch.device, dtype: torch.dtype, model: ModelConfig, block_size: int) -> str | None:  # noqa: ARG004
        return None

    def kv_shape(self, num_blocks: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks, self.block_size, num_kv_heads, head_dim)

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        if slot_mapping.numel() and slot_mapping.min() < 0:
            written = slot_mapping >= 0
            slot_mapping, k, v = slot_mapping[written], k[written], v[written]
        k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
        v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)

    def prefill(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        runs: Runs,
        spec: AttentionSpec,
        sinks: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Each sequence by itself: its new tokens against all that is in the cache up to them."""
        if runs.plan is None:
            runs.plan = [
                self._slots(table, torch.arange(seq_len, device=q.device))
                for table, seq_len in zip(runs.block_tables, runs.seq_lens_list, strict=True)
            ]
        out = torch.empty_like(q)
        start = 0
        for slots, query_len in zip(runs.plan, runs.query_lens_list, strict=True):
            seq_len = len(slots)
            k, v = (_gather(cache, slots[None]) for cache in (k_cache, v_cache))
            for first, last in _slices(query_len, max(1, MAX_SCORES // max(1, seq_len))):
                rows = slice(start + first, start + last)
                visible = seq_len - query_len + last  # what the last query of the slice sees
                attended = _causal_attention(
                    q[rows].transpose(0, 1)[None], k[:, :, :visible], v[:, :, :visible], spec.scale
                )
                out[rows] = attended[0].transpose(0, 1)
            start += query_len
        return out

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        runs: Runs,
        spec: AttentionSpec,
        sinks: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """One query per sequence; sequences of like length at once, padded to the longest of them."""
        if runs.plan is None:
            runs.plan = self._plan_decode(runs)
        out = torch.empty_like(q)
        for rows, slots, visible in runs.plan:
            k, v = (_gather(cache, slots) for cache in (k_cache, v_cache))
            # The query heads that share a K/V head stand where queries stand: each K/V is read once for all of them.
            grouped = q[rows].unflatten(1, (k.shape[1], -1))  # [num_seqs, num_kv_heads, group, head_dim]
            attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=visible, scale=spec.scale)
            out[rows] = attended.flatten(1, 2)
        return out

    def _plan_decode(self, runs: Runs) -> list[tuple[Tensor | slice, Tensor, Tensor]]:
        """For each group of sequences: its rows, the slots that it reads, and which of them each sequence sees."""
        groups = list(_groups(runs.seq_lens_list))
        plan: list[tuple[Tensor | slice, Tensor, Tensor]] = []
        for group in groups:
            rows = torch.tensor(group, device=runs.seq_lens.device) if len(groups) > 1 else slice(None)
            seq_lens = runs.seq_lens[rows][:, None]
            positions = torch.arange(runs.seq_lens_list[group[-1]], device=seq_lens.device)
            # Padding repeats the last token: it is masked, but it must be finite, since NaN times zero is NaN. A sequence of
            # length 0 is a padding row: it may get anything.
            slots = self._slots(runs.block_tables[rows], torch.minimum(positions, (seq_lens - 1).clamp(min=0)))
            visible = (positions < seq_lens)[:, None, None]  # [num_seqs, 1, 1, max_seq_len]
            plan.append((rows, slots, visible))
        return plan

    def _slots(self, block_tables: Tensor, positions: Tensor) -> Tensor:
        """Slots of token positions, for one block table or one per row."""
        blocks = block_tables.gather(-1, positions // self.block_size)
        return blocks.long() * self.block_size + positions % self.block_size


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """K or V of slots [num_seqs, seq_len], as [num_seqs, num_kv_heads, seq_len, head_dim]."""
    rows = cache.flatten(0, 1).index_select(0, slots.flatten())  # copies whole rows: faster than general indexing
    return rows.unflatten(0, slots.shape).transpose(1, 2)


def _causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The last queries of a sequence over all of it: q is [1, num_heads, query_len, head_dim], k and v have seq_len instead."""
    query_len, seq_len = q.shape[2], k.shape[2]
    if query_len == seq_len:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    visible = torch.ones(query_len, seq_len, dtype=torch.bool, device=q.device).tril(seq_len - query_len)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)


def _slices(count: int, size: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + size, count)) for first in range(0, count, size))


def _groups(seq_lens: list[int]) -> Iterator[list[int]]:
    """Indices of sequences, shortest first, cut so that none is padded to more than twice its length."""
    group: list[int] = []
    for i in sorted(range(len(seq_lens)), key=seq_lens.__getitem__):
        too_long = group and seq_lens[i] > max(2 * seq_lens[group[0]], SHORT)
        too_many = group and (len(group) + 1) * seq_lens[i] > MAX_GATHERED_TOKENS
        if too_long or too_many:
            yield group
            group = []
        group.append(i)
    if group:
        yield group
