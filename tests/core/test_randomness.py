from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.core.randomness import GOLDEN_GAMMA, MASK, mix, sequence_seed
from nanoengine.core.sampling import position_keys, signed
from tests.drawn import FAST

# The first outputs of SplitMix64 from two states: a reference implementation's, known from many test suites.
FROM_0 = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
FROM_1234567 = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]

seeds = st.integers(-(2**63), 2**64 - 1)


def position_key(seed: int, position: int) -> int:
    """The key that the sampler draws the token at one position of a sequence with."""
    return int(position_keys(torch.tensor([signed(seed & MASK)]), torch.tensor([position]))[0]) & MASK


def test_mix_is_the_finalizer_of_splitmix64() -> None:
    assert [mix((i + 1) * GOLDEN_GAMMA) for i in range(3)] == FROM_0
    assert [mix(1234567 + (i + 1) * GOLDEN_GAMMA) for i in range(5)] == FROM_1234567


def test_the_keys_of_the_positions_are_the_outputs_of_splitmix64() -> None:
    assert [position_key(0, position) for position in range(3)] == FROM_0
    assert [position_key(1234567, position) for position in range(5)] == FROM_1234567


def test_different_addresses_have_different_keys() -> None:
    keys = [
        position_key(sequence_seed(seed, index), position)
        for seed in range(12)
        for index in range(6)
        for position in range(40)
    ]
    assert len(set(keys)) == len(keys)


@FAST
@given(seeds)
def test_neighbouring_seeds_completions_and_positions_differ_in_many_bits(seed: int) -> None:
    here = position_key(sequence_seed(seed, 0), 0)
    for other in (
        position_key(sequence_seed(seed + 1, 0), 0),
        position_key(sequence_seed(seed, 1), 0),
        position_key(sequence_seed(seed, 0), 1),
    ):
        assert 8 <= (here ^ other).bit_count() <= 56


def test_a_seed_means_its_64_bits() -> None:
    assert sequence_seed(-1, 0) == sequence_seed(2**64 - 1, 0)
