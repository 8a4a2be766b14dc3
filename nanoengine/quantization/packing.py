"""Numbers of 4 or 8 bits in words of 32, unpacked: as most formats order them, and as AWQ does."""

from __future__ import annotations

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours lies in each 4 bits of a word, the lowest first (AutoAWQ, awq/utils/packing_utils.py)."""


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
    numbers = torch.empty(len(columns), 8, len(words), dtype=torch.uint8)
    for place, number in enumerate(AWQ_ORDER):
        numbers[:, number] = columns >> 4 * place & 15
    return numbers.flatten(0, 1)
