"""Layers are tested with every implementation of their kernels."""

from __future__ import annotations

import pytest
import torch

from nanoengine.kernels.interface import Kernels, choose_kernels


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return choose_kernels(request.param, torch.device("cpu"), torch.float32)
