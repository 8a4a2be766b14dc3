"""What kernels do that do not join operations: the same operations, one after the other."""

from __future__ import annotations

import pytest
import torch

from nanoengine.kernels.torch_kernels import TorchKernels


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_the_result_is_that_of_the_separate_operations(gated: bool, has_residual: bool) -> None:
    kernels, (x, residual) = TorchKernels(), torch.randn(2, 3, 8)
    weight, norm, bias = kernels.new_weight(10, 8, torch.float32, torch.device("cpu")), torch.rand(8), torch.randn(10)
    weight.tensor.normal_()
    if has_residual:
        normed, total = kernels.add_rms_norm(x, residual.clone(), norm, 1e-6)
    else:
        normed, total = kernels.rms_norm(x, norm, 1e-6), x
    given = residual.clone() if has_residual else None
    if gated:
        out, carried = kernels.norm_gated_linear(x, given, norm, 1e-6, weight, "gelu_tanh")
        assert torch.equal(out, kernels.gated_linear(normed, weight, "gelu_tanh"))
    else:
        out, carried = kernels.norm_linear(x, given, norm, 1e-6, weight, bias)
        assert torch.equal(out, kernels.linear(normed, weight, bias))
    assert torch.equal(carried, total)
