"""The native operations against their formulas in float64, in every shape at which the kernels cut or pad."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.kernels.gates import ACTIVATIONS
from nanoengine.kernels.native_kernels import NativeKernels
from nanoengine.kernels.native_operations import unsupported_reason
from nanoengine.kernels.torch_kernels import TorchKernels
from tests.drawn import FAST
from tests.kernels.draws import DRAWS, native_draw, random_keys
from tests.kernels.formulas import (
    DTYPES,
    assert_drawn,
    assert_gated,
    assert_linear,
    assert_norm,
    new_weight,
    random,
    strided,
    weight_of,
)

REASON = unsupported_reason(torch.device("cpu"), torch.float32)
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
dtypes = st.sampled_from(DTYPES)
EPS = 1e-6


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return NativeKernels()


# ---- linear

ROWS = [1, 2, 3, 4, 11, 12, 13, 24, 25, 31, 32, 33, 37, 95, 96, 97, 128, 129, 130]


@both_dtypes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_linear_of_any_number_of_rows(kernels: NativeKernels, rows: int, bias: bool, dtype: torch.dtype) -> None:
    x, w = random(rows, 80, dtype=dtype), random(72, 80, dtype=dtype, seed=1)
    b = random(72, dtype=dtype, seed=2) if bias else None
    out = kernels.linear(x, weight_of(kernels, w), b)
    assert out.dtype == dtype
    assert_linear(out, x, w, b)


@FAST
@given(st.integers(1, 130), st.integers(1, 140), st.integers(1, 140), st.booleans(), dtypes)
def test_linear_of_any_shape(rows: int, outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> None:
    kernels = NativeKernels()
    x, w = random(rows, inputs, dtype=dtype, seed=rows), random(outputs, inputs, dtype=dtype, seed=1)
    b = random(outputs, dtype=dtype, seed=2) if bias else None
    assert_linear(kernels.linear(x, weight_of(kernels, w), b), x, w, b)


@FAST
@given(st.integers(1, 40), st.integers(1, 140), st.integers(1, 140), dtypes)
def test_logits_of_any_shape_are_not_rounded(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    kernels = NativeKernels()
    x, w = random(rows, inputs, dtype=dtype, seed=rows), random(outputs, inputs, dtype=dtype, seed=1)
    out = kernels.logits(x, weight_of(kernels, w))
    assert out.dtype == torch.float32
    assert_linear(out, x, w, None)


@both_dtypes
def test_a_large_linear(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """Several panels of outputs, long sums."""
    x, w = random(100, 3000, dtype=dtype), random(300, 3000, dtype=dtype, seed=1)
    assert_linear(kernels.linear(x, weight_of(kernels, w), None), x, w, None)


@both_dtypes
def test_linear_is_near_torchs(kernels: NativeKernels, dtype: torch.dtype) -> None:
    x, w, b = random(9, 96, dtype=dtype), random(50, 96, dtype=dtype, seed=1), random(50, dtype=dtype, seed=2)
    reference = TorchKernels()
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    torch.testing.assert_close(
        kernels.linear(x, weight_of(kernels, w), b),
        reference.linear(x, weight_of(reference, w), b),
        rtol=tolerance,
        atol=tolerance,
    )


@both_dtypes
def test_linear_of_no_rows(kernels: NativeKernels, dtype: torch.dtype) -> None:
    weight = weight_of(kernels, random(40, 33, dtype=dtype))
    assert kernels.linear(torch.empty(0, 33, dtype=dtype), weight, None).shape == (0, 40)
    assert kernels.logits(torch.empty(0, 33, dtype=dtype), weight).shape == (0, 40)


@both_dtypes
@pytest.mark.parametrize("outputs", [31, 32, 33])
def test_values_that_are_not_finite_stay_where_they_are(
    kernels: NativeKernels, outputs: int, dtype: torch.dtype
) -> None:
    x, w = random(20, 48, dtype=dtype), random(outputs, 48, dtype=dtype, seed=1)
    x[3, 7], x[5, 0], w[30, 1] = float("nan"), float("inf"), float("nan")
    out = kernels.linear(x, weight_of(kernels, w), None)
    assert out[3].isnan().all()
    assert not out[5].isfinite().any()
    assert out[:, 30].isnan().all()
    rows = [i for i in range(20) if i not in (3, 5)]
    assert out[rows][:, [i for i in range(outputs) if i != 30]].isfinite().all()


@both_dtypes
@pytest.mark.parametrize("inputs", [48, 47])
def test_linear_of_rows_with_gaps_between_them(kernels: NativeKernels, inputs: int, dtype: torch.dtype) -> None:
    x, weight = random(7, inputs, dtype=dtype), weight_of(kernels, random(33, inputs, dtype=dtype, seed=1))
    dense = kernels.linear(x, weight, None)
    for same in (strided(x), x.T.contiguous().T, torch.cat((x, x), dim=1)[:, :inputs]):
        assert not same.is_contiguous()
        assert torch.equal(kernels.linear(same, weight, None), dense)
    assert torch.equal(kernels.linear(x[::3], weight, None), dense[::3])
    assert torch.equal(kernels.logits(x[1:], weight), kernels.logits(x, weight)[1:])


# ---- weights


@st.composite
def parts(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(first, count) of the parts of a weight, in the order in which they are filled."""
    counts = draw(st.lists(st.integers(1, 50), min_size=1, max_size=6))
    return draw(st.permutations([(sum(counts[:i]), count) for i, count in enumerate(counts)]))


