"""What the C functions are told of tensors: dtypes and addresses."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Dtypes that the kernels compute with, as simd.h numbers them."""


def address(tensor: Tensor | None) -> int | None:
    """Of a tensor that may be missing, and else must be in one piece."""
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


def address_of_floats(tensor: Tensor | None) -> int | None:
    """Of norms, sinks, and the biases and factors of experts: float32, whatever the dtype of what they are used with."""
    assert tensor is None or tensor.dtype is torch.float32
    return address(tensor)
