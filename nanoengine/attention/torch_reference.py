"""Paged attention in plain torch: it runs on every device, and it is the oracle that other backends are tested against.

Unwritten slots may hold anything, NaN included, and so may those that a window has left behind: nothing here reads a slot that no
query sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.attention.backend import AttentionSpec, Runs
from nanoengine.attention.two_kernels import TwoKernels
from nanoengine.kernels.kv_int8 import SCALE_BYTES, dequantize, quantize
from nanoengine.model_config import ModelConfig

MAX_SCORES = 1 << 24
"""Most scores that a prefill computes at once: of each head, or of all where torch keeps them. However long the history is."""

MAX_GATHERED_TOKENS = 1 << 17
"""Most tokens of K/V that a decode copies out of the cache at once, padding included."""

SHORT = 64
"""Sequences up to this length are never worth a group of their own, nor are so few queries a slice of theirs."""


class _Query(NamedTuple):
    """One query of each sequence of a group."""

    rows: Tensor | slice  # which of all queries they are
    own_slot: Tensor  # [num_seqs]: which of the gathered tokens of its sequence each is
    visible: Tensor  # [num_seqs, 1, 1, most seen]: which of them it sees


class _Group(NamedTuple):
    """Sequences that are decoded together."""

    slots: Tensor  # [num_seqs, most seen]: what is gathered
    queries: list[_Query]


class TorchAttention(TwoKernels):
    """The reference. It gathers what is seen from its blocks, then calls `scaled_dot_product_attention`, or where that lacks
    something, computes as the definition says."""

    name = "torch"
    description = "plain torch gather + scaled_dot_product_attention"
    capturable = False
    captures_prompts = False
    features = frozenset({"window", "sinks", "soft_cap"})
    quantizes = True
    block_major = False  # it looks tokens up in one flat list of slots
    rotate_and_write = None

    def __init__(self, block_size: int):
        self.block_size = block_size

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, model: ModelConfig, block_size: int) -> str | None:  # noqa: ARG004
        return None

    def kv_shape(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, *, quantized: bool = False
    ) -> tuple[int, ...]:
        return (num_blocks, self.block_size, num_kv_heads, head_dim + SCALE_BYTES * quantized)

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        if slot_mapping.numel() and slot_mapping.min() < 0:
            written = slot_mapping >= 0
            slot_mapping, k, v = slot_mapping[written], k[written], v[written]
        for cache, rows in ((k_cache, k), (v_cache, v)):
            if cache.dtype is torch.int8:
                rows = _with_scales(*quantize(rows))
            cache.flatten(0, 1).index_copy_(0, slot_mapping, rows)

    def prefill(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        runs: Runs,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Each sequence by itself: its new tokens against what they see of the cache."""
        if runs.plan is None:
            runs.plan = self._plan_prefill(runs, spec)
        if sinks is not None:
            sinks = sinks[:, None]  # the same for every query
        out = torch.empty_like(q)
        start = 0
        for slots, query_len, seq_len in zip(runs.plan, runs.query_lens_list, runs.seq_lens_list, strict=True):
            k, v = (_gather(cache, slots[None], q.dtype) for cache in (k_cache, v_cache))
            begin, history = seq_len - len(slots), seq_len - query_len  # positions of the first key and the first query
            for first, last in _slices(query_len, _slice_size(len(slots), q.shape[1], spec)):
                rows = slice(start + first, start + last)
                visible = _visible(history + first, history + last, spec, q.device)
                seen = slice(history + last - begin - visible.shape[1], history + last - begin)
                ends = history + first, history + last - 1
                is_causal = all(_first_seen(end, spec) == ends[0] for end in ends)  # they see each other, and no more
                own = q[rows].transpose(0, 1)[None], k[:, :, seen], v[:, :, seen]
                out[rows] = _attention(*own, visible, spec, sinks, is_causal=is_causal)[0].transpose(0, 1)
            start += query_len
        return out

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        runs: Runs,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Those sequences at once that see about as much, padded to the one that sees most. Their last queries come first, and
        what those before them must not see is cleared: it may be NaN, and NaN times zero is NaN.
        """
        if runs.plan is None:
            runs.plan = self._plan_decode(runs, spec)
        out = torch.empty_like(q)
        for group in runs.plan:
            k, v = (_gather(cache, group.slots, q.dtype) for cache in (k_cache, v_cache))
            own_sinks = None if sinks is None else sinks.unflatten(0, (k.shape[1], -1))
            for rows, own_slot, visible in reversed(group.queries):
                # The query heads that share a K/V head stand where queries stand: each K/V is read once for all of them.
                grouped = q[rows].unflatten(1, (k.shape[1], -1))  # [num_seqs, num_kv_heads, group, head_dim]
                out[rows] = _attention(grouped, k, v, visible, spec, own_sinks).flatten(1, 2)
                if len(group.queries) > 1:
                    for gathered in (k, v):
                        gathered[torch.arange(len(own_slot), device=q.device), :, own_slot] = 0
        return out

    def _plan_prefill(self, runs: Runs, spec: AttentionSpec) -> list[Tensor]:
        """For each sequence: the slots of what its new tokens see."""
        return [
            self._slots(table, torch.arange(_first_seen(seq_len - query_len, spec), seq_len, device=table.device))
            for table, query_len, seq_len in zip(
                runs.block_tables, runs.query_lens_list, runs.seq_lens_list, strict=True
            )
        ]

    def _plan_decode(self, runs: Runs, spec: AttentionSpec) -> list[_Group]:
        """Groups of sequences with as many queries each."""
        device = runs.seq_lens.device
        # The host may know upper bounds alone: where a sequence begins to be seen follows from its length on the device.
        counts = [
            max(query_len, min(seq_len, query_len - 1 + (spec.window or seq_len)))
            for seq_len, query_len in zip(runs.seq_lens_list, runs.query_lens_list, strict=True)
        ]
        groups = list(_groups(counts, runs.query_lens_list))
        plan = []
        for group in groups:
            query_len = runs.query_lens_list[group[0]]
            rows = torch.tensor(group, device=device) if len(groups) > 1 else slice(None)
            lens = runs.seq_lens[rows][:, None]
            # A sequence of length 0 is a padding row: it may get anything.
            own = [(lens - query_len + j).clamp(min=0) for j in range(query_len)]  # position of each query
            first = _first_seen_of_each(own[0], spec)
            positions = first + torch.arange(counts[group[-1]], device=device)
            # Padding repeats a token that all queries see: it is masked, but it must be finite, since NaN times zero is NaN.
            slots = self._slots(runs.block_tables[rows], positions.where(positions <= own[-1], own[0]))
            queries = [
                _Query(
                    runs.query_start_loc[rows].long() + j if len(groups) > 1 else slice(j, None, query_len),
                    (position - first)[:, 0],
                    ((_first_seen_of_each(position, spec) <= positions) & (positions <= position))[:, None, None],
                )
                for j, position in enumerate(own)
            ]
            plan.append(_Group(slots, queries))
        return plan

    def _slots(self, block_tables: Tensor, positions: Tensor) -> Tensor:
        """Slots of token positions, for one block table or one per row."""
        blocks = block_tables.gather(-1, positions // self.block_size)
        return blocks.long() * self.block_size + positions % self.block_size


def _with_scales(numbers: Tensor, scales: Tensor) -> Tensor:
    """Rows of an int8 cache: [..., head_dim] numbers, and behind them the bytes of their scale."""
    return torch.cat((numbers, scales[..., None].view(torch.int8)), -1)


def _gather(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """K or V of slots [num_seqs, seq_len], as [num_seqs, num_kv_heads, seq_len, head_dim] of the dtype of the queries."""
    rows = cache.flatten(0, 1).index_select(0, slots.flatten())  # copies whole rows: faster than general indexing
    if cache.dtype is torch.int8:
        numbers, scales = rows.split((rows.shape[-1] - SCALE_BYTES, SCALE_BYTES), -1)
        rows = dequantize(numbers, scales.contiguous().view(torch.float32)[..., 0], dtype)
    return rows.unflatten(0, slots.shape).transpose(1, 2)


def _first_seen(position: int, spec: AttentionSpec) -> int:
    """The first position that the token at a position sees."""
    return 0 if spec.window is None else max(0, position - spec.window + 1)


def _first_seen_of_each(positions: Tensor, spec: AttentionSpec) -> Tensor:
    """The same for positions in a tensor."""
    return torch.zeros_like(positions) if spec.window is None else (positions - spec.window + 1).clamp(min=0)


def _visible(first: int, last: int, spec: AttentionSpec, device: torch.device) -> Tensor:
    """Which keys the queries at positions [first, last) see: [num_queries, num_keys], from the first that one of them sees."""
    queries = torch.arange(first, last, device=device)[:, None]
    keys = torch.arange(_first_seen(first, spec), last, device=device)
    visible = keys <= queries
    if spec.window is not None:
        visible &= keys > queries - spec.window
    return visible


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None,
    *,
    is_causal: bool = False,
) -> Tensor:
    """Attention of gathered K/V.

    Args:
        q: [num_seqs, num_heads, num_queries, head_dim].
        k, v: [num_seqs, num_kv_heads, num_keys, head_dim].
        visible: which keys each query sees, to be broadcast to [num_seqs, 1, num_queries, num_keys].
        sinks: to be broadcast to [num_heads, num_queries].
        is_causal: there is a query for each key, and `visible` is what the one sees of its own key and those before.
    """
    if not _is_by_definition(spec):
        mask, gqa = None if is_causal else visible, q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=spec.scale, enable_gqa=gqa)
    heads, wide = (k.shape[1], -1), torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("nhgqd,nhkd->nhgqk", q.unflatten(1, heads).to(wide), k.to(wide)) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
    scores = scores.flatten(1, 2).masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(scores.shape[:-1])[..., None].to(wide)), -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].unflatten(1, heads)
    return torch.einsum("nhgqk,nhkd->nhgqd", weights, v.to(wide)).flatten(1, 2).to(q.dtype)


def _is_by_definition(spec: AttentionSpec) -> bool:
    """Whether torch's own function does not compute it."""
    return spec.sinks or spec.soft_cap is not None


def _slice_size(num_keys: int, num_heads: int, spec: AttentionSpec) -> int:
    """How many queries of a prefill are computed at once; with a window, few enough that they see most of each other's keys."""
    most = MAX_SCORES // num_heads if _is_by_definition(spec) else MAX_SCORES
    reach = min(num_keys, spec.window or num_keys)
    if num_keys == reach:
        return max(1, most // max(1, num_keys))
    size = max(reach, SHORT)
    return max(1, min(size, most // (size + reach)))


def _slices(count: int, size: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + size, count)) for first in range(0, count, size))


def _groups(seq_lens: list[int], query_lens: list[int]) -> Iterator[list[int]]:
    """Indices of sequences with as many queries each, shortest first, none padded to more than twice its length."""
    group: list[int] = []
    for i in sorted(range(len(seq_lens)), key=lambda i: (query_lens[i], seq_lens[i])):
        unlike = group and query_lens[i] != query_lens[group[0]]
        too_long = group and seq_lens[i] > max(2 * seq_lens[group[0]], SHORT)
        too_many = group and (len(group) + 1) * seq_lens[i] > MAX_GATHERED_TOKENS
        if unlike or too_long or too_many:
            yield group
            group = []
        group.append(i)
    if group:
        yield group
