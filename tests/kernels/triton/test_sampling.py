"""Tokens chosen on the device, against the kernels in torch."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.core.messages import UNKNOWN
from nanoengine.core.sampling import gumbel_noise, signed
from nanoengine.kernels.triton.draws import candidates, sampling
from nanoengine.kernels.triton.draws.candidates import TILE, size_of_parts
from nanoengine.kernels.triton.draws.sampling import choose_tokens
from nanoengine.kernels.triton.launch import num_multiprocessors
from nanoengine.kernels.triton.operations import TritonKernels
from tests.kernels.formulas import position_key
from tests.kernels.noting import noting
from tests.kernels.sampled_rows import (
    DEVICE,
    GREEDY,
    KINDS,
    Rows,
    random_logits,
)

KERNELS = TritonKernels()


@triton.jit
def _noise_kernel(out, key, first, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offset = tl.arange(0, BLOCK)
    key_bits = tl.load(key).to(tl.uint64)
    tl.store(out + offset, sampling._gumbel_noise(key_bits, first + offset))


@pytest.mark.parametrize("key", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0x123456789ABCDEF0])
def test_the_noise_is_that_of_the_reference(key: int) -> None:
    block, count = 1 << 14, 1 << 18
    keys = torch.tensor([signed(key)], device=DEVICE)
    out = torch.empty(count, device=DEVICE)
    for first in range(0, count, block):
        _noise_kernel[(1,)](out[first:], keys, first, BLOCK=block)
    expected = gumbel_noise(keys.cpu(), torch.arange(count)[None])[0]
    torch.testing.assert_close(out.cpu(), expected, rtol=5e-7, atol=5e-7)
    assert expected.max() > 10  # u below 1e-4, where 1 - u is rounded


@triton.jit
def _noise_of_bits_kernel(out, bits, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offset = tl.arange(0, BLOCK)
    tl.store(out + offset, sampling._noise_of(tl.load(bits + offset).to(tl.uint64)))


def test_no_noise_is_above_the_bound_and_the_least_bits_come_close() -> None:
    heads = {head for power in range(41) for head in (2**power - 1, 2**power, 2**power + 1) if head < 2**40}
    heads |= set(range(4096)) | {2**40 - 1 - i for i in range(2048)}
    bits = torch.tensor([signed((head << 24) | low) for head in sorted(heads)[:6144] for low in (0, 2**24 - 1)])
    last = torch.tensor([signed(((2**40 - 1 - i) << 24) | (2**24 - 1)) for i in range(4096)])
    bits = torch.cat((bits, last)).to(DEVICE)
    noise = torch.empty(len(bits), device=DEVICE)
    _noise_of_bits_kernel[(1,)](noise, bits, BLOCK=len(bits))
    assert noise.isfinite().all()
    assert noise.argmax() == 0
    torch.testing.assert_close(float(noise[0]), -math.log(-math.log1p(-(2.0**-41))), rtol=1e-6, atol=0)
    assert float(noise[0]) < sampling.MOST_NOISE.value < float(noise[0]) + 0.1


@pytest.mark.skipif(DEVICE.type == "cuda", reason="takes the interpreter's single multiprocessor")
@settings(max_examples=5)
@given(
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1e-5]),
    steps=st.lists(
        st.sampled_from([0.0, 1.0, 5.0, 27.8, 28.4188, 28.42, 28.5, 28.6, 31.0, 300.0]), min_size=4, max_size=4
    ),
    spread=st.sampled_from([0.0, 0.0, 0.5]),
    filters=st.sampled_from([{}, {}, {"min_p": 1e-12}]),
    seed=st.integers(0, 1000),
)
@example(
    temperature=1.0, steps=[300.0, 28.5, 28.42, 0.0], spread=0.0, filters={}, seed=0
)  # the first tile is the lowest
@example(temperature=1.0, steps=[0.0, 28.42, 28.5, 300.0], spread=0.0, filters={}, seed=0)
@example(temperature=0.0, steps=[1.0, 0.0, 0.0, 0.0], spread=0.0, filters={}, seed=0)
def test_tiles_that_are_passed_over_do_not_hold_the_best(
    temperature: float, steps: list[float], spread: float, filters: dict[str, float], seed: int
) -> None:
    """A program has a whole row of tiles here, each so many times the temperature below the highest."""
    n = candidates.PROGRAMS_PER_SM * num_multiprocessors(DEVICE, interpreted=1)
    vocab_size = 3 * TILE + 7
    levels = -torch.tensor(steps) * (temperature or 1.0)
    row = levels.repeat_interleave(TILE)[:vocab_size]
    row += spread * torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))
    row[[TILE - 1, TILE, 2 * TILE - 1, 2 * TILE]] = row.max()  # equals on both sides of a border
    rows = Rows([{"temperature": temperature, **filters}] * n, seed)
    expected = []
    for own, position in zip(rows.seeds, rows.positions, strict=True):
        score = row / max(temperature, 1e-5) if temperature else row
        if temperature:
            score = score + own_noise(position_key(own, position), vocab_size)
        expected.append(int(score.argmax()))
    assert rows.choose(KERNELS, row.expand(n, -1).contiguous().to(DEVICE)) == expected


@triton.jit
def _may_reach_kernel(scores, equal, above, logits, bits, temperature, more, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offset = tl.arange(0, BLOCK)
    x, own = tl.load(logits + offset), tl.load(bits + offset).to(tl.uint64)
    score = tl.div_rn(x, temperature) + sampling._noise_of(own)
    tl.store(scores + offset, score)
    reaches = sampling._may_reach(sampling._just_below(score), x, 1.0 / temperature, own)
    tl.store(equal + offset, reaches.to(tl.int32))
    reaches = sampling._may_reach(sampling._just_below(score + more), x, 1.0 / temperature, own)
    tl.store(above + offset, reaches.to(tl.int32))


@pytest.mark.parametrize("temperature", [1e-5, 0.03, 1.0, 100.0])
@pytest.mark.parametrize("size", [0.0, 1e-3, 30.0, 1e6, 1e30, 3e38])
def test_a_score_may_reach_itself_and_nothing_far_above_it(temperature: float, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    block = 1 << 12
    logits = size * (2 * torch.rand(block, generator=generator) - 1)
    bits = torch.randint(-(2**63), 2**63 - 1, (block,), generator=generator)
    bits >>= torch.randint(0, 30, (block,), generator=generator)  # much noise, and little
    logits[:3] = torch.tensor([torch.inf, -torch.inf, 0.0])
    logits, bits = logits.to(DEVICE), bits.to(DEVICE)
    scores, equal, above = (
        torch.empty(block, dtype=dtype, device=DEVICE) for dtype in (torch.float32, *[torch.int32] * 2)
    )
    _may_reach_kernel[(1,)](scores, equal, above, logits, bits, temperature, 0.25, BLOCK=block)
    assert equal[scores > -torch.inf].all()
    noise = scores - logits / temperature
    usual = (noise > 3) & (noise < 10) & (scores.abs() < 1e4)
    assert not above[usual].any()
    assert usual.sum() > 100 or size / temperature > 1e4


def own_noise(key: int, count: int) -> Tensor:
    """The kernel's noise for the first tokens."""
    out = torch.empty(triton.next_power_of_2(count), device=DEVICE)
    _noise_kernel[(1,)](out, torch.tensor([signed(key)], device=DEVICE), 0, BLOCK=len(out))
    return out[:count].cpu()


