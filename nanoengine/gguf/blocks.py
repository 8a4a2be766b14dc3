"""GGMLBlocks: a matrix in one of ggml's block formats, as a GGUF file has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.gguf.quants import SIZES, dequantize


@dataclass(frozen=True)
class GGMLBlocks:
    """A quantized matrix [outputs, inputs].

    Attributes:
        data: [outputs, bytes of a row] uint8; it may lie in a mapped file.
        type: the name of its format, one of `kernels.native_operations.QUANTIZED`.
        native: whether C++ dequantizes it, where that must be.
    """

    data: Tensor
    type: str
    native: bool

    @property
    def shape(self) -> torch.Size:
        values, nbytes = SIZES[self.type]
        return torch.Size((len(self.data), self.data.shape[1] // nbytes * values))

    @property
    def format(self) -> str:
        return self.type

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return dequantize(self.data, self.type, self.shape, dtype, native=self.native)

    def __getitem__(self, rows: Tensor) -> GGMLBlocks:
        return GGMLBlocks(self.data[rows], self.type, self.native)