@FAST
@given(parts(), st.integers(1, 70), dtypes)
def test_a_weight_may_be_filled_in_parts_in_any_order(
    order: list[tuple[int, int]], inputs: int, dtype: torch.dtype
) -> None:
    kernels = NativeKernels()
    outputs = sum(count for _, count in order)
    values = random(outputs, inputs, dtype=dtype)
    whole, filled = weight_of(kernels, values), new_weight(kernels, outputs, inputs, dtype)
    for first, count in order:
        part = filled.rows(first, count)
        assert part.shape == (count, inputs)
        part.copy_(values[first : first + count])
    assert torch.equal(kernels.embed(torch.arange(outputs), filled), values)
    x = random(3, inputs, dtype=dtype, seed=1)
    assert torch.equal(kernels.logits(x, filled), kernels.logits(x, whole))


@both_dtypes
def test_a_part_that_is_filled_again_holds_the_new_rows_and_spoils_no_other(
    kernels: NativeKernels, dtype: torch.dtype
) -> None:
    values, others = random(70, 33, dtype=dtype), random(9, 33, dtype=dtype, seed=1)
    weight = weight_of(kernels, values)
    weight.rows(28, 9).copy_(others)
    values[28:37] = others
    assert torch.equal(kernels.embed(torch.arange(70), weight), values)
    x = random(2, 33, dtype=dtype, seed=2)
    assert torch.equal(kernels.logits(x, weight), kernels.logits(x, weight_of(kernels, values)))


@both_dtypes
@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_checkpoint_may_have_another_dtype(kernels: NativeKernels, source: torch.dtype, dtype: torch.dtype) -> None:
    values = random(40, 31, dtype=source)
    weight = new_weight(kernels, 40, 31, dtype)
    weight.rows(0, 40).copy_(values)
    assert torch.equal(kernels.embed(torch.arange(40), weight), values.to(dtype))


@both_dtypes
def test_rows_of_a_checkpoint_may_have_gaps_between_them(kernels: NativeKernels, dtype: torch.dtype) -> None:
    values = random(40, 31, dtype=dtype)
    for same in (strided(values), values.T.contiguous().T):
        assert torch.equal(kernels.embed(torch.arange(40), weight_of(kernels, same)), values)


def test_a_weight_has_the_shape_that_was_asked_for(kernels: NativeKernels) -> None:
    weight = new_weight(kernels, 33, 7, torch.float32)
    assert weight.shape == (33, 7)
    assert weight.rows(30, 3).shape == (3, 7)


@pytest.mark.parametrize("shape", [(3, 7), (4, 8), (4, 6), (28,)])
def test_rows_of_another_shape_are_refused(kernels: NativeKernels, shape: tuple[int, ...]) -> None:
    weight = new_weight(kernels, 40, 7, torch.float32)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        weight.rows(0, 4).copy_(torch.zeros(shape))


@FAST
@given(st.lists(st.integers(0, 69), max_size=60), st.integers(1, 70), dtypes)
def test_embed_gives_the_rows_themselves(ids: list[int], inputs: int, dtype: torch.dtype) -> None:
    kernels = NativeKernels()
    values = random(70, inputs, dtype=dtype)
    weight = weight_of(kernels, values)
    out = kernels.embed(torch.tensor(ids, dtype=torch.int64), weight)
    assert out.dtype == dtype
    assert torch.equal(out, values[ids])
    assert torch.equal(kernels.embed(torch.tensor(ids * 3, dtype=torch.int64)[::3], weight), values[(ids * 3)[::3]])


def test_embed_keeps_values_that_are_not_finite(kernels: NativeKernels) -> None:
    values = random(5, 9, dtype=torch.bfloat16)
    values[1, 2], values[1, 3], values[4, 8] = float("nan"), float("-inf"), float("inf")
    out = kernels.embed(torch.arange(5), weight_of(kernels, values))
    assert torch.equal(out.view(torch.int16), values.view(torch.int16))


