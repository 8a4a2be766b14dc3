"""Paged attention in plain torch with all that a layer may ask for: the oracle that other backends are tested against.

Unwritten slots may hold anything, NaN included, and so may those that a window has left behind: nothing here reads a slot that no
query sees.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.core.attention import AttentionSpec, KVLayer, Runs
from nanoengine.core.torch_attention import CausalTorchAttention
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.kernels.reference.kv_int8 import SCALE_BYTES, dequantize, quantize

MAX_SCORES = 1 << 24
"""Most scores of a head that a prefill computes at once."""

MAX_GATHERED_TOKENS = 1 << 17
"""Most tokens of K/V that a decode copies out of the cache at once, padding included."""

SHORT = 64
"""Sequences up to this length are never worth a separate group."""


class TorchAttention(CausalTorchAttention, AttentionBackend):
    """The reference: the core's, with windows, sinks, soft caps, int8 K/V and decodes of several tokens."""

    features = frozenset({"window", "chunked", "sinks", "soft_cap"})
    quantizes = True
    row_dimensions = 2

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        return None

    def kv_shape(self, num_blocks: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks, self.block_size, num_kv_heads, head_dim + SCALE_BYTES * self.quantized)

    def write_kv(self, k: Tensor, v: Tensor, kv: KVLayer, slot_mapping: Tensor) -> None:
        if kv[0].dtype is torch.int8:
            k, v = (_with_scales(*quantize(rows)) for rows in (k, v))
        super().write_kv(k, v, kv, slot_mapping)

    def prefill(self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        """Each sequence by itself, in slices of its queries: its new tokens against the keys that they see."""
        out, start = torch.empty_like(q), 0
        for table, query_len, seq_len in zip(runs.block_tables, runs.query_lens_list, runs.seq_lens_list, strict=True):
            history = max(0, seq_len - query_len)  # of a padding row, too, which sees nothing
            origin = _first_seen(history, spec)  # position of the first key that is gathered
            slots = self.slots(table, torch.arange(origin, seq_len, dtype=torch.int64, device=q.device))[None]
            k, v = (_gather(cache, slots, q.dtype) for cache in kv)
            size = _slice_size(seq_len - origin, q.shape[1], spec)
            for first in range(history, seq_len, size):
                last, seen = min(first + size, seq_len), _first_seen(first, spec)
                visible = None  # the queries see each other, and no more
                if seen < first or _first_seen(last - 1, spec) > first:
                    queries, keys = (torch.arange(i, last, dtype=torch.int64, device=q.device) for i in (first, seen))
                    visible = _visible(queries[:, None], keys, spec)
                rows = slice(start + first - history, start + last - history)
                k_seen, v_seen = (each[:, :, seen - origin : last - origin] for each in (k, v))
                attended = _attention(q[rows].transpose(0, 1)[None], k_seen, v_seen, visible, spec, sinks)
                out[rows] = attended[0].transpose(0, 1)
            start += query_len
        return out

    def decode(self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        """Those sequences at once that see about as much, padded to the one that sees most. Each of several tokens of a run is
        decoded as a sequence that ends with it.
        """
        if runs.longest > 1:
            if runs.plan is None:
                runs.plan = _one_token_each(runs)
            runs = runs.plan
        if runs.plan is None:
            runs.plan = self._plan_decode(runs, spec)
        out = torch.empty_like(q)
        for rows, slots, visible in runs.plan:
            k, v = (_gather(cache, slots, q.dtype) for cache in kv)
            # The query heads that share a K/V head stand where queries stand: each K/V is read once for all of them.
            grouped = q[rows].unflatten(1, (k.shape[1], -1))  # [num_seqs, num_kv_heads, group, head_dim]
            out[rows] = _attention(grouped, k, v, visible, spec, sinks).flatten(1, 2)
        return out

    def _plan_decode(self, runs: Runs, spec: AttentionSpec) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each group its rows, the slots [num_seqs, count] that are gathered, and which of these are seen."""
        device, plan = runs.seq_lens.device, []
        # The host may know upper bounds alone: what is seen follows from the lengths on the device.
        counts = [max(1, min(seq_len, spec.window or seq_len)) for seq_len in runs.seq_lens_list]
        for group in _groups(counts):
            rows = torch.tensor(group, dtype=torch.int64, device=device)
            most = torch.arange(counts[group[-1]], dtype=torch.int64, device=device)
            query_at = (runs.seq_lens[rows][:, None] - 1).clamp(
                min=0
            )  # position of each query; a padding row has length 0
            positions = (query_at + 1 - len(most)).clamp(min=0) + most
            seen = _visible(query_at, positions, spec)
            # Padding repeats the query's token: it is masked, but it must be finite, since NaN times zero is NaN.
            slots = self.slots(runs.block_tables[rows], positions.where(seen, query_at))
            plan.append((rows, slots, seen[:, None, None]))
        return plan


def _first_seen(position: int, spec: AttentionSpec) -> int:
    """The first position that the token at a position sees."""
    if spec.window is None:
        return 0
    return position - position % spec.window if spec.chunked else max(0, position - spec.window + 1)


def _visible(queries: Tensor, keys: Tensor, spec: AttentionSpec) -> Tensor:
    """Whether the tokens at positions [num_queries, 1] see those at positions [num_keys]."""
    visible = keys <= queries
    if spec.window is None:
        return visible
    return visible & (keys >= queries - (queries % spec.window if spec.chunked else spec.window - 1))


def _slice_size(num_keys: int, num_heads: int, spec: AttentionSpec) -> int:
    """How many queries of a prefill are computed at once. With a window, few enough that they see most of each other's keys."""
    most = MAX_SCORES // num_heads if _is_by_definition(spec) else MAX_SCORES
    reach = min(num_keys, spec.window or num_keys)
    if num_keys == reach:
        return max(1, most // max(1, num_keys))
    size = max(reach, SHORT)
    return max(1, min(size, most // (size + reach)))


def _gather(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """K or V of slots [num_seqs, count], as [num_seqs, num_kv_heads, count, head_dim] of the dtype of the queries."""
    rows = cache.flatten(0, 1).index_select(0, slots.flatten())  # copies whole rows: faster than general indexing
    rows = rows.unflatten(0, slots.shape).transpose(1, 2)
    if cache.dtype is not torch.int8:
        return rows
    numbers, scales = rows.transpose(1, 2).split((rows.shape[-1] - SCALE_BYTES, SCALE_BYTES), -1)
    return dequantize(numbers, scales.contiguous().view(torch.float32)[..., 0], dtype).transpose(1, 2)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Attention of gathered K/V: q and the result are [num_seqs, num_heads, num_queries, head_dim], k and v [num_seqs,
    num_kv_heads, num_keys, head_dim]. In a decode, the query heads of a K/V head stand as queries of that one head. Where
    torch's function lacks a feature, it is computed as the definition says.

    Args:
        visible: which keys each query sees, to be broadcast to [num_seqs, 1, num_queries, num_keys]. None: there is a
            query for each key, and each sees its key and those before it.
    """
    if not _is_by_definition(spec):
        is_causal, gqa = visible is None, q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, visible, is_causal=is_causal, scale=spec.scale, enable_gqa=gqa)
    if visible is None:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    heads, wide = (k.shape[1], -1), torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("nhgqd,nhkd->nhgqk", q.unflatten(1, heads).to(wide), k.to(wide)) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
    scores = scores.flatten(1, 2).masked_fill(~visible, -torch.inf)
    if sinks is not None:
        sink_logits = sinks.view(q.shape[1], -1)  # of each head, and in a decode of each that shares its K/V
        scores = torch.cat((scores, sink_logits.expand(scores.shape[:-1])[..., None].to(wide)), -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].unflatten(1, heads)
    return torch.einsum("nhgqk,nhkd->nhgqd", weights, v.to(wide)).flatten(1, 2).to(q.dtype)


def _groups(counts: list[int]) -> Iterator[list[int]]:
    """Indices of sequences, those that see the fewest tokens first, none padded to more than twice its count."""
    group: list[int] = []
    for i in sorted(range(len(counts)), key=counts.__getitem__):
        too_long = group and counts[i] > max(2 * counts[group[0]], SHORT)
        too_many = group and (len(group) + 1) * counts[i] > MAX_GATHERED_TOKENS
        if too_long or too_many:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _with_scales(numbers: Tensor, scales: Tensor) -> Tensor:
    """Rows of an int8 cache: [..., head_dim] numbers, and behind them the bytes of their scale."""
    return torch.cat((numbers, scales[..., None].view(torch.int8)), -1)


def _is_by_definition(spec: AttentionSpec) -> bool:
    """Whether torch's function does not compute it."""
    return spec.sinks or spec.soft_cap is not None


def _one_token_each(runs: Runs) -> Runs:
    """The same tokens, each as a separate run."""
    device, counts = runs.seq_lens.device, runs.query_lens_list
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    later = [count - 1 - j for count in counts for j in range(count)]  # tokens of its run behind each
    of_row = torch.tensor(rows, dtype=torch.int64, device=device)
    return Runs(
        query_start_loc=torch.arange(len(rows) + 1, dtype=torch.int32, device=device),
        seq_lens=runs.seq_lens[of_row] - torch.tensor(later, dtype=torch.int32, device=device),
        block_tables=runs.block_tables[of_row],
        query_lens_list=[1] * len(rows),
        seq_lens_list=[runs.seq_lens_list[row] - count for row, count in zip(rows, later, strict=True)],
    )
