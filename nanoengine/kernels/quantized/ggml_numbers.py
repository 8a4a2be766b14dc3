"""The block formats of ggml, back into numbers, by the package `gguf` of llama.cpp's authors.

Results are those of the float32 arithmetic that the formats are defined by, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nanoengine.kernels.quantized.ggml_formats import FORMATS

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that store numbers as they are."""

SIZES = {known.name: (known.values, known.nbytes) for known in FORMATS.values()}
"""Name of a format -> numbers of a block, and its bytes."""

PIECE = 1 << 17
"""Numbers that are made at a time: what is in between takes little memory, and mostly stays in the CPU's caches."""


def dequantize(data: Tensor, type: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """The numbers of a tensor.

    Args:
        data: [bytes] uint8, as in the file.
        type: the name of its format; one of `SIZES`.
        shape: of the result; rows are multiples of the format's block.
        dtype: of the result; None is what the format is by itself: F16 and BF16 as stored, float32 of all others. Numbers are
            rounded once.

    Returns:
        A new tensor, or where nothing is to be converted a view of `data`.
    """
    if type in FLOATS:
        whole = data if data.data_ptr() % FLOATS[type].itemsize == 0 else data.clone()
        return whole.view(FLOATS[type]).view(*shape).to(dtype or FLOATS[type])
    from gguf import GGMLQuantizationType, quants  # when it is needed: it takes a while

    values, nbytes = SIZES[type]
    blocks = data.view(-1, nbytes)
    out = torch.empty(math.prod(shape) // values, values, dtype=dtype or torch.float32, device="cpu")
    count = PIECE // values
    with np.errstate(all="ignore"):  # scales may be infinite, or no numbers
        for part, result in zip(blocks.split(count), out.split(count), strict=True):
            row = part.numpy().reshape(1, -1)  # the package loops over every 16 rows
            numbers = quants.dequantize(row, GGMLQuantizationType[type])
            result.copy_(torch.from_numpy(numbers).view(len(part), -1))
    return out.view(*shape)
