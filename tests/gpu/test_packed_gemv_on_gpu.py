"""Products of few rows with packed weights at full size, and the permutes that they are made of, which no interpreter runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanoengine.kernels.operations import Norm
from nanoengine.kernels.quantized.tensor import Grouped
from nanoengine.models.quantization.at_load import quantizer
from tests.gpu.marks import needs_gpu

pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux on x86-64 alone")
import triton
import triton.language as tl

from nanoengine.kernels.triton.products.fusion import Fusion
from nanoengine.kernels.triton.products.packed import PackedWeight, raised_numbers
from nanoengine.kernels.triton.products.packed_gemv import packed_gemv

pytestmark = needs_gpu


@triton.jit
def _raise(stored, found, BITS: tl.constexpr, BYTES: tl.constexpr):
    place = tl.arange(0, BYTES)
    numbers = raised_numbers(tl.load(stored + place), BITS)
    tl.store(found + place, numbers[0])
    if BITS == 4:
        tl.store(found + BYTES + place, numbers[1])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_warps", [1, 4, 8])
def test_every_byte_is_raised_exactly(bits: int, num_warps: int) -> None:
    """Eight, two and one to a thread: permutes take four."""
    stored = torch.arange(256, device="cuda").flip(0).to(torch.uint8)
    found = torch.zeros(8 // bits, 256, device="cuda")
    _raise[(1,)](stored, found, BITS=bits, BYTES=256, num_warps=num_warps)
    expected = stored[None] if bits == 8 else torch.stack((stored & 15, stored >> 4))
    assert torch.equal(found.double(), expected.double() + 2.0**23)


def normed(x: Tensor, norm: Tensor) -> Tensor:
    return x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * norm


@pytest.mark.parametrize("name", ["int8", "int4", "int4-128"])
@pytest.mark.parametrize(
    ("inputs", "outputs", "around"),
    [
        (2560, 6144, "norm"),
        (4096, 2560, ""),
        (2560, 19456, "gate"),
        (9728, 2560, ""),
        (896, 1152, "norm"),
        (100, 50, ""),
    ],
)
def test_products_of_4b_are_those_of_float64(name: str, inputs: int, outputs: int, around: str) -> None:
    """And of a smaller model whose chunks are short; and none depends on how it is launched."""
    generator = torch.Generator("cuda").manual_seed(inputs)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    source = quantizer(name)(numbers(outputs, inputs) / inputs**0.5)
    assert isinstance(source, Grouped)
    weight = PackedWeight.like(source, outputs, torch.device("cuda"))
    assert weight.take_rows(0, source)
    exact_weight, is_newer = source.dequantize(torch.float32).double(), torch.cuda.get_device_capability() >= (9, 0)
    for rows in range(1, 5):
        x, residual = numbers(rows, inputs).bfloat16(), numbers(rows, inputs).bfloat16()
        fusion = Fusion(activation="silu" if around == "gate" else None, dtype=torch.float32)
        exact, expected_total = x.double(), x
        if around:
            norm_weight, expected_total = 1 + numbers(inputs) / 9, x + residual
            fusion = fusion._replace(norm=Norm(norm_weight, 1e-6), residual=residual)
            exact = normed(expected_total.double(), norm_weight.double())
        exact = exact @ exact_weight.T
        if around == "gate":
            gate, up = exact.chunk(2, 1)
            exact = gate * gate.sigmoid() * up
        found, total = packed_gemv(x, weight, fusion)
        assert torch.equal(total, expected_total)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
        for launch in (1, 2) if is_newer else ():
            again, _ = packed_gemv(x, weight, fusion._replace(launch=launch))
            assert torch.equal(again, found)
