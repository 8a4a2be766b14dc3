"""Layers are tested with every implementation of their kernels."""

from __future__ import annotations

import pytest
import torch

from nanoengine.kernels import native_kernels
from nanoengine.kernels.interface import Kernels, choose_kernels
from nanoengine.kernels.triton import launch

CPU = torch.device("cpu")


@pytest.fixture(params=["torch", "native", "triton"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    reason = None
    if request.param == "native":
        reason = native_kernels.why_not(CPU, torch.float32)
    elif request.param == "triton":  # in its interpreter
        reason = launch.why_not(CPU)
    if reason is not None:
        pytest.skip(f"no {request.param} kernels: {reason}")
    return choose_kernels(request.param, CPU, torch.float32)
