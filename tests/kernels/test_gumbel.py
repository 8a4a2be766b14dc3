"""Noise as a tensor and in one native pass: the same draws. Its distribution and addresses are tested with the sampler."""

from __future__ import annotations

import random

import pytest
import torch

from nanoengine.kernels.gumbel import gumbel_noise, key_tensor
from nanoengine.kernels.native import NativeKernels
from nanoengine.kernels.reference import TorchKernels

CPU = torch.device("cpu")


def random_keys(count: int, seed: int) -> torch.Tensor:
    rng = random.Random(seed)
    return key_tensor([rng.getrandbits(64) for _ in range(count)], CPU)


def test_keys_keep_all_their_bits() -> None:
    keys = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    assert [key & (1 << 64) - 1 for key in key_tensor(keys, CPU).tolist()] == keys


def test_ids_may_differ_from_row_to_row() -> None:
    keys, ids = random_keys(3, 0), torch.tensor([[5, 9], [0, 1], [7, 7]])
    every = gumbel_noise(keys, torch.arange(10)[None])
    assert torch.equal(gumbel_noise(keys, ids), every.gather(-1, ids))


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 300, 16383, 16384, 16385, 40_000])
def test_native_draws_are_those_of_torch(vocab_size: int) -> None:
    logits = torch.randn(60, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    keys = random_keys(60, vocab_size)
    assert torch.equal(NativeKernels().draw_tokens(logits, keys), TorchKernels().draw_tokens(logits, keys))


def test_native_draws_follow_the_distribution() -> None:
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    drawn = NativeKernels().draw_tokens(chances.log().expand(20_000, -1), random_keys(20_000, 1))
    counts = torch.bincount(drawn, minlength=5) / 20_000
    torch.testing.assert_close(counts, chances, rtol=0, atol=0.015)
    assert counts[4] == 0


@pytest.mark.parametrize("kernels", [TorchKernels(), NativeKernels()], ids=lambda kernels: kernels.name)
def test_a_draw_does_not_depend_on_its_neighbours(kernels: TorchKernels | NativeKernels) -> None:
    logits, keys = torch.randn(30, 1000), random_keys(30, 2)
    alone = torch.cat([kernels.draw_tokens(logits[i : i + 1], keys[i : i + 1]) for i in range(30)])
    assert torch.equal(kernels.draw_tokens(logits, keys), alone)
