"""One number: a token attends with the same bits in whatever way it is computed.

All that attention is asked for is drawn, and ways to compute it: alone or in a batch, in a chunk of any size, as a decode or one
of a few, with a beginning that is read once for all, by one thread or two. Right is what each sequence gets as one prompt, alone,
by one thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from nanoengine.kernels.attention import AttentionBackend
from nanoengine.kernels.native.attention import NativeAttention
from tests.kernels.attention.contract import draw_spec
from tests.kernels.attention.every_backend import NATIVE
from tests.kernels.attention.paged import Heads, Pool, Sequences
from tests.kernels.marks import needs_kernels
from tests.support import threads


@dataclass(frozen=True)
class Run:
    """New tokens [start, end) of a sequence."""

    row: int
    start: int
    end: int


def draw_pool(rng: random.Random, backend_of: Callable[[int], AttentionBackend], longest: int) -> tuple[Pool, int]:
    """Sequences of which everything is in the cache, and how many tokens they all begin with."""
    heads = Heads(rng.randint(1, 3), rng.choice([1, 2, 3, 4, 5, 8, 35]), rng.choice([32, 64, 96, 128, 256, 512]))
    block_size = 16 * rng.randint(1, 4)
    most = 3_000_000 // ((heads.group + 2) * heads.num * heads.dim)  # tokens of all sequences
    longest = min(longest, most)
    shared = rng.choice([0, 0, rng.randint(1, longest) // block_size])
    count = max(1, min(rng.choice([1, 2, 3, 40]), most // longest))
    lens = [shared * block_size + rng.randint(1, max(1, longest - shared * block_size)) for _ in range(count)]
    dtype = rng.choice([torch.float32, torch.bfloat16])
    sequences = Sequences(heads, block_size, lens, dtype, seed=rng.randrange(1000), shared=shared)
    spec = draw_spec(rng, NATIVE, heads.dim)
    return Pool(sequences, backend_of(block_size), spec=spec, quantized=rng.random() < 0.3), shared * block_size


def draw_runs(rng: random.Random, lens: list[int], num_shared: int, most: int) -> list[Run]:
    """Some tokens of some sequences, each behind what all share."""
    runs = []
    for row in rng.sample(range(len(lens)), rng.randint(1, len(lens))):
        start = rng.randrange(num_shared, lens[row])
        runs.append(Run(row, start, min(lens[row], start + rng.randint(1, most))))
    return runs


def compute(pool: Pool, queries: list[Tensor], decodes: list[Run], chunks: list[Run], num_shared: int) -> Tensor:
    """What the tokens of all runs see, in one step."""
    runs = [*decodes, *chunks]
    where = [run.row for run in runs], [run.start for run in runs], [run.end for run in runs]
    q = torch.cat([queries[run.row][run.start : run.end] for run in runs])
    metadata = replace(pool.metadata(len(decodes), *where), num_shared=num_shared)
    return pool.backend.attend(q, pool.kv, metadata, pool.spec, pool.sinks)


def check_one_number(
    backend_of: Callable[[int], AttentionBackend], seed: int, ways: int = 8, longest: int = 1300
) -> None:
    """Draw sequences of up to `longest` tokens, and compute some of their tokens in so many ways."""
    rng = random.Random(seed)
    pool, num_shared = draw_pool(rng, backend_of, longest)
    lens = pool.sequences.lens
    queries = [pool.write_span([row], [0], [n]) for row, n in enumerate(lens)]
    with threads(1):
        right = [compute(pool, queries, [], [Run(row, 0, n)], 0) for row, n in enumerate(lens)]
    assert all(whole.isfinite().all() for whole in right)
    for _ in range(ways):
        decodes = draw_runs(rng, lens, num_shared, rng.choice([1, 1, 17])) if rng.random() < 0.8 else []
        taken = {run.row for run in decodes}
        chunks = [run for run in draw_runs(rng, lens, 0, 600) if run.row not in taken]
        if not decodes and not chunks:
            continue
        with threads(rng.choice([1, 2])):
            found = compute(pool, queries, decodes, chunks, rng.choice([0, num_shared]) if decodes else 0)
        expected = torch.cat([right[run.row][run.start : run.end] for run in (*decodes, *chunks)])
        assert torch.equal(found, expected), (
            seed,
            pool.spec,
            pool.sequences.heads,
            pool.k_cache.dtype,
            decodes,
            chunks,
        )


@needs_kernels
@pytest.mark.parametrize("part", range(6))
def test_a_token_attends_with_the_same_bits_in_whatever_way_it_is_computed(part: int) -> None:
    for seed in range(12):
        check_one_number(NativeAttention, 100 * part + seed)
