"""What no drawn case of the native kernels reaches: numbers at their ends, long sums, weights that are filled otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanoengine.kernels.gates import ACTIVATIONS
from nanoengine.kernels.interface import Weight
from nanoengine.kernels.native_kernels import NativeKernels
from tests.kernels.draws import DRAWS, native_draw, needs_kernels, random_keys
from tests.kernels.formulas import DTYPES, assert_gated, assert_linear, new_weight, random, weight_of
from tests.kernels.mixtures import mixture

pytestmark = needs_kernels
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return NativeKernels()


def rows_of(kernels: NativeKernels, weight: Weight) -> Tensor:
    return kernels.embed(torch.arange(weight.shape[0]), weight)


@both_dtypes
def test_a_large_linear(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """Several panels of outputs, long sums."""
    x, w = random(100, 3000, dtype=dtype), random(300, 3000, dtype=dtype, seed=1)
    assert_linear(kernels.linear(x, weight_of(kernels, w), None), x, w, None)


# ---- what is not finite


@both_dtypes
@pytest.mark.parametrize("outputs", [31, 32, 33])
def test_products_that_are_not_finite_stay_where_they_are(
    kernels: NativeKernels, outputs: int, dtype: torch.dtype
) -> None:
    x, w = random(20, 48, dtype=dtype), random(outputs, 48, dtype=dtype, seed=1)
    x[3, 7], x[5, 0], w[30, 1] = torch.nan, torch.inf, torch.nan
    out = kernels.linear(x, weight_of(kernels, w), None)
    assert out[3].isnan().all()
    assert not out[5].isfinite().any()
    assert out[:, 30].isnan().all()
    rows = [i for i in range(20) if i not in (3, 5)]
    assert out[rows][:, [i for i in range(outputs) if i != 30]].isfinite().all()


@both_dtypes
@pytest.mark.parametrize("place", [2, 19])
def test_the_norm_of_nan_is_nan_in_its_row_only(kernels: NativeKernels, place: int, dtype: torch.dtype) -> None:
    x = random(3, 20, dtype=dtype)
    x[1, place] = torch.nan
    out = kernels.rms_norm(x, random(20, dtype=torch.float32, seed=1), 1e-6)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@both_dtypes
def test_experts_of_rows_that_are_not_finite_spoil_no_other(kernels: NativeKernels, dtype: torch.dtype) -> None:
    given = mixture(20, 4, 2, 40, 33, dtype)
    expected = given.by(kernels)
    x, factors = given.x.clone(), given.factors.clone()
    x[3], x[4, 1], factors[5] = torch.nan, torch.inf, torch.nan
    out = replace(given, x=x, factors=factors).by(kernels)
    assert not out[3:6].isfinite().all(1).any()
    rest = [i for i in range(20) if i not in (3, 4, 5)]
    assert torch.equal(out[rest], expected[rest])


def test_embed_keeps_the_bits_of_values_that_are_not_finite(kernels: NativeKernels) -> None:
    values = random(5, 9, dtype=torch.bfloat16)
    values[1, 2], values[1, 3], values[4, 8] = torch.nan, -torch.inf, torch.inf
    assert torch.equal(rows_of(kernels, weight_of(kernels, values)).view(torch.int16), values.view(torch.int16))


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
        assert_gated(kernels.gated_linear(x, weight_of(kernels, w), activation), x, w, activation)


@both_dtypes
@pytest.mark.parametrize("size", [32, 3])
def test_gates_that_are_not_finite(kernels: NativeKernels, size: int, dtype: torch.dtype) -> None:
    gates = torch.tensor([torch.inf, torch.nan, *[1.0] * (size - 2)], dtype=dtype)
    x, w = one_input(gates, torch.full((size,), 2.0, dtype=dtype))
    for activation in ACTIVATIONS:
        out = kernels.gated_linear(x, weight_of(kernels, w), activation)[0]
        torch.testing.assert_close(out[0].item(), 21.0 if activation == "clamped" else torch.inf, rtol=1e-2, atol=0)
        assert out[1].isnan()
        assert out[2:].isfinite().all()


# ---- weights


@both_dtypes
def test_a_part_that_is_filled_again_holds_the_new_rows_and_spoils_no_other(
    kernels: NativeKernels, dtype: torch.dtype
) -> None:
    values, others = random(70, 33, dtype=dtype), random(9, 33, dtype=dtype, seed=1)
    weight = weight_of(kernels, values)
    weight.rows(28, 9).copy_(others)
    values[28:37] = others
    assert torch.equal(rows_of(kernels, weight), values)
    x = random(2, 33, dtype=dtype, seed=2)
    assert torch.equal(kernels.logits(x, weight), kernels.logits(x, weight_of(kernels, values)))


@both_dtypes
@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_checkpoint_may_have_another_dtype(kernels: NativeKernels, source: torch.dtype, dtype: torch.dtype) -> None:
    values, weight = random(40, 31, dtype=source), new_weight(kernels, 40, 31, dtype)
    weight.rows(0, 40).copy_(values)
    assert torch.equal(rows_of(kernels, weight), values.to(dtype))


@pytest.mark.parametrize("shape", [(3, 7), (4, 8), (4, 6), (28,)])
def test_rows_of_another_shape_are_refused(kernels: NativeKernels, shape: tuple[int, ...]) -> None:
    weight = new_weight(kernels, 40, 7, torch.float32)
    experts = kernels.new_experts(2, 4, 7, torch.float32, torch.device("cpu"))
    assert experts.shape == (2, 4, 7)
    for place in (weight.rows(0, 4), experts.expert(1)):
        with pytest.raises((AssertionError, RuntimeError, ValueError)):
            place.copy_(torch.zeros(shape))


# ---- drawing


def test_a_token_that_is_ruled_out_is_never_drawn() -> None:
    logits = torch.full((50, 20_000), -torch.inf)
    allowed = torch.arange(50) * 399 + 3
    logits[torch.arange(50), allowed] = -1e30
    assert torch.equal(native_draw(logits, random_keys(50)), allowed)


@pytest.mark.parametrize("places", [[5, 20], [0, 16], [3, 4], [17, 16_390], [100, 16_384, 33_000]])
def test_of_equal_sums_the_first_is_drawn(places: list[int]) -> None:
    """The noise is lost in logits as large as these."""
    logits = torch.zeros(2, 40_000)
    logits[:, places] = 1e30
    for draw in DRAWS:
        assert draw(logits, random_keys(2)).tolist() == [places[0]] * 2
