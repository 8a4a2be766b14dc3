"""The factory of parameters: of its dtype, on its device, whatever torch's own defaults are."""

from __future__ import annotations

import pytest
import torch

from nanoengine.core.layers import Linear
from nanoengine.kernels.reference.operations import RowMajor, TorchKernels
from nanoengine.models.layers.factory import Factory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_are_of_its_dtype_and_on_its_device(dtype: torch.dtype, device: str) -> None:
    factory = Factory(TorchKernels(), dtype, torch.device(device))
    weight, bias = factory.weight(5, 3), Linear(factory, 5, 3, 4, bias=True).bias
    assert isinstance(weight, RowMajor)
    assert bias is not None
    assert (weight.shape, bias.shape) == ((3, 5), (7,))
    assert {(x.dtype, x.device.type) for x in (weight.tensor, bias)} == {(dtype, device)}
    assert not bias.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_some_are_float32_all_the_same(dtype: torch.dtype) -> None:
    floats = Factory(TorchKernels(), dtype, torch.device("meta")).floats(7, 2)
    assert (floats.shape, floats.dtype, floats.device.type) == ((7, 2), torch.float32, "meta")


def test_the_kernels_say_how_a_weight_lies_in_memory(factory: Factory) -> None:
    assert type(factory.weight(33, 40)) is type(factory.kernels.new_weight(40, 33, factory.dtype, factory.device))
