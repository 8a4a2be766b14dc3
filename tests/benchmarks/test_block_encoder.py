"""Encoded blocks against the gguf package: its own encoders where it has some, its decoders for all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.block_encoder import FORMATS, IN_PLACE_OF_LARGE, encode

BITS = {"Q8_0": 8, "Q6_K": 6, "Q5_K": 5, "Q5_1": 5, "Q5_0": 5, "Q4_K": 4, "Q4_1": 4, "Q4_0": 4}


def matrix(seed: int, inputs: int = 512) -> torch.Tensor:
    """Rows of several sizes, whose scales are no subnormal float16, with a run of zeros and one of equal numbers."""
    torch.manual_seed(seed)
    values = torch.randn(6, inputs) * torch.logspace(-1, 1, 6)[:, None]
    values[1, 32:64], values[2, 64:96] = 0, 0.5
    return values


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if not kind.endswith("_K")])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_blocks_of_32_are_those_of_the_reference(kind: str, seed: int) -> None:
    values = matrix(seed)
    expected = quantize(values.numpy(), GGMLQuantizationType[kind])
    assert np.array_equal(encode(values, kind).data.numpy(), expected)


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_numbers_are_near_those_that_were_encoded(kind: str, seed: int) -> None:
    """A block holds so many numbers over its range: each is at most a step away, and a little, as scales are rounded."""
    values = matrix(seed)
    blocks = encode(values, kind)
    assert blocks.type == kind
    decoded = dequantize(blocks.data.numpy(), GGMLQuantizationType[kind])
    runs = values.unflatten(1, (-1, 256 if kind.endswith("_K") else 32))
    steps = 2 * runs.abs().amax(2, keepdim=True) / ((1 << BITS[kind]) - 1)
    errors = (torch.from_numpy(decoded).view_as(runs) - runs).abs()
    assert (errors <= 1.2 * steps).all()
    # Steps of the run that a number is in are smaller yet: the mean of the errors is far below.
    assert errors.mean() < 0.35 * steps.mean()
    assert torch.equal(blocks.dequantize(torch.float32), torch.from_numpy(decoded))


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind.endswith("_K")])
def test_more_bits_lose_less_and_runs_have_scales_of_their_own(kind: str) -> None:
    values = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
    values[:, :32] *= 0.02  # in a block of large numbers, a run of small ones
    decoded = encode(values, kind).dequantize(torch.float32)
    small, smaller = values[:, :32], (decoded - values)[:, :32]
    assert smaller.norm() < 0.4 * small.norm()
    large = (decoded - values)[:, 32:].norm() / values[:, 32:].norm()
    assert large < {"Q4_K": 0.1, "Q5_K": 0.05, "Q6_K": 0.03}[kind]


@pytest.mark.parametrize(("kind", "other"), IN_PLACE_OF_LARGE.items())
def test_rows_that_large_blocks_do_not_fill_get_small_ones(kind: str, other: str) -> None:
    assert encode(matrix(0, 288), kind).type == other
    assert encode(matrix(0, 256), kind).type == kind
