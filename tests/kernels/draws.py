"""Keys to draw tokens with."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from nanoengine.core.randomness import GOLDEN_GAMMA, MASK, MIX_1, MIX_2, mix
from nanoengine.core.sampling import signed


def keys_of(keys: list[int]) -> Tensor:
    """Keys of 64 bits, as the int64 tensor [num_keys] with the same bits."""
    return torch.tensor([signed(key) for key in keys], dtype=torch.int64)


def random_keys(count: int, seed: int = 0) -> Tensor:
    rng = random.Random(seed)
    return keys_of([rng.getrandbits(64) for _ in range(count)])


def unmix(value: int) -> int:
    """The inverse of `mix`: multiplications undone modulo 2**64, shifts undone bit by bit."""

    def unshift(x: int, bits: int) -> int:
        y = x
        for _ in range(64 // bits + 1):
            y = x ^ (y >> bits)
        return y

    value = unshift(value, 31) * pow(MIX_2, -1, 1 << 64) & MASK
    value = unshift(value, 27) * pow(MIX_1, -1, 1 << 64) & MASK
    return unshift(value, 30)


def key_with_bits(bits: int, token: int) -> int:
    """The key under which `token` gets these 64 random bits."""
    key = (unmix(bits) - (token + 1) * GOLDEN_GAMMA) & MASK
    assert mix(key + (token + 1) * GOLDEN_GAMMA) == bits
    return key
