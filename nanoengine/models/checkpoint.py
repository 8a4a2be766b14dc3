"""Checkpoint: the interface of weights in files of any format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nanoengine.kernels.quantized.tensor import QuantizedExperts, QuantizedTensor

FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """The header of a tensor, which is known without reading it."""

    name: str
    dtype: str  # one of FLOATS, if it can be loaded
    shape: list[int]
    file: str  # for messages
    stored_bytes: int | None = None  # of a quantized tensor that may stay quantized
    adds_nothing: bool = False  # all zeros: a model without a slot for it ignores it


class Checkpoint(Protocol):
    """The weights of a model in files."""

    location: str
    """The folder or file, for messages."""

    def headers(self) -> Iterator[TensorHeader]:
        """The tensors in the files, from their headers alone.

        Raises:
            ModelNotFound, InvalidWeights: files that are missing or broken.
        """
        ...

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor | QuantizedTensor | QuantizedExperts]]:
        """Each tensor once, in `dtype`, in that of the file, or quantized; a yielded tensor is valid until the next one."""
        ...

    def fingerprint(self) -> str:
        """A hash of all weights, at the speed of reading them."""
        ...
