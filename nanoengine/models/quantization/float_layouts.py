"""Layouts of FP8 and NVFP4 layers in the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nanoengine.errors import InvalidWeights
from nanoengine.kernels.quantized.nvfp4 import NVFP4
from nanoengine.kernels.quantized.tensor import Float8
from nanoengine.models.quantization.layout import SCALES, Layout, Part, expand_rows, scale_shapes, unpack
from nanoengine.models.quantization.scheme import Scheme


class EightBitFloats(Layout):
    """FP8 with a scale of a tensor, of each output, or of each block; blocks are dequantized: kernels have scales of outputs."""

    body = "weight"
    suffixes = ("weight_scale", "weight_scale_inv", "weight_zero_point", "input_scale")

    def __init__(self, scheme: Scheme):
        super().__init__(scheme)
        self.block, self.stays_packed = scheme.block, False
        self.scales = "weight_scale" if scheme.block is None else scheme.block_scales

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        shapes = scale_shapes(outputs, 1)
        if self.block is not None:
            shapes = ((-(-outputs // self.block[0]), -(-inputs // self.block[1])),)
        return {"weight": Part({"F8_E4M3": ((outputs, inputs),)}), self.scales: Part(dict.fromkeys(SCALES, shapes))}

    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Float8 | Tensor:
        numbers, scales = tensors["weight"], tensors[self.scales].float()
        if self.block is None:
            return Float8(numbers, expand_rows(scales, len(numbers)))
        rows, columns = self.block
        whole = scales.repeat_interleave(rows, 0)[: numbers.shape[0]]
        return (numbers.float() * whole.repeat_interleave(columns, 1)[:, : numbers.shape[1]]).to(dtype)


class FourBitFloats(Layout):
    """NVFP4 of compressed-tensors (compressed_tensors/compressors/nvfp4): two floats in a byte, the first in its lower half, and
    a float32 that scales are divided by.
    """

    body = "weight_packed"
    suffixes: tuple[str, ...] = ("weight_scale", "weight_global_scale", "input_global_scale")
    factor, divides = "weight_global_scale", True

    def __init__(self, scheme: Scheme):
        super().__init__(scheme)
        self.stays_packed = True

    def shape(self, body: Sequence[int]) -> tuple[int, int]:
        return body[0], body[1] * 2

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        return {
            self.body: Part({"U8": ((outputs, inputs // 2),)}),
            "weight_scale": Part({"F8_E4M3": ((outputs, self.groups(inputs)),)}),
            self.factor: Part({"F32": ((), (1,))}),
        }

    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> NVFP4:
        scales = tensors["weight_scale"].view(torch.uint8)
        if bool((scales >= 0x7F).any()):
            raise InvalidWeights("weight_scale has numbers below zero or NaN: of NVFP4, it must be from 0 to 448")
        numbers, factor = unpack(tensors[self.body], 4), tensors[self.factor]
        return NVFP4(numbers, scales, expand_rows(1 / factor if self.divides else factor, len(numbers)))


class FourBitFloatsOfModelOpt(FourBitFloats):
    """NVFP4 of ModelOpt (modelopt/torch/export), with a float32 that scales are multiplied by."""

    body = "weight"
    suffixes = ("weight_scale", "weight_scale_2", "input_scale")
    factor, divides = "weight_scale_2", False
