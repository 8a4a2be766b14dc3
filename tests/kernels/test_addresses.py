"""Addresses of tensors, and which tensors have none that C could use."""

from __future__ import annotations

import pytest
import torch

from nanoengine.kernels.addresses import address, address_of_floats


def test_of_a_tensor_in_one_piece_it_is_the_first_numbers() -> None:
    assert address(None) is address_of_floats(None) is None
    tensor = torch.arange(12.0).view(3, 4)
    assert address(tensor) == address_of_floats(tensor) == tensor.data_ptr()
    assert address(tensor[1]) == tensor.data_ptr() + 4 * tensor.itemsize


def test_gaps_and_other_dtypes_are_refused() -> None:
    with pytest.raises(AssertionError):
        address(torch.zeros(4, 4)[:, :2])
    for tensor in (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2]):
        with pytest.raises(AssertionError):
            address_of_floats(tensor)