# ---- norm

SIZES = [1, 7, 15, 16, 17, 31, 32, 33, 48, 100, 1024]


@both_dtypes
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 4, 5, 40])
def test_rms_norm(kernels: NativeKernels, rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, size, dtype=dtype), random(size, dtype=torch.float32, seed=1)
    before = x.clone()
    out = kernels.rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    assert_norm(out, x, weight, EPS)
    assert torch.equal(x, before)


@both_dtypes
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 4, 5, 40])
def test_add_rms_norm(kernels: NativeKernels, rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype, seed=1)
    weight = random(size, dtype=torch.float32, seed=2)
    before, added = x.clone(), x + residual
    out, total = kernels.add_rms_norm(x, residual, weight, EPS)
    assert out.dtype == total.dtype == dtype
    assert torch.equal(total, added)
    assert_norm(out, added, weight, EPS)
    assert torch.equal(x, before)


@both_dtypes
@pytest.mark.parametrize("eps", [1e-6, 1e-2, 1.0])
@pytest.mark.parametrize("size", [0.0, 1e-4, 1e4])
def test_rms_norm_of_small_and_large_values(
    kernels: NativeKernels, size: float, eps: float, dtype: torch.dtype
) -> None:
    x, weight = random(3, 50, dtype=dtype) * size, random(50, dtype=torch.float32, seed=1)
    assert_norm(kernels.rms_norm(x, weight, eps), x, weight, eps)


@both_dtypes
def test_rms_norm_of_more_dimensions_and_of_rows_with_gaps(kernels: NativeKernels, dtype: torch.dtype) -> None:
    x, weight = random(3, 4, 20, dtype=dtype), random(20, dtype=torch.float32, seed=1)
    dense = kernels.rms_norm(x, weight, EPS)
    assert_norm(dense, x, weight, EPS)
    for same in (strided(x), x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(kernels.rms_norm(same, weight, EPS), dense)
        normed, total = kernels.add_rms_norm(same, torch.zeros_like(x), weight, EPS)
        assert torch.equal(normed, dense)
        assert torch.equal(total, x)


@both_dtypes
def test_the_norm_of_nan_is_nan_in_its_row_only(kernels: NativeKernels, dtype: torch.dtype) -> None:
    for place in (2, 19):
        x, weight = random(3, 20, dtype=dtype), random(20, dtype=torch.float32, seed=1)
        x[1, place] = float("nan")
        out = kernels.rms_norm(x, weight, EPS)
        assert out[1].isnan().all()
        assert out[[0, 2]].isfinite().all()


# ---- gates


@both_dtypes
@pytest.mark.parametrize("size", [1, 16, 31, 32, 33, 40, 64, 96, 100])
@pytest.mark.parametrize("rows", [1, 5, 13, 33, 97])
def test_gated_linear(kernels: NativeKernels, rows: int, size: int, dtype: torch.dtype) -> None:
    x, w = random(rows, 50, dtype=dtype, seed=rows), random(2 * size, 50, dtype=dtype, seed=1)
    for activation in ACTIVATIONS:
        out = kernels.gated_linear(x, weight_of(kernels, w), activation)
        assert out.dtype == dtype
        assert_gated(out, x, w, activation)


@FAST
@given(st.integers(1, 130), st.integers(1, 100), st.integers(1, 140), dtypes)
def test_gated_linear_of_any_shape(rows: int, size: int, inputs: int, dtype: torch.dtype) -> None:
    kernels = NativeKernels()
    x, w = random(rows, inputs, dtype=dtype, seed=rows), random(2 * size, inputs, dtype=dtype, seed=1)
    assert_gated(kernels.gated_linear(x, weight_of(kernels, w)), x, w)


@both_dtypes
@pytest.mark.parametrize("size", [32, 33])
def test_gated_linear_is_near_torchs(kernels: NativeKernels, size: int, dtype: torch.dtype) -> None:
    x, w = random(9, 96, dtype=dtype) / 8, random(2 * size, 96, dtype=dtype, seed=1)
    reference = TorchKernels()
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(
        kernels.gated_linear(x, weight_of(kernels, w)),
        reference.gated_linear(x, weight_of(reference, w)),
        rtol=tolerance,
        atol=tolerance,
    )


def one_input(gates: Tensor, ups: Tensor) -> tuple[Tensor, Tensor]:
    """A single x = 1 and a weight whose products are these numbers."""
    return torch.ones(1, 1, dtype=gates.dtype), torch.cat((gates, ups))[:, None]


@both_dtypes
@pytest.mark.parametrize("size", [4640, 4639])
def test_gates_of_every_size(kernels: NativeKernels, size: int, dtype: torch.dtype) -> None:
    """From one end of the dtype to the other, the steep middle in small steps."""
    magnitudes = torch.cat((torch.logspace(-37, 37, 320), torch.linspace(0, 100, 2000)))
    x, w = one_input(
        torch.cat((magnitudes, -magnitudes))[:size].to(dtype), random(size, dtype=dtype, seed=1).clamp(-3, 3)
    )
    for activation in ACTIVATIONS:
        assert_gated(kernels.gated_linear(x, weight_of(kernels, w), activation), x, w, activation)


@FAST
@given(st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=40), st.sampled_from(ACTIVATIONS), dtypes)
def test_any_gates(gates: list[float], activation: str, dtype: torch.dtype) -> None:
    kernels = NativeKernels()
    gates += [0.0] * (-len(gates) % 32)
    x, w = one_input(torch.tensor(gates, dtype=dtype), random(len(gates), dtype=dtype))
    assert_gated(kernels.gated_linear(x, weight_of(kernels, w), activation), x, w, activation)


