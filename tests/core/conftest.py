"""The layers of the core over its own kernels."""

from __future__ import annotations

import pytest
import torch

from nanoengine.core.kernels import CoreKernels
from nanoengine.core.layers import WeightFactory


@pytest.fixture
def factory() -> WeightFactory:
    return WeightFactory(CoreKernels(), torch.float32, torch.device("cpu"))
