"""Kernels of layers with states, as this CPU has them. Other targets: test_targets.py."""

from __future__ import annotations

import pytest
import torch

from nanoengine.kernels.native.operations import NativeKernels
from nanoengine.kernels.native.support import unsupported_reason
from tests.kernels.recurrences import check_recurrences

REASON = unsupported_reason(torch.device("cpu"), torch.float32)


@pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")
def test_kernels_agree_with_the_reference_and_with_themselves_under_every_cut() -> None:
    kernels = NativeKernels()
    for seed in range(20):
        try:
            check_recurrences(kernels, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
