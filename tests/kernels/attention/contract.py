"""The contract of attention backends: any step of any layer is attention by its definition.

All that a layer and a step may ask for is drawn: heads, windows, sinks and caps, whether the cache is int8, decodes of one token
or a few, chunks with and without history, blocks that are shared, padding, tensors that are not in one piece. Lengths and windows
are often at the edges of what backends cut sequences into. What no token sees is NaN. Builds for other CPUs and a sanitizer run
the same steps (tests/kernels).
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.core.attention import AttentionMetadata, AttentionSpec
from nanoengine.kernels.attention import AttentionBackend
from tests.kernels.attention.every_backend import BackendOf, Kind
from tests.kernels.attention.paged import NOBODYS, Heads, Pool, Sequences, assert_attended
from tests.kernels.formulas import DTYPES, assert_close, strided

EDGES = [size + more for size in (1, 16, 32, 64, 256, 512, 1024) for more in (-1, 0, 1)][1:]

FEW = 17
"""Most tokens of a decode."""


def draw_length(rng: random.Random, most: int) -> int:
    return min(most, rng.choice([rng.choice(EDGES), rng.randint(1, most)]))


def draw_spec(rng: random.Random, kind: Kind, dim: int) -> AttentionSpec:
    drawn = {
        "window": rng.choice([None, None, draw_length(rng, kind.longest)]),
        "sinks": rng.random() < 0.3,
        "soft_cap": rng.choice([None, None, 0.5, 3.0, 50.0]),
    }
    drawn["chunked"] = drawn["window"] is not None and rng.random() < 0.4
    asked = {name: value for name, value in drawn.items() if name in kind.features}
    return AttentionSpec(rng.choice([0.5, 1.0, 2.0]) * dim**-0.5, **asked)  # type: ignore[arg-type]


def draw_pool(rng: random.Random, kind: Kind, backend_of: BackendOf) -> tuple[Pool, int, list[int]]:
    """Sequences in a pool, how many of them decode, and where each run starts; what is before is in the cache."""
    heads = Heads(rng.randint(1, 3), rng.choice([1, 2, 3, 4, 5, 8, 35]), rng.choice(kind.head_dims))
    block_size, dtype = rng.choice(kind.block_sizes), rng.choice(kind.dtypes)
    spec = draw_spec(rng, kind, heads.dim)
    count = rng.randint(1, 6)
    most = max(2, min(kind.longest, kind.work // (count * (heads.group + 2) * heads.num * heads.dim)))
    lens = [draw_length(rng, most) for _ in range(count)]
    shared = lens[0] // block_size if spec.window is None and rng.random() < 0.4 else 0
    behind = shared * block_size  # what the others have of their own
    lens = [lens[0], *(behind + min(n, max(1, most - behind)) for n in lens[1:])]
    num_decodes = rng.randint(0, count)
    starts = []
    for i, n in enumerate(lens):
        least = behind if i else 0
        few = rng.choice([1, 1, rng.randint(1, FEW)])
        starts.append(max(least, n - few) if i < num_decodes else rng.choice([least, rng.randrange(least, n)]))
    quantized = kind.quantizes and rng.random() < 0.3
    # Where a number is rounded before and after, or ends up a step of int8 apart, no exact result is near.
    plain = quantized or dtype is not torch.float32 or rng.random() < 0.3
    how = {"quantized": quantized, "norms": not plain, "rotated": not plain, "one_go": rng.random() < 0.7}
    sequences = Sequences(heads, block_size, lens, dtype, seed=rng.randrange(1000), shared=shared)
    return Pool(sequences, backend_of(block_size), spec=spec, **how), num_decodes, starts  # type: ignore[arg-type]


def with_padding(metadata: AttentionMetadata, lens: list[int]) -> AttentionMetadata:
    """Padding rows of so many tokens behind the decodes; their blocks are block 0."""
    n, (_rows, width) = metadata.num_decodes, metadata.block_tables.shape
    starts, zeros = metadata.query_start_loc, torch.zeros(len(lens), dtype=torch.int32)
    ends = starts[n] + torch.tensor(lens, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    nowhere = torch.zeros(len(lens), width, dtype=torch.int32)
    return replace(
        metadata,
        num_decodes=n + len(lens),
        query_start_loc=torch.cat((starts[: n + 1], ends, starts[n + 1 :] + sum(lens))),
        seq_lens=torch.cat((metadata.seq_lens[:n], zeros, metadata.seq_lens[n:])),
        block_tables=torch.cat((metadata.block_tables[:n], nowhere, metadata.block_tables[n:])),
        query_lens_list=[*metadata.query_lens_list[:n], *lens, *metadata.query_lens_list[n:]],
        seq_lens_list=[*metadata.seq_lens_list[:n], *[0] * len(lens), *metadata.seq_lens_list[n:]],
    )


def with_bounds(metadata: AttentionMetadata, more: int) -> AttentionMetadata:
    """The host knows no more than upper bounds of the lengths of decodes."""
    n = metadata.num_decodes
    bounds = [length + more for length in metadata.seq_lens_list[:n]] + metadata.seq_lens_list[n:]
    return replace(metadata, seq_lens_list=bounds, block_tables=F.pad(metadata.block_tables, (0, more), value=NOBODYS))


def attend_somehow(
    rng: random.Random, backend: AttentionBackend, pool: Pool, q: Tensor, metadata: AttentionMetadata
) -> Tensor:
    """One of the ways to ask the same."""
    count, padding = metadata.num_decode_tokens, 0
    if rng.random() < 0.3:
        metadata = with_bounds(metadata, 13)
    if metadata.num_decodes and rng.random() < 0.3:
        lens = [rng.choice([1, 1, metadata.query_lens_list[0]]) for _ in range(rng.randint(1, 3))]
        metadata, padding = with_padding(metadata, lens), sum(lens)
        q = torch.cat((q[:count], torch.randn(padding, *q.shape[1:]).to(q.dtype), q[count:]))
    if rng.random() < 0.3 and backend.name != "flash_attn":  # a package may ask for tensors in one piece
        q = rng.choice([strided(q), q.transpose(0, 1).contiguous().transpose(0, 1)])
        metadata = replace(metadata, block_tables=F.pad(metadata.block_tables, (0, 5))[:, :-5])
    out = backend.attend(q, pool.kv, metadata, pool.spec, pool.sinks)
    return torch.cat((out[:count], out[count + padding :]))


def check_step(kind: Kind, backend_of: BackendOf, seed: int) -> None:
    rng = random.Random(seed)
    pool, num_decodes, starts = draw_pool(rng, kind, backend_of)
    lens = pool.sequences.lens
    rows = range(len(lens))
    pool.fill(starts)
    q = pool.write_span(rows, starts, lens)
    pool.forget(rows, starts)
    out = attend_somehow(rng, pool.backend, pool, q, pool.metadata(num_decodes, rows, starts, lens))
    assert_attended(out, pool.exact(starts, lens), kind.looser if pool.dtype is torch.bfloat16 else 1)


def check_write(kind: Kind, backend_of: BackendOf, seed: int, most: int = 100) -> None:
    """Tokens in any pieces, some of them at first nowhere, are written as all at once, and nothing else is."""
    rng = random.Random(seed)
    heads = Heads(rng.randint(1, 5), rng.choice([1, 2, 3]), rng.choice(kind.head_dims))
    tokens, block_size, dtype = rng.randint(1, most), rng.choice(kind.block_sizes), rng.choice(DTYPES)
    norms, rotated, one_go, some = (rng.random() < 0.5 for _ in range(4))
    quantized = kind.quantizes and rng.random() < 0.3
    sequences = Sequences(heads, block_size, [tokens], dtype, seed=seed)
    how = {"norms": norms, "rotated": rotated, "quantized": quantized}
    whole, parts = (Pool(sequences, backend_of(block_size), one_go=one_go, **how) for _ in range(2))  # type: ignore[arg-type]
    qkv, positions, slots = sequences.qkv[0], torch.arange(tokens), torch.tensor(sequences.slots(0, 0, tokens))
    q = whole.write(qkv, positions, slots)
    exact = whole.exact_queries(0, tokens)
    rounded_once = kind.name == "native" and one_go  # not after the norm too, nor by an interpreter that cuts off
    if not norms and not rotated:
        assert torch.equal(q, exact.to(dtype))
        other = Pool(sequences, whole.backend, one_go=not one_go, **how)  # type: ignore[arg-type]
        other.write(qkv, positions, slots)
        assert_same_memory(other, whole)
    elif dtype is torch.float32 or rounded_once:
        assert_close(q, exact, exact.abs() + exact.abs().roll(heads.dim // 2, -1))
    missing = torch.rand(tokens, generator=torch.Generator().manual_seed(seed), device="cpu") < 0.4 * some
    if not quantized:
        assert whole.memory.isfinite().sum() == 2 * tokens * heads.num * heads.dim
    apart = torch.cat((qkv, qkv), 1)[:, : qkv.shape[1]]  # with a gap between two tokens
    found = parts.write(apart, positions, slots.masked_fill(missing, -1))
    assert torch.equal(found, q), "whatever a query without a slot is good for"
    for token in missing.nonzero()[:, 0].tolist():
        one = slice(token, token + 1)
        assert torch.equal(parts.write(qkv[one], positions[one], slots[one]), q[one])
    assert_same_memory(parts, whole)


def assert_same_memory(pool: Pool, other: Pool) -> None:
    assert torch.equal(*(each.memory.view(torch.int8) for each in (pool, other)))
