"""What no drawn case of the native kernels reaches: numbers at their ends, long sums, weights that are filled otherwise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from nanoengine.kernels.native.c_functions import c_functions
from nanoengine.kernels.native.operations import NativeKernels
from nanoengine.kernels.reference.gates import ACTIVATIONS
from tests.kernels.formulas import DTYPES, all_rows, assert_gated, new_weight, random, weight_of
from tests.kernels.marks import needs_kernels

pytestmark = needs_kernels
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return NativeKernels()


# ---- what is not finite


def test_embed_keeps_the_bits_of_values_that_are_not_finite(kernels: NativeKernels) -> None:
    values = random(5, 9, dtype=torch.bfloat16)
    values[1, 2], values[1, 3], values[4, 8] = torch.nan, -torch.inf, torch.inf
    assert torch.equal(all_rows(kernels, weight_of(kernels, values)).view(torch.int16), values.view(torch.int16))


# ---- gates


def one_input(gates: Tensor, ups: Tensor) -> tuple[Tensor, Tensor]:
    """A single x = 1 and a weight whose products are these numbers."""
    return torch.ones(1, 1, dtype=gates.dtype), torch.cat((gates, ups))[:, None]


@both_dtypes
@pytest.mark.parametrize("size", [4640, 4639])
def test_gates_of_every_size(kernels: NativeKernels, size: int, dtype: torch.dtype) -> None:
    """From one end of the dtype to the other, the steep middle in small steps."""
    magnitudes = torch.cat((torch.logspace(-37, 37, 320), torch.linspace(0, 100, 2000)))
    gates = torch.cat((magnitudes, -magnitudes))[:size].to(dtype)
    x, w = one_input(gates, random(size, dtype=dtype, seed=1).clamp(-3, 3))
    for activation in ACTIVATIONS:
        assert_gated(kernels.product(x, weight_of(kernels, w), activation=activation)[0], x, w, activation)


@both_dtypes
@pytest.mark.parametrize("size", [32, 3])
def test_gates_that_are_not_finite(kernels: NativeKernels, size: int, dtype: torch.dtype) -> None:
    gates = torch.tensor([torch.inf, torch.nan, *[1.0] * (size - 2)], dtype=dtype)
    x, w = one_input(gates, torch.full((size,), 2.0, dtype=dtype))
    for activation in ACTIVATIONS:
        (out,), _ = kernels.product(x, weight_of(kernels, w), activation=activation)
        torch.testing.assert_close(out[0].item(), 21.0 if activation == "clamped" else torch.inf, rtol=1e-2, atol=0)
        assert out[1].isnan()
        assert out[2:].isfinite().all()


# ---- weights


@both_dtypes
@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_checkpoint_may_have_another_dtype(kernels: NativeKernels, source: torch.dtype, dtype: torch.dtype) -> None:
    values, weight = random(40, 31, dtype=source), new_weight(kernels, 40, 31, dtype)
    weight.rows(0, 40).copy_(values)
    assert torch.equal(all_rows(kernels, weight), values.to(dtype))


@pytest.mark.parametrize("shape", [(3, 7), (4, 8), (4, 6), (28,)])
def test_rows_of_another_shape_are_refused(kernels: NativeKernels, shape: tuple[int, ...]) -> None:
    weight = new_weight(kernels, 40, 7, torch.float32)
    experts = kernels.new_experts(2, 4, 7, torch.float32, torch.device("cpu"))
    assert experts.shape == (2, 4, 7)
    for place in (weight.rows(0, 4), experts.expert(1)):
        with pytest.raises((AssertionError, RuntimeError, ValueError)):
            place.copy_(torch.zeros(shape))


def test_the_fingerprint_says_whether_linux_grants_this_process_amx() -> None:
    """Sums in tiles have other bits, and the machine code is the same. Quantized weights are multiplied in tiles, too."""
    c = vars(c_functions())
    found = [NativeKernels(c=SimpleNamespace(**c | {"uses_tiles": lambda own=own: own})) for own in (0, 1)]
    assert found[0].fingerprint != found[1].fingerprint
    assert NativeKernels().fingerprint == found[c["uses_tiles"]()].fingerprint
    assert [kernels.activation_dtype for kernels in found] == ["int8", "bfloat16"]
