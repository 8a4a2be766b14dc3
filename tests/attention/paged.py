"""Random sequences at shuffled blocks, a cache full of NaN for each backend that is given them, and what is exact."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanoengine.attention.backend import AttentionBackend
from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.core.attention import AttentionMetadata, AttentionSpec
from nanoengine.core.layers import Attention, RMSNorm
from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.layers.factory import Factory
from tests.support import angles_at

EPS = 1e-6
THETA = 10_000.0

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
"""Largest relative error of what is rounded."""

WEIGHTS = {torch.float32: 5e-5, torch.bfloat16: 0.025}
"""Error of a sum of values of size 1 by equal weights, each of them rounded, times the root of their number."""


PLAIN = AttentionSpec(1.0)


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
    ):
        generator = torch.Generator().manual_seed(seed)
        self.heads = heads
        self.block_size = block_size
        self.dtype = dtype
        self.lens = list(seq_lens)
        width = (heads.group + 2) * heads.num * heads.dim
        self.qkv = [torch.randn(n, width, generator=generator).to(dtype) for n in self.lens]
        self.sinks = torch.randn(heads.num * heads.group, generator=torch.Generator().manual_seed(seed))
        self.norms = [(torch.rand(heads.dim, generator=generator) + 0.5).to(dtype) for _ in range(2)]
        counts = [math.ceil(n / block_size) for n in self.lens]
        self.num_blocks = sum(counts) + 3
        blocks = list(range(1, self.num_blocks))
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
        dtype: of the cache, of the projections that the layer gets, and of the norms.
        norms, rotated: whether the layer has norms, and whether it rotates.
        one_go: False: the layer must not use what the backend offers beside `write_kv`.
        quantized: whether the cache is int8.
        spec: what it attends with, but for the scale; what nobody can see any more is then NaN, and its blocks are in no table.
    """

    def __init__(
        self,
        sequences: Sequences,
        backend: AttentionBackend,
        dtype: torch.dtype | None = None,
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
        self.dtype = dtype or sequences.dtype
        heads = sequences.heads
        num_blocks, *rest = backend.kv_shape(sequences.num_blocks, heads.num, heads.dim, quantized=quantized)
        nan, dtype = (-1, torch.int8) if quantized else (float("nan"), self.dtype)  # a scale of such bytes is NaN
        if backend.block_major:  # between two layers that nobody may touch
            self.memory = torch.full((num_blocks, 3, 2, *rest), nan, dtype=dtype)
            self.k_cache, self.v_cache = self.memory[:, 1, 0], self.memory[:, 1, 1]
        else:
            self.memory = torch.full((2, num_blocks, *rest), nan, dtype=dtype)
            self.k_cache, self.v_cache = self.memory
        wide = torch.promote_types(self.dtype, torch.float32)  # of weights of norms: float32 at least
        self.norms = [_norm(weight.to(self.dtype).to(wide)) for weight in sequences.norms] if norms else []
        self.rotated = rotated
        self.layer = Attention(0, heads.num, heads.dim, AttentionSpec(1.0), backend, *self.norms)
        if not one_go:
            self.layer.rotate_and_write = None

    def write(self, qkv: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        angles = angles_at(positions, self.sequences.heads.dim, THETA) if self.rotated else None
        return self.layer.write(qkv, angles, self.k_cache, self.v_cache, slots)

    def write_span(self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Write tokens starts[j] to ends[j] of sequence rows[j], for every j; returns their queries."""
        spans = list(zip(rows, starts, ends, strict=True))
        qkv = torch.cat([self.sequences.qkv[i][start:end] for i, start, end in spans]).to(self.dtype)
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        slots = torch.tensor([slot for i, start, end in spans for slot in self.sequences.slots(i, start, end)])
        return self.write(qkv, positions, slots)

    def forget(self, rows: Sequence[int], starts: Sequence[int]) -> None:
        """NaN in all tokens that none of sequence rows[j] sees from starts[j] on, where there are such."""
        for i, start in zip(rows, starts, strict=True):
            slots = self.sequences.slots(i, 0, first_seen(start, self.spec))
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
            unseen = first_seen(start, self.spec) // self.sequences.block_size
            table[:unseen] = [0] * unseen
        width = max(map(len, tables))
        return AttentionMetadata(
            kv_cache=[(self.k_cache, self.v_cache)],
            slot_mapping=torch.empty(0, dtype=torch.int64),
            num_decodes=num_decodes,
            query_start_loc=torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor(list(ends), dtype=torch.int32),
            block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            query_lens_list=lens,
            seq_lens_list=list(ends),
        )

    def attend(
        self,
        num_decodes: int,
        q: Tensor,
        rows: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        scale: float | None = None,
    ) -> Tensor:
        scale = 0.9 * self.sequences.heads.dim**-0.5 if scale is None else scale  # what is passed counts
        metadata = self.metadata(num_decodes, rows, starts, ends)
        return self.backend.attend(q, self.k_cache, self.v_cache, metadata, replace(self.spec, scale=scale), self.sinks)

    def prefill(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        rows: Sequence[int] | None = None,
        *,
        scale: float | None = None,
    ) -> Tensor:
        """Write tokens starts[j] to ends[j] of sequence rows[j], and let them attend to all up to them."""
        return self.mixed(0, starts, ends, rows, scale=scale)

    def mixed(
        self,
        num_decodes: int,
        starts: Sequence[int],
        ends: Sequence[int],
        rows: Sequence[int] | None = None,
        *,
        scale: float | None = None,
    ) -> Tensor:
        """The same, where the first runs are decodes: of one token each, or a few."""
        rows = rows if rows is not None else range(len(starts))
        q = self.write_span(rows, starts, ends)
        self.forget(rows, starts)
        return self.attend(num_decodes, q, rows, starts, ends, scale)

    def decode(self, ends: Sequence[int], rows: Sequence[int] | None = None, *, scale: float | None = None) -> Tensor:
        """The same for token ends[j] - 1 alone."""
        return self.mixed(len(ends), [end - 1 for end in ends], ends, rows, scale=scale)

    def fill(self, ends: Sequence[int] | None = None) -> None:
        """Write the first ends[i] tokens of every sequence i; all but its last one if nothing is said."""
        ends = [n - 1 for n in self.sequences.lens] if ends is None else ends
        rows = [i for i, end in enumerate(ends) if end]
        if rows:
            self.write_span(rows, [0] * len(rows), [ends[i] for i in rows])


class Exact(TorchAttention):
    """The reference in float64, q and K rounded once to the dtype that is tested."""

    def __init__(self, block_size: int, dtype: torch.dtype):
        super().__init__(block_size)
        self.dtype = dtype

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        super().write_kv(k.to(self.dtype).double(), v, k_cache, v_cache, slot_mapping)

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return super().attend(q.to(self.dtype).double(), k_cache, v_cache, metadata, spec, sinks)


def exact_pool(sequences: Sequences, *, norms: bool = True, rotated: bool = True, spec: AttentionSpec = PLAIN) -> Pool:
    backend = Exact(sequences.block_size, sequences.dtype)
    return Pool(sequences, backend, torch.float64, norms=norms, rotated=rotated, spec=spec)


def first_seen(position: int, spec: AttentionSpec) -> int:
    """The first token that the one at a position sees."""
    return 0 if spec.window is None else max(0, position - spec.window + 1)


def assert_attended(
    out: Tensor, exact: Tensor, starts: Sequence[int], ends: Sequence[int], spec: AttentionSpec = PLAIN
) -> None:
    """`out` is `exact`, up to the rounding of the result and of the weights: query by query, as many as tokens it sees."""
    assert out.shape == exact.shape
    positions = [position for start, end in zip(starts, ends, strict=True) for position in range(start, end)]
    visible = torch.tensor([position + 1 - first_seen(position, spec) for position in positions])
    error = (out.double() - exact).abs()
    allowed = ROUNDING[out.dtype] * exact.abs() + WEIGHTS[out.dtype] / visible.sqrt()[:, None, None]
    assert (error <= allowed).all(), (
        f"{(error / allowed).nan_to_num(torch.inf).max():.3} times the error that is allowed"
    )


def _norm(weight: Tensor) -> RMSNorm:
    norm = RMSNorm(Factory(TorchKernels(), weight.dtype, weight.device), len(weight), EPS)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm
