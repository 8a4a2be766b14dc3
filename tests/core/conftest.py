"""The layers of the core over its own kernels."""

from __future__ import annotations

import pytest
import torch

from nanoengine.core.kernels import Kernels
from nanoengine.core.layers import Factory


@pytest.fixture
def factory() -> Factory:
    return Factory(Kernels(), torch.float32, torch.device("cpu"))
