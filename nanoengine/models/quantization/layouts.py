"""Layouts of integer layers in the tensors of a checkpoint, and the layout of each scheme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nanoengine.errors import InvalidWeights
from nanoengine.kernels.quantized.tensor import Grouped
from nanoengine.models.quantization.float_layouts import EightBitFloats, FourBitFloats, FourBitFloatsOfModelOpt
from nanoengine.models.quantization.layout import (
    INDICES,
    SCALES,
    Layout,
    Part,
    expand_rows,
    scale_shapes,
    to_unsigned,
    unpack,
)
from nanoengine.models.quantization.scheme import Scheme

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of eight in each 4 bits of a word, from the lowest (AutoAWQ, awq/utils/packing_utils.py)."""


class AWQ(Layout):
    """AWQ: eight outputs in a word, in `AWQ_ORDER` (AutoAWQ, awq/modules/linear/gemm.py)."""

    body = "qweight"
    suffixes = ("qzeros", "scales")

    def shape(self, body: Sequence[int]) -> tuple[int, int]:
        return body[1] * 8, body[0]

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        groups = self.groups(inputs)
        return {
            "qweight": Part({"I32": ((inputs, outputs // 8),)}),
            "qzeros": Part({"I32": ((groups, outputs // 8),)}, needed=not self.scheme.symmetric),
            "scales": Part(dict.fromkeys(SCALES, ((groups, outputs),))),
        }

    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Grouped:
        zeros = unpack_awq(tensors["qzeros"]) if "qzeros" in tensors else None
        return self.grouped(unpack_awq(tensors["qweight"]), tensors["scales"].t(), zeros)


class GPTQ(Layout):
    """GPTQ: several inputs in a word; of zero points, several outputs (GPTQModel, gptqmodel/nn_modules/qlinear/torch.py)."""

    body = "qweight"
    suffixes = ("qzeros", "scales", "g_idx")

    def shape(self, body: Sequence[int]) -> tuple[int, int]:
        return body[1], body[0] * self.per_word

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        groups = self.groups(inputs)
        return {
            "qweight": Part({"I32": ((inputs // self.per_word, outputs),)}),
            "qzeros": Part({"I32": ((groups, self.words(outputs)),)}),
            "scales": Part(dict.fromkeys(SCALES, ((groups, outputs),))),
            "g_idx": Part(dict.fromkeys(INDICES, ((inputs,),)), needed=False),
        }

    def __init__(self, scheme: Scheme):
        super().__init__(scheme)
        self.early = Layout.early | ({"qzeros"} if scheme.symmetric else set())

    def check(self, name: str, shape: tuple[int, int], early: Mapping[str, Tensor]) -> None:
        super().check(name, shape, early)
        middle = 1 << self.scheme.bits - 1
        if "qzeros" in early and bool((self._zeros(early["qzeros"], shape[0]) != middle).any()):
            raise InvalidWeights(
                f"qzeros of {name} has other zero points than {middle}, but sym is true in the quantization_config: make it "
                "false, or correct checkpoint_format: 'gptq' (zero points less one) or 'gptq_v2'"
            )

    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Grouped:
        numbers, scales = unpack(tensors["qweight"].t(), self.scheme.bits), tensors["scales"].t()
        return self.grouped(numbers, scales, self._zeros(tensors["qzeros"], len(numbers)))

    def _zeros(self, words: Tensor, outputs: int) -> Tensor:
        bits = self.scheme.bits
        if self.scheme.zeros_less_one:  # of whole words, as GPTQModel does it: a zero point of 0 borrows from the next
            words = words + (0x11111111 if bits == 4 else 0x01010101)
        return unpack(words, bits)[:, :outputs].t()


class Packed(Layout):
    """compressed-tensors' pack-quantized: inputs in words; of zero points, outputs; signed integers have an offset
    (compressed_tensors/compressors/pack_quantized). Old files have zero points in signed bytes.
    """

    body = "weight_packed"
    suffixes = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    def shape(self, body: Sequence[int]) -> tuple[int, int]:
        return body[0], body[1] * self.per_word

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        groups = self.groups(inputs)
        parts = {
            "weight_packed": Part({"I32": ((outputs, inputs // self.per_word),)}),
            "weight_scale": Part(dict.fromkeys(SCALES, scale_shapes(outputs, groups))),
            "weight_g_idx": Part(dict.fromkeys(INDICES, ((inputs,),)), needed=False),
        }
        if not self.scheme.symmetric:
            packed, plain = (self.words(outputs), groups), (outputs, groups)
            parts["weight_zero_point"] = Part({"I32": (packed,), "I8": (plain,)})
        return parts

    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Grouped:
        numbers, bits = unpack(tensors["weight_packed"], self.scheme.bits), self.scheme.bits
        scales, zeros = expand_rows(tensors["weight_scale"], len(numbers)), tensors.get("weight_zero_point")
        if zeros is not None:
            in_order = to_unsigned(zeros, bits) if zeros.dtype == torch.int8 else unpack(zeros.t(), bits).t()
            zeros = in_order[: len(numbers)]
        return self.grouped(numbers, scales, zeros)


class Bytes(Layout):
    """compressed-tensors' int-quantized: signed bytes (compressed_tensors/compressors/naive_quantized)."""

    body = "weight"
    suffixes = ("weight_scale", "weight_zero_point", "input_scale", "input_zero_point")

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        shapes = scale_shapes(outputs, self.groups(inputs))
        parts = {"weight": Part({"I8": ((outputs, inputs),)}), "weight_scale": Part(dict.fromkeys(SCALES, shapes))}
        if not self.scheme.symmetric:
            parts["weight_zero_point"] = Part({"I8": shapes})
        return parts

    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Grouped:
        numbers, zeros = to_unsigned(tensors["weight"], 8), tensors.get("weight_zero_point")
        if zeros is not None:
            zeros = expand_rows(to_unsigned(zeros, 8), len(numbers))
        return self.grouped(numbers, expand_rows(tensors["weight_scale"], len(numbers)), zeros)


LAYOUTS: dict[str, type[Layout]] = {
    "awq": AWQ,
    "gptq": GPTQ,
    "packed": Packed,
    "bytes": Bytes,
    "float8": EightBitFloats,
    "nvfp4": FourBitFloats,
    "nvfp4-modelopt": FourBitFloatsOfModelOpt,
}


def layout_of(scheme: Scheme) -> Layout:
    return LAYOUTS[scheme.layout](scheme)


def unpack_awq(words: Tensor) -> Tensor:
    """[rows, n] int32 -> [n * 8, rows] uint8: transposed, which is cheaper before there are eight numbers for each word."""
    columns = words.t().contiguous()
    numbers = torch.empty(len(columns), 8, len(words), dtype=torch.uint8, device="cpu")
    for index, output in enumerate(AWQ_ORDER):
        numbers[:, output] = columns >> 4 * index & 15
    return numbers.flatten(0, 1)
