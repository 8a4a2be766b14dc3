"""Dequantization of ggml block formats by the package `gguf` of llama.cpp: float32, by the definition of each format."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nanoengine.kernels.quantized.ggml_formats import FORMATS

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Formats without blocks."""

SIZES = {known.name: (known.values, known.nbytes) for known in FORMATS.values()}
"""Name of a format -> values and bytes of a block."""

PIECE = 1 << 17
"""Numbers that are dequantized at a time: temporaries are small, and mostly fit in the CPU's caches."""


def dequantize(data: Tensor, format: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """The numbers of a tensor.

    Args:
        data: [bytes] uint8, as in the file.
        format: its name, one of `SIZES`.
        shape: of the result; rows are multiples of the format's block.
        dtype: of the result, rounded once from float32; None: F16 and BF16 as stored, float32 for all other formats.

    Returns:
        A new tensor on the CPU, or without a conversion a view of `data`.
    """
    if format in FLOATS:
        whole = data if data.data_ptr() % FLOATS[format].itemsize == 0 else data.clone()
        return whole.view(FLOATS[format]).view(*shape).to(dtype or FLOATS[format])
    from gguf import GGMLQuantizationType, quants  # late: the import takes time

    values, nbytes = SIZES[format]
    blocks = data.view(-1, nbytes)
    out = torch.empty(math.prod(shape) // values, values, dtype=dtype or torch.float32, device="cpu")
    count = PIECE // values
    with np.errstate(all="ignore"):  # scales may be infinite or NaN
        for part, result in zip(blocks.split(count), out.split(count), strict=True):
            row = part.numpy().reshape(1, -1)  # the package loops over every 16 rows
            numbers = quants.dequantize(row, GGMLQuantizationType[format])
            result.copy_(torch.from_numpy(numbers).view(len(part), -1))
    return out.view(*shape)
