"""How one quantized layer lies in the tensors of a checkpoint: which there are, what shape they have, what they stand for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from nanoengine.errors import InvalidWeights
from nanoengine.kernels.quantized.nvfp4 import NVFP4
from nanoengine.kernels.quantized.tensor import Float8, Grouped, QuantizedTensor
from nanoengine.models.quantization.scheme import Scheme

CELL = 32
"""Kernels for CPUs keep whole numbers whose scales are those of a multiple of so many inputs; all others become numbers."""

SCALES = ("F16", "BF16", "F32")
INDICES = ("I32", "I64")

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours lies in each 4 bits of a word, the lowest first (AutoAWQ, awq/utils/packing_utils.py)."""

Shape = tuple[int, ...]


class Part(NamedTuple):
    """What the header of a tensor must say."""

    allowed: dict[str, tuple[Shape, ...]]
    """Each dtype that it may have, and shapes that go with it."""

    needed: bool = True


class Layout(ABC):
    """Of a layer `prefix`, the tensors `prefix.suffix`; those that `parts` does not name change nothing here.

    Most are whole numbers, with scales for groups of inputs.
    """

    body: str
    """Suffix of the tensor with the numbers. A layer that has this tensor is quantized, unless it is a plain float weight."""

    suffixes: tuple[str, ...]
    """Of all the others."""

    early: Set[str] = frozenset(("g_idx", "weight_g_idx", "weight_shape"))
    """Suffixes of small tensors, to be looked at before anything is loaded."""

    def __init__(self, scheme: Scheme):
        self.scheme, self.per_word = scheme, 32 // scheme.bits
        self.stays_packed = (scheme.group or CELL) % CELL == 0
        """Whether kernels for CPUs keep what is read as it is."""

    def check(self, name: str, shape: tuple[int, int], early: Mapping[str, Tensor]) -> None:
        """Look at those of them that there are.

        Raises:
            InvalidWeights: they say what is not computed, or contradict the config; the message names one.
        """
        group = self.scheme.group or shape[1]
        for suffix, tensor in early.items():
            own = torch.arange(shape[1], dtype=torch.int64, device="cpu") // group
            if suffix.endswith("g_idx") and not torch.equal(tensor.long(), own):
                raise InvalidWeights(
                    f"{suffix} of {name} groups inputs in an order of its own (desc_act true, or actorder 'group'): only {group} "
                    "neighbours in each are computed; take a checkpoint that was quantized without"
                )
            if suffix == "weight_shape" and tensor.tolist() != list(shape):
                raise InvalidWeights(
                    f"{suffix} of {name} is {tensor.tolist()}, but its words hold {list(shape)} numbers"
                )

    def shape(self, body: Sequence[int]) -> tuple[int, int]:
        """Outputs and inputs of the layer whose body has this shape of two dimensions."""
        return body[0], body[1]

    @abstractmethod
    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        """What the headers of its tensors must say, by suffix, the body among them."""

    @abstractmethod
    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> QuantizedTensor | Tensor:
        """The layer's matrix, of tensors that are as `parts` says; numbers, where no quantized tensor could hold them."""

    def groups(self, inputs: int) -> int:
        return 1 if self.scheme.group is None else -(-inputs // self.scheme.group)

    def words(self, count: int) -> int:
        return -(-count // self.per_word)

    def grouped(self, numbers: Tensor, scales: Tensor, zeros: Tensor | None) -> Grouped:
        bits = self.scheme.bits
        if zeros is not None:
            zeros = None if bool((zeros == 1 << bits - 1).all()) else zeros.contiguous()
        return Grouped(numbers, scales.contiguous(), zeros, bits)


class AWQ(Layout):
    """Eight outputs in a word, in an order of its own (AutoAWQ, awq/modules/linear/gemm.py)."""

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
    """Several inputs in a word, and of zero points several outputs (GPTQModel, gptqmodel/nn_modules/qlinear/torch.py)."""

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
                "false, or set checkpoint_format to what it is, 'gptq' (zero points less one) or 'gptq_v2'"
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
    """compressed-tensors' pack-quantized: inputs in words, of zero points outputs; all that is signed is shifted to begin at 0
    (compressed_tensors/compressors/pack_quantized). Old files have zero points in bytes, as they are.
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
            "weight_shape": Part(dict.fromkeys(INDICES, ((2,),)), needed=False),
            "weight_g_idx": Part(dict.fromkeys(INDICES, ((inputs,),)), needed=False),
        }
        if not self.scheme.symmetric:
            packed, plain = (self.words(outputs), groups), (outputs, groups)
            parts["weight_zero_point"] = Part({"I32": (packed,), "I8": (plain,)})
        return parts

    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Grouped:
        numbers, bits = unpack(tensors["weight_packed"], self.scheme.bits), self.scheme.bits
        scales, zeros = a_row_each(tensors["weight_scale"], len(numbers)), tensors.get("weight_zero_point")
        if zeros is not None:
            in_order = from_zero(zeros, bits) if zeros.dtype == torch.int8 else unpack(zeros.t(), bits).t()
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
        numbers, zeros = from_zero(tensors["weight"], 8), tensors.get("weight_zero_point")
        if zeros is not None:
            zeros = a_row_each(from_zero(zeros, 8), len(numbers))
        return self.grouped(numbers, a_row_each(tensors["weight_scale"], len(numbers)), zeros)


class EightBitFloats(Layout):
    """Floats of 8 bits with a scale for a tensor, for each output, or for each block; of the last, numbers are computed at once,
    since kernels have scales of outputs only.
    """

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
            return Float8(numbers, a_row_each(scales, len(numbers)))
        rows, columns = self.block
        whole = scales.repeat_interleave(rows, 0)[: numbers.shape[0]]
        return (numbers.float() * whole.repeat_interleave(columns, 1)[:, : numbers.shape[1]]).to(dtype)


class FourBitFloats(Layout):
    """NVFP4 of compressed-tensors (compressed_tensors/compressors/nvfp4): two floats in a byte, the first in its lower half, and
    a float32 that scales are divided by.
    """

    body = "weight_packed"
    suffixes: tuple[str, ...] = ("weight_scale", "weight_global_scale", "input_global_scale")
    factor = "weight_global_scale"

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
            raise InvalidWeights(
                "weight_scale has numbers that are below zero or none: of NVFP4, scales are from 0 to 448"
            )
        numbers = unpack(tensors[self.body], 4)
        return NVFP4(numbers, scales, a_row_each(self.multiplied(tensors[self.factor]), len(numbers)))

    def multiplied(self, factor: Tensor) -> Tensor:
        """What scales are multiplied by."""
        return 1 / factor


class FourBitFloatsOfModelOpt(FourBitFloats):
    """NVFP4 of ModelOpt (modelopt/torch/export), with a float32 that scales are multiplied by."""

    body = "weight"
    suffixes = ("weight_scale", "weight_scale_2", "input_scale")
    factor = "weight_scale_2"

    def multiplied(self, factor: Tensor) -> Tensor:
        return factor


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


def scale_shapes(outputs: int, groups: int) -> tuple[Shape, ...]:
    """Of what there is for each output and group, for each output, or once."""
    return ((outputs, groups), (outputs,), (1,), ()) if groups == 1 else ((outputs, groups),)


def a_row_each(values: Tensor, outputs: int) -> Tensor:
    """What has one of `scale_shapes`, with a row for each output."""
    if values.dim() < 2:
        values = values.reshape(-1, 1)
    return values.expand(outputs, -1).contiguous()


def from_zero(numbers: Tensor, bits: int) -> Tensor:
    """Signed numbers, shifted to begin at 0: as many bits, unsigned."""
    return numbers.view(torch.uint8) + (1 << bits - 1)


def unpack(words: Tensor, bits: int) -> Tensor:
    """[rows, n] int32 -> [rows, n * 32 / bits] uint8, the first number in the lowest bits; the host is little-endian."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    pairs = octets.to(torch.int16)
    pairs |= pairs << 4
    pairs &= 0x0F0F
    return pairs.view(torch.uint8)


def unpack_awq(words: Tensor) -> Tensor:
    """[rows, n] int32 -> [n * 8, rows] uint8: transposed, which is cheaper before there are eight numbers for each word."""
    columns = words.t().contiguous()
    numbers = torch.empty(len(columns), 8, len(words), dtype=torch.uint8, device="cpu")
    for place, number in enumerate(AWQ_ORDER):
        numbers[:, number] = columns >> 4 * place & 15
    return numbers.flatten(0, 1)
