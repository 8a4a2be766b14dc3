"""Paged memory of any size, made on the device that is tested, and what attention over it is in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from nanoengine.attention.triton import TritonAttention
from nanoengine.core.attention import AttentionMetadata, AttentionSpec
from tests.attention.paged import PLAIN, Heads, first_seen
from tests.kernels.formulas import DEVICE

PRODUCTION = Heads(8, 2, 128)
SMALL = Heads(2, 2, 32)
BLOCK_SIZE = 16
TOLERANCE = 0.01
"""Error of a head's result, relative to its size: weights and results are rounded to bfloat16, each to 0.1 % on average."""


class PagedMemory:
    """Random K and V of some sequences in bfloat16, written by the backend at shuffled blocks, the last ones of a pool of NaN.

    Args:
        num_blocks: of the pool; None: a few more than there have to be.
        spec: what is computed beside what heads of that size ask for anyway; block 0 then stands before all that is seen.
    """

    def __init__(
        self,
        heads: Heads,
        lens: Sequence[int],
        num_blocks: int | None = None,
        seed: int = 0,
        spec: AttentionSpec = PLAIN,
    ):
        self.spec = replace(spec, scale=heads.dim**-0.5)
        self.heads, self.lens, self.backend = heads, list(lens), TritonAttention(BLOCK_SIZE)
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        counts = [-(-n // BLOCK_SIZE) for n in lens]
        self.num_blocks = num_blocks or sum(counts) + 3
        shape = self.backend.kv_shape(self.num_blocks, heads.num, heads.dim)
        self.caches = [torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
        shuffled = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed))
        blocks = (self.num_blocks - 1 - shuffled).to(torch.int32)
        tables = torch.zeros(len(counts), max(counts) + 2, dtype=torch.int32)
        for table, count, own in zip(tables, counts, blocks.split(counts), strict=True):
            table[:count] = own
        self.tables = tables.to(DEVICE)
        self.sinks = self.random(heads.num * heads.group).float() if spec.sinks else None
        self.k, self.v = [], []
        for i, n in enumerate(lens):
            self.k.append(self.random(n, heads.num, heads.dim))
            self.v.append(self.random(n, heads.num, heads.dim))
            self.backend.write_kv(self.k[i], self.v[i], *self.caches, self.slots(i))

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=DEVICE).bfloat16()

    def slots(self, i: int) -> Tensor:
        position = torch.arange(self.lens[i], device=DEVICE)
        return self.tables[i].long()[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def attend(self, q: Tensor, query_lens: Sequence[int]) -> Tensor:
        """Of the last tokens of each sequence, by the kernels that the engine would use."""
        starts = list(accumulate(query_lens, initial=0))
        tables = self.tables.clone()
        for table, seq_len, query_len in zip(tables, self.lens, query_lens, strict=True):
            table[: first_seen(seq_len - query_len, self.spec) // BLOCK_SIZE] = 0
        metadata = AttentionMetadata(
            kv_cache=[(self.caches[0], self.caches[1])],
            slot_mapping=torch.empty(0, dtype=torch.int64, device=DEVICE),
            num_decodes=len(self.lens) if max(query_lens) == 1 else 0,
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
            seq_lens=torch.tensor(self.lens, dtype=torch.int32, device=DEVICE),
            block_tables=tables,
            query_lens_list=list(query_lens),
            seq_lens_list=self.lens,
        )
        return self.backend.attend(q, *self.caches, metadata, self.spec, self.sinks)

    def exact(self, i: int, q: Tensor) -> Tensor:
        """What the last tokens of sequence i, whose queries [count, num_heads, head_dim] these are, get from what each sees."""
        heads, spec, start = self.heads, self.spec, self.lens[i] - len(q)
        queries = q.double().view(len(q), heads.num, heads.group, heads.dim) * spec.scale
        scores = torch.einsum("qhgd,thd->hgqt", queries, self.k[i].double())
        if spec.soft_cap is not None:
            scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
        position = torch.arange(self.lens[i], device=DEVICE)
        first = torch.tensor([first_seen(start + j, spec) for j in range(len(q))], device=DEVICE)
        unseen = (position[None, :] > position[start:, None]) | (position[None, :] < first[:, None])
        scores.masked_fill_(unseen, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double().view(heads.num, heads.group, 1, 1).expand(-1, -1, len(q), -1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : self.lens[i]]
        return torch.einsum("hgqt,thd->qhgd", weights, self.v[i].double()).reshape(q.shape)

    def check(self, query_lens: Sequence[int]) -> None:
        """Attention of the last tokens of each sequence, against float64."""
        q = self.random(sum(query_lens), self.heads.num * self.heads.group, self.heads.dim)
        found = self.attend(q, query_lens).split(list(query_lens))
        for i, queries in enumerate(q.split(list(query_lens))):
            exact = self.exact(i, queries)
            error = (found[i].double() - exact).norm(dim=-1) / exact.norm(dim=-1)
            assert error.max() <= TOLERANCE, (
                f"sequence {i} of {self.lens[i]} tokens: {error.max():.3} off"
            )  # not if NaN
