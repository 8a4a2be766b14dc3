"""Layers are tested with every implementation of their kernels."""

from __future__ import annotations

import pytest
import torch

from nanoengine.kernels.interface import Kernels, choose_kernels
from nanoengine.kernels.native import why_not

CPU = torch.device("cpu")


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    reason = why_not(CPU, torch.float32) if request.param == "native" else None
    if reason is not None:
        pytest.skip(f"no native kernels: {reason}")
    return choose_kernels(request.param, CPU, torch.float32)