def test_rows_with_gaps() -> None:
    wide = random_logits("random", 3, 2007, 0)
    rows = Rows([{}, {"top_p": 0.9}, GREEDY])
    logits = wide[:, :2000].clone()
    wide[:, 2000:] = torch.nan
    assert rows.choose(KERNELS, wide[:, :2000]) == rows.choose(KERNELS, logits)


@pytest.mark.parametrize("kind", KINDS)
def test_where_no_row_has_filters_two_launches_choose_the_same_tokens(kind: str) -> None:
    rows = Rows([{}, GREEDY, {"temperature": 0.3}, {"temperature": 0.0, "top_k": 3}], 7)
    logits = random_logits(kind, 4, 3 * TILE + 7, 7)
    table, entries, positions = rows.arguments()
    plain = replace(table, filtering=set())
    assert choose_tokens(logits, plain, entries, positions).tolist() == rows.choose(KERNELS, logits)
    with noting() as launches:
        choose_tokens(logits, plain, entries, positions)
    assert [launch.name for launch in launches] == ["_draw_kernel", "_choose_best_kernel"]


def test_no_rows() -> None:
    assert Rows([]).choose(KERNELS, torch.empty(0, 50, device=DEVICE)) == []


@given(n=st.integers(1, 5000), vocab_size=st.integers(1, 200_000), num_sms=st.integers(1, 200))
def test_parts_cover_the_vocabulary(n: int, vocab_size: int, num_sms: int) -> None:
    size = size_of_parts(n, vocab_size, num_sms)
    assert size % TILE == 0
    parts = -(-vocab_size // size)
    assert parts * size >= vocab_size > (parts - 1) * size
    assert n * parts <= candidates.PROGRAMS_PER_SM * num_sms + n
    assert parts <= candidates.MOST_PARTS


def test_batches_of_all_sizes_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (candidates, sampling):
        monkeypatch.setattr(module, "num_multiprocessors", lambda *_, **__: 132)
    keys: set[tuple[str, str]] = set()
    for vocab_size in (128_256, 151_936, 262_144, 50_257, 32_001):
        with noting() as launches:
            for n in (1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 100, 128, 200, 255, 256, 300):
                logits = torch.empty(n, vocab_size)
                for shift in (0, 1):  # slices of a step's buffers begin anywhere
                    rows, positions = torch.empty(n + 1, dtype=torch.int32), torch.empty(n + 1, dtype=torch.int64)
                    table = Rows([{}]).table()
                    choose_tokens(logits, table, rows[shift : n + shift], positions[shift : n + shift])
        found = {(launch.name, launch.key()) for launch in launches}
        assert len(found) == len({name for name, _ in found}) == 4, vocab_size
        keys |= found
    counts = Counter(name for name, _ in keys)
    assert max(counts.values()) <= 2, "whether a vocabulary's size is a multiple of 16"


def test_a_row_whose_scores_are_all_lost_to_a_tiny_temperature_has_no_token() -> None:
    """Rather than one that no vocabulary has."""
    logits = torch.full((1, 50), -3e38, device=DEVICE)
    assert Rows([{"temperature": 1e-20}]).choose(KERNELS, logits) == [UNKNOWN]
