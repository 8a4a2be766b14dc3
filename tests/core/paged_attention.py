"""Sequences at shuffled blocks of a pool of NaN, and dense attention in float64 by its definition."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.core.attention import AttentionMetadata, AttentionSpec
from nanoengine.core.torch_attention import TorchAttention

HEAD_DIM = 8
SCALE = 0.3  # not head_dim ** -0.5: the factor that is passed counts
PLAIN = AttentionSpec(SCALE)


def first_seen(position: int, spec: AttentionSpec) -> int:
    """Counted backwards from the token itself, one by one."""
    first = position
    while first > 0 and (spec.window is None or position - first + 1 < spec.window):
        first -= 1
    return first


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, first: int, spec: AttentionSpec = PLAIN, sinks: Tensor | None = None
) -> Tensor:
    """Query j stands at position first + j. One sequence, float64, token by token, head by head."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for j in range(q.shape[0]):
        seen = slice(first_seen(first + j, spec), first + j + 1)
        for head in range(q.shape[1]):
            scores = k[seen, head // group] @ q[j, head] * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
            weights = scores.exp()
            total = weights.sum() if sinks is None else weights.sum() + sinks[head].double().exp()
            out[j, head] = weights / total @ v[seen, head // group]
    return out


class Paged:
    """Random sequences in a NaN-filled pool, at shuffled blocks."""

    def __init__(
        self,
        seq_lens: list[int],
        block_size: int,
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        seed: int = 0,
        spec: AttentionSpec = PLAIN,
        backend: type[TorchAttention] = TorchAttention,
    ):
        generator = torch.Generator().manual_seed(seed)
        self.block_size = block_size
        self.num_heads = num_heads
        self.seq_lens = seq_lens
        self.generator = generator
        self.backend = backend(block_size)
        counts = [math.ceil(n / block_size) for n in seq_lens]
        blocks = list(range(1, sum(counts) + 3))
        random.Random(seed).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(count)] for count in counts]
        shape = self.backend.kv_shape(sum(counts) + 3, num_kv_heads, HEAD_DIM)
        self.k_cache = torch.full(shape, float("nan"))
        self.v_cache = torch.full(shape, float("nan"))
        self.k = [torch.randn(n, num_kv_heads, HEAD_DIM, generator=generator) for n in seq_lens]
        self.v = [torch.randn(n, num_kv_heads, HEAD_DIM, generator=generator) for n in seq_lens]
        self.spec = spec
        self.sinks = torch.randn(num_heads, generator=generator) if spec.sinks else None

    def slots(self, i: int, start: int, end: int) -> list[int]:
        size = self.block_size
        return [self.tables[i][p // size] * size + p % size for p in range(start, end)]

    def write(self, starts: list[int], ends: list[int]) -> list[int]:
        """Write the K/V of positions starts[i] to ends[i] of every sequence; returns the slots."""
        spans = list(enumerate(zip(starts, ends, strict=True)))
        slots = [slot for i, (start, end) in spans for slot in self.slots(i, start, end)]
        k = torch.cat([self.k[i][start:end] for i, (start, end) in spans])
        v = torch.cat([self.v[i][start:end] for i, (start, end) in spans])
        self.backend.write_kv(k, v, self.k_cache, self.v_cache, torch.tensor(slots, dtype=torch.int64))
        return slots

    def forget(self, starts: list[int]) -> None:
        """NaN in all that no token of sequence i sees from starts[i] on."""
        for i, start in enumerate(starts):
            slots = self.slots(i, 0, first_seen(start, self.spec))
            for cache in (self.k_cache, self.v_cache):
                cache.flatten(0, 1)[slots] = float("nan")

    def metadata(self, num_decodes: int, starts: list[int], ends: list[int], slots: list[int]) -> AttentionMetadata:
        lens = [end - start for start, end in zip(starts, ends, strict=True)]
        tables = [table[: math.ceil(end / self.block_size)] for table, end in zip(self.tables, ends, strict=True)]
        for table, start in zip(tables, starts, strict=True):
            unseen = first_seen(start, self.spec) // self.block_size
            table[:unseen] = [0] * unseen
        width = max(map(len, tables))
        return AttentionMetadata(
            kv_cache=[(self.k_cache, self.v_cache)],
            slot_mapping=torch.tensor(slots),
            num_decodes=num_decodes,
            query_start_loc=torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
            query_lens_list=lens,
            seq_lens_list=ends,
        )

    def prefill(self, starts: list[int], ends: list[int]) -> tuple[Tensor, Tensor]:
        return self.mixed(0, starts, ends)

    def decode(self, starts: list[int], ends: list[int]) -> tuple[Tensor, Tensor]:
        return self.mixed(len(ends), starts, ends)

    def mixed(self, num_decodes: int, starts: list[int], ends: list[int]) -> tuple[Tensor, Tensor]:
        """Write positions starts[i] to ends[i], attend from them; returns what the backend says and what is right."""
        metadata = self.metadata(num_decodes, starts, ends, self.write(starts, ends))
        queries = [
            torch.randn(end - start, self.num_heads, HEAD_DIM, generator=self.generator)
            for start, end in zip(starts, ends, strict=True)
        ]
        self.forget(starts)
        out = self.backend.attend(torch.cat(queries), self.k_cache, self.v_cache, metadata, self.spec, self.sinks)
        expected = [
            dense_attention(q, self.k[i][:end], self.v[i][:end], start, self.spec, self.sinks)
            for i, (q, start, end) in enumerate(zip(queries, starts, ends, strict=True))
        ]
        return out, torch.cat(expected)


def assert_equal(out: Tensor, expected: Tensor) -> None:
    assert out.shape == expected.shape
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def attention_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(sequences, queries of each, keys of each) of every call of torch's attention from now on."""
    calls: list[tuple[int, int, int]] = []
    attend = F.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, *rest: Tensor, **options: object) -> Tensor:
        calls.append((k.shape[0], q.shape[2], k.shape[2]))
        return attend(q, k, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    return calls
