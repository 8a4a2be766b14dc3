"""Random sequences at shuffled blocks, a cache full of NaN for each backend that gets them, and attention by its definition."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoengine.core.attention import AttentionMetadata, AttentionSpec, KVLayer
from nanoengine.core.layers import PagedAttention, RMSNorm
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.kernels.reference.kv_int8 import dequantize, quantize
from nanoengine.kernels.reference.operations import TorchKernels
from nanoengine.models.layers.attention import Attention
from nanoengine.models.layers.factory import Factory
from tests.support import angles_at

EPS = 1e-6
THETA = 10_000.0

ROUNDING = {torch.float32: 2e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Largest relative error of what is rounded."""

WEIGHTS = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}
"""Largest relative error of a weight."""

OF_NUMBERS = 2.0**-11
"""The same, where queries and weights become whole numbers of 16 bits for a cache of bytes; of a weight that is much smaller than
the largest one, it is the error relative to that."""

PLAIN = AttentionSpec(1.0)

NOBODYS = 1 << 30
"""A block that there is not: nobody may look it up."""


@dataclass(frozen=True)
class Heads:
    """How many K/V heads there are, the query heads that share one, and the size of each."""

    num: int
    group: int
    dim: int


class Sequences:
    """The projections of all their tokens, and the blocks that they have in every pool. Block 0 is none of theirs.

    Args:
        shared: leading blocks that the other sequences share with the first, and with them the tokens.
        num_blocks: of the pool, whose last ones they have; None: a few more than there have to be.
    """

    def __init__(
        self,
        heads: Heads,
        block_size: int,
        seq_lens: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        seed: int = 0,
        shared: int = 0,
        num_blocks: int | None = None,
    ):
        generator = torch.Generator(torch.get_default_device()).manual_seed(seed)

        def drawn(draw: Callable[..., Tensor], *shape: int) -> Tensor:
            return draw(shape, generator=generator)

        self.heads = heads
        self.block_size = block_size
        self.dtype = dtype
        self.lens = list(seq_lens)
        width = (heads.group + 2) * heads.num * heads.dim
        self.num_shared = shared * block_size
        self.qkv = [drawn(torch.randn, n, width).to(dtype) for n in self.lens]
        self.sinks = drawn(torch.randn, heads.num * heads.group)
        self.norms = [(drawn(torch.rand, heads.dim) + 0.5).to(dtype) for _ in range(2)]
        counts = [math.ceil(n / block_size) for n in self.lens]
        self.num_blocks = num_blocks or sum(counts) + 3
        blocks = list(range(self.num_blocks - sum(counts) if num_blocks else 1, self.num_blocks))
        random.Random(seed).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(count)] for count in counts]
        for i in range(1, len(self.lens) if shared else 0):
            self.tables[i][:shared] = self.tables[0][:shared]
            self.qkv[i][: shared * block_size] = self.qkv[0][: shared * block_size]

    def slots(self, i: int, start: int, end: int) -> list[int]:
        size = self.block_size
        return [self.tables[i][p // size] * size + p % size for p in range(start, end)]


class Pool:
    """A layer over one backend and its cache, where nothing is but NaN until it is written.

    Args:
        norms, rotated: whether the layer has norms, and whether it rotates.
        one_go: False: the layer must not use what the backend offers beside `write_kv`.
        quantized: whether the cache is int8.
        spec: what it attends with, but for the scale; what nobody can see any more is then NaN, and its blocks are in no table.
    """

    def __init__(
        self,
        sequences: Sequences,
        backend: AttentionBackend,
        *,
        norms: bool = True,
        rotated: bool = True,
        one_go: bool = True,
        quantized: bool = False,
        spec: AttentionSpec = PLAIN,
    ):
        self.sequences = sequences
        self.spec = spec
        self.sinks = sequences.sinks if spec.sinks else None
        self.backend = backend
        self.dtype = sequences.dtype
        self.quantized, self.rotated = quantized, rotated
        heads = sequences.heads
        backend.quantized = quantized
        num_blocks, *rest = backend.kv_shape(sequences.num_blocks, heads.num, heads.dim)
        nan, dtype = (-1, torch.int8) if quantized else (float("nan"), self.dtype)  # a scale of such bytes is NaN
        if backend.block_major:  # between two layers that nobody may touch
            self.memory = torch.full((num_blocks, 3, 2, *rest), nan, dtype=dtype)
            self.k_cache, self.v_cache = self.memory[:, 1, 0], self.memory[:, 1, 1]
        else:
            self.memory = torch.full((2, num_blocks, *rest), nan, dtype=dtype)
            self.k_cache, self.v_cache = self.memory
        self.norms = [_norm(weight.float()) for weight in sequences.norms] if norms else []
        layer = Attention if one_go else PagedAttention
        config: Any = SimpleNamespace(num_kv_heads=heads.num, head_dim=heads.dim)
        self.layer = layer(0, config, AttentionSpec(1.0), backend, *self.norms)

    @property
    def multiplies_numbers(self) -> bool:
        """Whether numbers of the cache are multiplied as they are: no dtype rounds them."""
        return self.quantized and self.backend.name == "native"

    @property
    def kv(self) -> KVLayer:
        return self.k_cache, self.v_cache

    def write(self, qkv: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        angles = angles_at(positions, self.sequences.heads.dim, THETA) if self.rotated else None
        return self.layer.write(qkv, angles, self.kv, slots)

    def write_span(self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Write tokens starts[j] to ends[j] of sequence rows[j], for every j; returns their queries."""
        spans = list(zip(rows, starts, ends, strict=True))
        qkv = torch.cat([self.sequences.qkv[i][start:end] for i, start, end in spans])
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        slots = torch.tensor([slot for i, start, end in spans for slot in self.sequences.slots(i, start, end)])
        return self.write(qkv, positions, slots)

    def forget(self, rows: Sequence[int], starts: Sequence[int]) -> None:
        """NaN in all tokens that none of sequence rows[j] sees from starts[j] on, where there are such."""
        for i, start in zip(rows, starts, strict=True):
            slots = self.sequences.slots(i, 0, first_visible(start, self.spec))
            if slots:
                nan = torch.full_like(self.sequences.qkv[i][: len(slots)], float("nan"), dtype=self.dtype)
                self.write(nan, torch.arange(len(slots)), torch.tensor(slots))

    def metadata(
        self, num_decodes: int, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> AttentionMetadata:
        lens = [end - start for start, end in zip(starts, ends, strict=True)]
        tables = [
            self.sequences.tables[i][: math.ceil(end / self.sequences.block_size)]
            for i, end in zip(rows, ends, strict=True)
        ]
        for table, start in zip(tables, starts, strict=True):
            unseen = first_visible(start, self.spec) // self.sequences.block_size
            table[:unseen] = [NOBODYS] * unseen
        width = max(map(len, tables))
        return AttentionMetadata(
            kv_cache=[self.kv],
            slot_mapping=torch.empty(0, dtype=torch.int64),
            num_decodes=num_decodes,
            query_start_loc=torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor(list(ends), dtype=torch.int32),
            block_tables=torch.tensor(
                [table + [NOBODYS] * (width - len(table)) for table in tables], dtype=torch.int32
            ),
            query_lens_list=lens,
            seq_lens_list=list(ends),
        )

    def attend(
        self, num_decodes: int, q: Tensor, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> Tensor:
        metadata = self.metadata(num_decodes, rows, starts, ends)
        return self.backend.attend(q, self.kv, metadata, self.spec, self.sinks)

    def step(
        self, num_decodes: int, starts: Sequence[int], ends: Sequence[int], rows: Sequence[int] | None = None
    ) -> Tensor:
        """Write tokens starts[j] to ends[j] of sequence rows[j], and let them attend to all up to them. The first runs are
        decodes: of one token each, or a few."""
        rows = rows if rows is not None else range(len(starts))
        q = self.write_span(rows, starts, ends)
        self.forget(rows, starts)
        return self.attend(num_decodes, q, rows, starts, ends)

    def fill(self, ends: Sequence[int] | None = None) -> None:
        """Write the first ends[i] tokens of every sequence i, or all but its last one; of blocks that are shared, the first
        sequence alone."""
        ends = [n - 1 for n in self.sequences.lens] if ends is None else ends
        shared = self.sequences.num_shared
        spans = [(i, shared if i else 0, end) for i, end in enumerate(ends) if end > (shared if i else 0)]
        if spans:
            self.write_span(*zip(*spans, strict=True))

    def exact(self, starts: Sequence[int], ends: Sequence[int], rows: Sequence[int] | None = None) -> Exact:
        """What these tokens see, by the definition of attention, in float64; q, K and V are rounded to the dtype before."""
        rows = rows if rows is not None else range(len(starts))
        runs = [self._exact(*run) for run in zip(rows, starts, ends, strict=True)]
        weights = max(WEIGHTS[self.dtype], OF_NUMBERS if self.multiplies_numbers else 0.0)
        return Exact(*map(torch.cat, zip(*runs, strict=True)), weights)

    def _exact(self, row: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        heads, spec, first = self.sequences.heads, self.spec, first_visible(start, self.spec)
        q, k, v = self._projected(row, end)
        q, k = (self._turned(x, i).to(self.dtype).double() for i, x in enumerate((q, k)))
        if self.quantized:
            read = torch.float32 if self.multiplies_numbers else self.dtype
            k, v = (dequantize(*quantize(x.to(self.dtype)), read).double() for x in (k, v))
        k, v = (x[first:].repeat_interleave(heads.group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start:], k) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
        own, seen = torch.arange(start, end)[:, None], torch.arange(first, end)
        visible = (seen <= own) & (seen >= torch.tensor([first_visible(i, spec) for i in range(start, end)])[:, None])
        scores = scores.masked_fill(~visible, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, end - start, 1)), 2)
        weights = scores.softmax(2)[..., : len(seen)]
        magnitude = torch.einsum("hqk,khd->qhd", weights, v.abs())
        if self.multiplies_numbers:
            magnitude += (weights * v.abs().amax(2).T[:, None]).amax(2).T[:, :, None]
        return torch.einsum("hqk,khd->qhd", weights, v), magnitude

    def exact_queries(self, row: int, end: int) -> Tensor:
        """[end, num_heads, head_dim]: those of the first tokens of a sequence, not rounded."""
        return self._turned(self._projected(row, end)[0], 0)

    def _projected(self, row: int, end: int) -> tuple[Tensor, ...]:
        heads = self.sequences.heads
        qkv = self.sequences.qkv[row][:end].double().unflatten(1, (-1, heads.dim))
        return qkv.split((heads.num * heads.group, heads.num, heads.num), 1)

    def _turned(self, x: Tensor, which: int) -> Tensor:
        """q or k of the first tokens of a sequence, normed and rotated as the layer is told."""
        if self.norms:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.norms[which].weight.double()
        if not self.rotated:
            return x
        cos, sin = (part.double() for part in angles_at(torch.arange(len(x)), x.shape[2], THETA))
        first, second = x.chunk(2, 2)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), 2)


def first_visible(position: int, spec: AttentionSpec) -> int:
    """The first token that the one at a position sees."""
    if spec.window is None:
        return 0
    return position // spec.window * spec.window if spec.chunked else max(0, position - spec.window + 1)


class Exact(NamedTuple):
    """The results of attention, what the magnitudes of V would have made of them, and the largest relative error of a weight."""

    out: Tensor
    magnitude: Tensor
    weights: float


def assert_attended(out: Tensor, exact: Exact, looser: int = 1) -> None:
    """`out` is exact, up to the rounding of the result and of the weights."""
    assert out.shape == exact.out.shape
    error = (out.double() - exact.out).abs()
    allowed = looser * (ROUNDING[out.dtype] * exact.out.abs() + exact.weights * exact.magnitude)
    assert (error <= allowed).all(), (
        f"{(error / allowed).nan_to_num(torch.inf).max():.3} times the error that is allowed"
    )


def _norm(weight: Tensor) -> RMSNorm:
    norm = RMSNorm(Factory(TorchKernels(), weight.dtype, weight.device), len(weight), EPS)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm
