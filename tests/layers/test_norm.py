"""RMSNorm against its formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.layers.factory import Factory
from nanoengine.layers.norm import RMSNorm


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def norm(factory: Factory, size: int, eps: float = 1e-6, dtype: torch.dtype = torch.float32) -> RMSNorm:
    layer = RMSNorm(replace(factory, dtype=dtype), size, eps)
    layer.weight.copy_(torch.randn(size))
    return layer


@pytest.mark.parametrize("shape", [(1, 8), (5, 8), (5, 3, 8)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_it_divides_by_the_root_mean_square_of_the_last_dimension(
    factory: Factory, shape: tuple[int, ...], eps: float
) -> None:
    layer, x = norm(factory, 8, eps), torch.randn(shape) * 5
    torch.testing.assert_close(layer(x).double(), formula(x, layer.weight, eps), rtol=1e-5, atol=1e-5)


def test_a_row_of_zeros_stays_zero(factory: Factory) -> None:
    assert torch.equal(norm(factory, 8)(torch.zeros(2, 8)), torch.zeros(2, 8))


def check_narrow(factory: Factory, dtype: torch.dtype, tolerance: float) -> None:
    """The squares of 300 overflow float16, and 512 summands would not add up in bfloat16."""
    layer, x = norm(factory, 512, dtype=dtype), (torch.randn(4, 512) * 300).to(dtype)
    out = layer(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), formula(x, layer.weight, 1e-6), rtol=tolerance, atol=tolerance)


def test_bfloat16_is_computed_in_float32(factory: Factory) -> None:
    check_narrow(factory, torch.bfloat16, 2e-2)


def test_float16_is_computed_in_float32() -> None:
    check_narrow(
        Factory(TorchKernels(), torch.float16, torch.device("cpu")), torch.float16, 3e-3
    )  # others do not take it


def test_add_and_norm_returns_the_norm_of_the_sum_and_the_sum(factory: Factory) -> None:
    layer, x, residual = norm(factory, 8), torch.randn(5, 8), torch.randn(5, 8)
    before = x.clone(), residual.clone()
    normed, total = layer.add_and_norm(x, residual)
    torch.testing.assert_close(total, before[0] + before[1], rtol=0, atol=0)
    torch.testing.assert_close(
        normed.double(), formula(before[0] + before[1], layer.weight, 1e-6), rtol=1e-5, atol=1e-5
    )