@both_dtypes
@pytest.mark.parametrize("size", [32, 3])
def test_gates_that_are_not_finite(kernels: NativeKernels, size: int, dtype: torch.dtype) -> None:
    gates = torch.tensor([float("inf"), float("nan"), *[1.0] * (size - 2)], dtype=dtype)
    x, w = one_input(gates, torch.full((size,), 2.0, dtype=dtype))
    for activation in ACTIVATIONS:
        out = kernels.gated_linear(x, weight_of(kernels, w), activation)[0]
        torch.testing.assert_close(out[0].item(), 21.0 if activation == "clamped" else float("inf"), rtol=1e-2, atol=0)
        assert out[1].isnan()
        assert out[2:].isfinite().all()


@both_dtypes
@pytest.mark.parametrize("size", [32, 33])
def test_gated_linear_of_rows_with_gaps_between_them(kernels: NativeKernels, size: int, dtype: torch.dtype) -> None:
    x, weight = random(6, 50, dtype=dtype), weight_of(kernels, random(2 * size, 50, dtype=dtype, seed=1))
    dense = kernels.gated_linear(x, weight)
    assert torch.equal(kernels.gated_linear(strided(x), weight), dense)
    assert torch.equal(kernels.gated_linear(x[::2], weight), dense[::2])


# ---- drawing


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 100, 16383, 16384, 16385, 40_000])
def test_the_highest_of_logit_and_noise_is_drawn(count: int) -> None:
    for scale in (0.0, 1.0, 5.0):
        logits, keys = random(9, count, dtype=torch.float32, seed=count) * scale, random_keys(9, count)
        assert_drawn(native_draw(logits, keys), logits, keys)


@FAST
@given(st.integers(1, 20), st.integers(1, 300), st.integers(0, 99))
def test_draws_of_any_shape(rows: int, count: int, seed: int) -> None:
    logits, keys = random(rows, count, dtype=torch.float32, seed=seed), random_keys(rows, seed)
    assert_drawn(native_draw(logits, keys), logits, keys)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    draws = 40_000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, -float("inf"), 3.0, 0.5])
    tokens = native_draw(logits.expand(draws, -1).contiguous(), torch.arange(draws) * 7919 + 13)
    counts, expected = tokens.bincount(minlength=7).double(), logits.double().softmax(0) * draws
    assert counts[4] == 0
    deviation = (counts - expected).abs() / (expected * (1 - expected / draws)).sqrt().clamp(min=1)
    assert (deviation < 5).all()


def test_a_token_that_is_ruled_out_is_never_drawn() -> None:
    logits = torch.full((50, 20_000), -float("inf"))
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


def test_a_draw_is_the_same_alone_and_in_a_batch() -> None:
    logits, keys = random(20, 17_000, dtype=torch.float32), random_keys(20)
    together = native_draw(logits, keys)
    for row in range(20):
        assert torch.equal(native_draw(logits[row : row + 1], keys[row : row + 1]), together[row : row + 1])


def test_draws_from_rows_with_gaps_between_them() -> None:
    logits, keys = random(20, 500, dtype=torch.float32), random_keys(20)
    dense = native_draw(logits, keys)
    assert torch.equal(native_draw(strided(logits), keys), dense)
    assert torch.equal(native_draw(logits, strided(keys)), dense)
    assert torch.equal(native_draw(logits[::2], keys[::2]), dense[::2])
