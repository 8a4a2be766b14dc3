"""GGMLBlocks: a matrix in a block format of ggml, in the bytes of a GGUF file."""

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
        data: [outputs, bytes of a row] uint8 on the CPU; a view of a mapped file or memory.
        format: its name, one of `ggml_numbers.SIZES`.
        fast: dequantizes to a dtype in less time than the package `gguf`; None: there is no such function.
    """

    data: Tensor
    format: str
    fast: Callable[[GGMLBlocks, torch.dtype], Tensor] | None = None

    @property
    def shape(self) -> torch.Size:
        values, nbytes = SIZES[self.format]
        return torch.Size((len(self.data), self.data.shape[1] // nbytes * values))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        if self.fast is not None:
            return self.fast(self, dtype)
        return dequantize(self.data, self.format, self.shape, dtype)

    def __getitem__(self, rows: Tensor | slice) -> GGMLBlocks:
        return GGMLBlocks(self.data[rows], self.format, self.fast)
