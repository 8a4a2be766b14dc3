"""RMSNorm against its formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanoengine.kernels.interface import Kernels
from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.layers.norm import RMSNorm


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def norm(kernels: Kernels, size: int, eps: float = 1e-6, dtype: torch.dtype = torch.float32) -> RMSNorm:
    layer = RMSNorm(kernels, size, eps)
    layer.weight = torch.randn(size).to(dtype)
    return layer


@pytest.mark.parametrize("shape", [(1, 8), (5, 8), (5, 3, 8)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_it_divides_by_the_root_mean_square_of_the_last_dimension(
    kernels: Kernels, shape: tuple[int, ...], eps: float
) -> None:
    layer, x = norm(kernels, 8, eps), torch.randn(shape) * 5
    torch.testing.assert_close(layer(x).double(), formula(x, layer.weight, eps), rtol=1e-5, atol=1e-5)


def test_a_row_of_zeros_stays_zero(kernels: Kernels) -> None:
    assert torch.equal(norm(kernels, 8)(torch.zeros(2, 8)), torch.zeros(2, 8))


def check_narrow(kernels: Kernels, dtype: torch.dtype, tolerance: float) -> None:
    """The squares of 300 overflow float16, and 512 summands would not add up in bfloat16."""
    layer, x = norm(kernels, 512, dtype=dtype), (torch.randn(4, 512) * 300).to(dtype)
    out = layer(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), formula(x, layer.weight, 1e-6), rtol=tolerance, atol=tolerance)


def test_bfloat16_is_computed_in_float32(kernels: Kernels) -> None:
    check_narrow(kernels, torch.bfloat16, 2e-2)


def test_float16_is_computed_in_float32() -> None:
    check_narrow(TorchKernels(), torch.float16, 3e-3)  # others do not take it


def test_add_and_norm_returns_the_norm_of_the_sum_and_the_sum(kernels: Kernels) -> None:
    layer, x, residual = norm(kernels, 8), torch.randn(5, 8), torch.randn(5, 8)
    before = x.clone(), residual.clone()
    normed, total = layer.add_and_norm(x, residual)
    torch.testing.assert_close(total, before[0] + before[1], rtol=0, atol=0)
    torch.testing.assert_close(
        normed.double(), formula(before[0] + before[1], layer.weight, 1e-6), rtol=1e-5, atol=1e-5
    )
