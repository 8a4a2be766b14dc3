"""A matrix in blocks: its shape, its numbers, and some of its rows."""

from __future__ import annotations

import pytest
import torch

from nanoengine.kernels.native.support import unsupported_reason
from nanoengine.kernels.native.weights import dequantized
from nanoengine.kernels.quantized.ggml_blocks import GGMLBlocks
from nanoengine.kernels.quantized.ggml_numbers import SIZES, dequantize
from tests.kernels.quantized.test_ggml_numbers import KINDS, random_blocks

REASON = unsupported_reason(torch.device("cpu"), torch.float32)
needs_kernels = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")
in_both_ways = pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_kernels)])


def matrix(kind: str, native: bool) -> GGMLBlocks:
    """[7, 3 blocks]"""
    return GGMLBlocks(
        torch.from_numpy(random_blocks(kind, 21, seed=1)).view(7, -1), kind, dequantized if native else None
    )


@in_both_ways
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_its_blocks_in_any_order_of_rows(kind: str, native: bool) -> None:
    blocks, rows = matrix(kind, native), torch.tensor([6, 0, 3, 3])
    assert blocks.shape == (7, 3 * SIZES[kind][0])
    for dtype in (torch.float32, torch.bfloat16):
        expected = dequantize(blocks.data.flatten(), kind, blocks.shape, dtype)
        for some, right in ((blocks, expected), (blocks[rows], expected[rows])):
            found = some.dequantize(dtype)
            assert (found.dtype, some.format) == (dtype, kind)
            assert torch.equal(found, right)
