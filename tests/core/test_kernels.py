"""The kernels in plain torch: what neither layers nor tests/kernels show."""

from __future__ import annotations

import torch

from nanoengine.core.kernels import CoreKernels

KERNELS = CoreKernels()


def test_logits_are_float32_and_other_results_have_the_dtype_of_their_input() -> None:
    x, norm = torch.randn(3, 8).bfloat16(), torch.rand(8)
    weight = KERNELS.new_weight(4, 8, x.dtype, x.device)
    weight.rows(0, 4).copy_(torch.randn(4, 8))
    assert KERNELS.logits(x, weight).dtype is torch.float32
    for result in (KERNELS.linear(x, weight, None), KERNELS.rms_norm(x, norm, 1e-6)):
        assert result.dtype is torch.bfloat16
