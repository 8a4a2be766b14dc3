"""Layers are tested with every implementation of their kernels."""

from __future__ import annotations

import pytest
import torch

from nanoengine.kernels.capability import choose_kernels
from nanoengine.kernels.native import support as native_operations
from nanoengine.kernels.triton import launch
from nanoengine.models.layers.factory import Factory

CPU = torch.device("cpu")


@pytest.fixture(params=["torch", "native", "triton"])
def factory(request: pytest.FixtureRequest) -> Factory:
    reason = None
    if request.param == "native":
        reason = native_operations.unsupported_reason(CPU, torch.float32)
    elif request.param == "triton":  # in its interpreter
        reason = launch.unsupported_reason(CPU)
    if reason is not None:
        pytest.skip(f"no {request.param} kernels: {reason}")
    return Factory(choose_kernels(request.param, CPU, torch.float32), torch.float32, CPU)
