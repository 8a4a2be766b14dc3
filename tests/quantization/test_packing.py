"""Numbers come out of words in the order in which they were put in."""

from __future__ import annotations

import pytest
import torch

from nanoengine.quantization.packing import unpack, unpack_awq


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_first_number_has_the_lowest_bits(bits: int, transposed: bool) -> None:
    words = torch.randint(-(2**31), 2**31, (5, 5), dtype=torch.int32)
    words = words.t() if transposed else words
    numbers = unpack(words, bits)
    assert numbers.dtype == torch.uint8
    each = 32 // bits
    assert numbers.tolist() == [
        [(int(word) & 0xFFFFFFFF) >> bits * place & (1 << bits) - 1 for word in row for place in range(each)]
        for row in words
    ]


def test_awq_has_the_even_ones_first() -> None:
    assert unpack_awq(torch.tensor([[0x75316420], [0x00000001]])).tolist() == [[n, int(n == 0)] for n in range(8)]


def test_awq_with_the_sign_bit() -> None:
    assert unpack_awq(torch.tensor([[-0x70000000]], dtype=torch.int32)).flatten().tolist() == [0] * 7 + [9]
