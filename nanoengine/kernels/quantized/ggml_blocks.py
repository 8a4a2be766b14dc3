"""GGMLBlocks: a matrix in one of ggml's block formats, as a GGUF file has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.kernels.quantized.ggml_numbers import SIZES, dequantize


@dataclass(frozen=True)
class GGMLBlocks:
    """A quantized matrix [outputs, inputs].

    Attributes:
        data: [outputs, bytes of a row] uint8; it may lie in a mapped file.
        type: the name of its format, one of `ggml_numbers.SIZES`.
        fast: makes the numbers, in a dtype, in less time than the package `gguf` does.
    """

    data: Tensor
    type: str
    fast: Callable[[GGMLBlocks, torch.dtype], Tensor] | None = None

    @property
    def shape(self) -> torch.Size:
        values, nbytes = SIZES[self.type]
        return torch.Size((len(self.data), self.data.shape[1] // nbytes * values))

    @property
    def format(self) -> str:
        return self.type

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        if self.fast is not None:
            return self.fast(self, dtype)
        return dequantize(self.data, self.type, self.shape, dtype)

    def __getitem__(self, rows: Tensor | slice) -> GGMLBlocks:
        return GGMLBlocks(self.data[rows], self.type, self.fast)
