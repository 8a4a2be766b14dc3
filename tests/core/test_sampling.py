"""Noise: its addresses, its distribution, and what filters keep."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.core.device import Device
from nanoengine.core.kernels import CoreKernels
from nanoengine.core.messages import RowSampling, Started, StepPlan
from nanoengine.core.randomness import GOLDEN_GAMMA, MASK, mix, sequence_seed
from nanoengine.core.sampler import Sampler
from nanoengine.core.sampling import filter_tokens, gumbel_noise, position_keys
from nanoengine.core.sampling_params import CoreSamplingParams
from tests.drawn import FAST
from tests.kernels.draws import key_with_bits, keys_of, random_keys
from tests.kernels.formulas import position_key

EULER_GAMMA = 0.5772156649015329


# ---- keys


# The first outputs of SplitMix64 from two states: a reference implementation's, known from many test suites.
SPLITMIX64 = {
    0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F],
    1234567: [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821],
}


def keys_at(seeds: list[int], positions: list[int]) -> list[int]:
    """The keys that the sampler draws the tokens at positions of sequences with."""
    keys = position_keys(keys_of(seeds), torch.tensor(positions))
    assert keys.dtype == torch.int64
    return [key & MASK for key in keys.tolist()]


@pytest.mark.parametrize("seed", SPLITMIX64)
def test_keys_of_positions_are_the_outputs_of_splitmix64(seed: int) -> None:
    outputs = SPLITMIX64[seed]
    assert [mix(seed + (i + 1) * GOLDEN_GAMMA) for i in range(len(outputs))] == outputs
    assert keys_at([seed] * len(outputs), [*range(len(outputs))]) == outputs


def test_the_key_of_a_position_is_that_of_whole_numbers() -> None:
    rng = random.Random(1)
    seeds = [0, 1, MASK, 1 << 63, (1 << 63) - 1, *(sequence_seed(seed, 3) for seed in range(500))]
    positions = [0, 1, 40_959, 1, 0, *(rng.randrange(1 << 20) for _ in range(500))]
    assert keys_at(seeds, positions) == [position_key(*pair) for pair in zip(seeds, positions, strict=True)]


def test_different_addresses_have_different_keys() -> None:
    drawn = [(sequence_seed(seed, i), position) for seed in range(12) for i in range(6) for position in range(40)]
    assert len({position_key(*address) for address in drawn}) == len(drawn)


@FAST
@given(st.integers(-(2**63), 2**64 - 1))
def test_neighbouring_seeds_completions_and_positions_differ_in_many_bits(seed: int) -> None:
    here = position_key(sequence_seed(seed, 0), 0)
    for other, index, position in ((seed + 1, 0, 0), (seed, 1, 0), (seed, 0, 1)):
        assert 8 <= (here ^ position_key(sequence_seed(other, index), position)).bit_count() <= 56
    assert sequence_seed(seed, 0) == sequence_seed(seed + 2**64, 0), "a seed means its 64 bits"


# ---- noise


def test_noise_has_the_mean_and_variance_of_gumbels_distribution() -> None:
    noise = gumbel_noise(
        keys_of([position_key(3, position) for position in range(20)]), torch.arange(10_000)[None]
    ).double()
    assert noise.mean().item() == pytest.approx(EULER_GAMMA, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)


def test_noise_depends_on_key_and_id_alone() -> None:
    keys, ids = random_keys(3), torch.tensor([[5, 9], [0, 1], [7, 7]])
    every = gumbel_noise(keys, torch.arange(10)[None])
    assert torch.equal(gumbel_noise(keys, ids), every.gather(-1, ids))


@pytest.mark.parametrize("bits", [0, MASK, MASK << 24 & MASK, 1 << 63])
def test_noise_is_finite_whatever_the_random_bits(bits: int) -> None:
    assert gumbel_noise(keys_of([key_with_bits(bits, 3)]), torch.arange(6)[None]).isfinite().all()


# ---- filters: of drawn rows in tests/kernels/test_sampling.py


def kept(logits: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """Tokens that are kept, likeliest first."""
    filters = (torch.tensor([value]) for value in (top_k, top_p, min_p))
    [(_, values, token_ids)] = filter_tokens(torch.tensor([logits]), *filters)
    return token_ids[0][values[0].isfinite()].tolist()


def test_of_equal_tokens_those_with_lower_ids_are_kept() -> None:
    assert kept([1.0, 2.0, 2.0, 2.0], top_k=2) == [1, 2]
    assert kept([0.0] * 4, top_p=0.5) == [0, 1], "which reach it exactly"
    assert kept([1.0, 2.0, 2.0], min_p=1.0) == [1, 2], "which are both as likely as the likeliest"


def test_the_host_knows_which_rows_have_filters() -> None:
    sampler = Sampler(6, 50, CoreKernels(), Device(torch.device("cpu")))

    def start(row: int, **params: Any) -> Started:
        return Started(row, [1], [[1]], RowSampling(CoreSamplingParams(**params), 0, 1))

    plain = [start(0), start(1, temperature=0.0, top_k=5, top_p=0.5, min_p=0.1)]
    sampler.apply(StepPlan(started=[*plain, start(2, top_k=5), start(3, top_p=0.5), start(4, min_p=0.1)]))
    assert sampler.table.filtering == {2, 3, 4}
    sampler.apply(StepPlan(ended=[3], started=[start(2), start(5, top_k=1)]))
    assert sampler.table.filtering == {4, 5}
    sampler.apply(StepPlan(ended=[4, 5]))
    assert sampler.table.filtering == set()
