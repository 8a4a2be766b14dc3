"""Where a tensor becomes an address: C takes the dtype, device and size of a tensor on trust, so they are checked here."""

from __future__ import annotations

import torch
from torch import Tensor


class WrongTensor(TypeError):
    """A tensor is not what a C function reads: another dtype, device, layout or size."""


class _Numbers(dict[torch.dtype, int]):
    def __missing__(self, dtype: torch.dtype) -> int:
        raise WrongTensor(f"C functions take {', '.join(map(str, self))} here, not {dtype}")


DTYPES = _Numbers({torch.float32: 0, torch.bfloat16: 1})
"""Dtypes that the kernels compute with, as simd.h numbers them."""

ANY = -1


def address(tensor: Tensor | None, dtype: torch.dtype, count: int = ANY) -> int | None:
    """Of a tensor that may be missing, and else must be on the CPU in one piece, with `count` elements of a dtype.

    Raises:
        WrongTensor: it is otherwise.
    """
    if tensor is None:
        return None
    if tensor.dtype is not dtype or not tensor.is_cpu or not tensor.is_contiguous() or ANY != count != tensor.numel():
        raise wrong(tensor, f"{dtype} on cpu in one piece" + f" of {count} elements" * (count != ANY))
    return tensor.data_ptr()


def rows(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> tuple[int | None, int]:
    """Address of a tensor of this shape, and elements between its rows, which may lie apart; (None, 0) if it is missing.

    Raises:
        WrongTensor: it is otherwise, or a row is not in one piece.
    """
    if tensor is None:
        return None, 0
    is_whole = tensor.is_contiguous() or tensor[:1].is_contiguous()
    if tensor.dtype is not dtype or not tensor.is_cpu or tensor.shape != shape or not is_whole:
        raise wrong(tensor, f"{dtype} {list(shape)} on cpu with rows in one piece")
    return tensor.data_ptr(), tensor.stride(0)


def wrong(tensor: Tensor, wanted: str) -> WrongTensor:
    """The error that says what a tensor is, and what C reads."""
    actual = f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}"
    return WrongTensor(f"a tensor is {actual}: a C function reads {wanted}")
