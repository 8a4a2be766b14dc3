"""K and V in 8 bits: what comes back of what was stored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.kernels.reference.kv_int8 import LEAST_SIZE, MOST, dequantize, quantize
from tests.drawn import FAST


@FAST
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_every_element_is_within_half_a_step_of_what_it_was(elements: list[float]) -> None:
    row = torch.tensor(elements)
    numbers, scale = quantize(row)
    assert numbers.dtype is torch.int8
    assert numbers.min() >= -MOST
    step = max(row.abs().max().double() / MOST, LEAST_SIZE / MOST)
    error = (dequantize(numbers, scale, torch.float32).double() - row.double()).abs()
    assert (error <= step * (0.5 + 1e-4)).all()


def test_the_largest_element_comes_back_and_zeros_and_signs_do() -> None:
    row = torch.tensor([0.0, 3.0, -3.0, 1.5])
    numbers, scale = quantize(row)
    assert numbers.tolist() == [0, 127, -127, 64], "63.5 goes to the even one"
    assert dequantize(numbers, scale, torch.float32)[:3].tolist() == pytest.approx([0.0, 3.0, -3.0])
    assert dequantize(*quantize(torch.zeros(4)), torch.float32).tolist() == [0.0] * 4


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_nan_and_its_neighbours_are_not(bad: float) -> None:
    rows = torch.ones(3, 4)
    rows[1, 2] = bad
    read = dequantize(*quantize(rows), torch.bfloat16)
    assert read[1].isnan().all()
    assert read[[0, 2]].isfinite().all()
