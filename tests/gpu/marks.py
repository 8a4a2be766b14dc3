"""What tests on a GPU are marked with."""

from __future__ import annotations

import pytest
import torch

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none"),
]
