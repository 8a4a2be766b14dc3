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


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_numbers_are_near_those_that_were_encoded(kind: str, seed: int) -> None:
    """A block holds so many numbers over its range: each is at most a step away, and a little, as scales are rounded."""
    values = matrix(seed)
    blocks = encode(values, kind)
    assert blocks.format == kind
    if not kind.endswith("_K"):  # one way to encode is the reference's
        assert np.array_equal(blocks.data.numpy(), quantize(values.numpy(), GGMLQuantizationType[kind]))
    decoded = dequantize(blocks.data.numpy(), GGMLQuantizationType[kind])
    runs = values.unflatten(1, (-1, 256 if kind.endswith("_K") else 32))
    steps = 2 * runs.abs().amax(2, keepdim=True) / ((1 << BITS[kind]) - 1)
    errors = (torch.from_numpy(decoded).view_as(runs) - runs).abs()
    assert (errors <= 1.2 * steps).all()
    # Steps of the run that a number is in are smaller yet: the mean of the errors is far below.
    assert errors.mean() < 0.35 * steps.mean()
    assert torch.equal(blocks.dequantize(torch.float32), torch.from_numpy(decoded))


@pytest.mark.parametrize(("kind", "other"), IN_PLACE_OF_LARGE.items())
def test_rows_that_large_blocks_do_not_fill_get_small_ones(kind: str, other: str) -> None:
    assert encode(matrix(0, 288), kind).format == other
    assert encode(matrix(0, 256), kind).format == kind
