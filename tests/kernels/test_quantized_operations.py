"""Operations over quantized weights: what is not rounded is that of the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanoengine.kernels.gates import ACTIVATIONS
from nanoengine.kernels.gates import gated as gated_in_torch
from nanoengine.kernels.interface import ExpertBiases, Weight
from nanoengine.kernels.native_kernels import NativeKernels
from nanoengine.kernels.native_operations import unsupported_reason
from nanoengine.kernels.native_weights import NativeWeight
from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.quantization.tensor import QuantizedTensor
from tests.kernels.formulas import DTYPES, assert_gated, random
from tests.kernels.mixtures import Mixture, assert_mixture, mixture
from tests.kernels.quantized_matrices import DIFFERENT, Format, drawn, experts_from, weight_from

REASON = unsupported_reason(torch.device("cpu"), torch.float32)
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")
each_kind = pytest.mark.parametrize("form", DIFFERENT, ids=str)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
EPS, INPUTS = 1e-5, 512
SIZES = [1, 2, 3, 4, 5, 7, 13, 96, 97]


@pytest.fixture(params=[True, False], ids=["exact", "rounded"])
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(exact=request.param)


@pytest.fixture
def exact() -> NativeKernels:
    return NativeKernels(exact=True)


def some_experts(form: Format, count: int, outputs: int, inputs: int, seed: int) -> list[QuantizedTensor]:
    return [drawn(form, outputs, inputs, seed=seed + i) for i in range(count)]


# ---- against other ways to the same


@pytest.mark.parametrize("with_bias", [False, True])
@each_kind
@both_dtypes
def test_linear_is_the_logits_rounded_once(
    kernels: NativeKernels, form: Format, dtype: torch.dtype, with_bias: bool
) -> None:
    x, weight = random(9, INPUTS, dtype=dtype), weight_from(kernels, drawn(form, 50, INPUTS), dtype=dtype)
    bias = random(50, dtype=dtype, seed=1) if with_bias else None
    expected = kernels.logits(x, weight)
    assert expected.dtype == torch.float32
    expected = expected if bias is None else expected + bias.float()
    assert torch.equal(kernels.linear(x, weight, bias), expected.to(dtype))


@each_kind
@both_dtypes
@pytest.mark.parametrize("matching", [True, False])
def test_gates(kernels: NativeKernels, form: Format, dtype: torch.dtype, matching: bool) -> None:
    sizes = (40, 40) if matching else (21, 59)
    parts = [drawn(form, size, INPUTS, seed=size) for size in sizes]
    weight = weight_from(kernels, *parts, dtype=dtype)
    assert isinstance(weight, NativeWeight)
    assert weight.halves_match == matching
    dense = torch.cat([part.dequantize(torch.float32) for part in parts])
    for rows in (1, 5, 97):
        x = random(rows, INPUTS, dtype=dtype, seed=rows) / 16
        for activation in ACTIVATIONS:
            out = kernels.gated_linear(x, weight, activation)
            assert out.dtype == dtype
            if kernels.exact:
                assert_gated(out, x, dense, activation)
            near = gated_in_torch(kernels.logits(x, weight), activation)
            tolerance = 1e-5 if dtype is torch.float32 else 0.05
            torch.testing.assert_close(out.float(), near, rtol=tolerance, atol=tolerance)


@each_kind
@both_dtypes
@pytest.mark.parametrize("added", [False, True])
def test_a_product_of_normed_rows(kernels: NativeKernels, form: Format, dtype: torch.dtype, added: bool) -> None:
    """The residual is overwritten by the sum, as over dense weights, and nothing else is."""
    x, norm = random(7, INPUTS, dtype=dtype), random(INPUTS, dtype=torch.float32, seed=1)
    residual = random(7, INPUTS, dtype=dtype, seed=2) if added else None
    before, total = x.clone(), x if residual is None else x + residual
    parts = drawn(form, 32, INPUTS), drawn(form, 32, INPUTS, seed=1)
    weight = weight_from(kernels, *parts, dtype=dtype)
    normed = kernels.rms_norm(total.float(), norm, EPS)
    fresh = None if residual is None else residual.clone()
    out, carried = kernels.norm_linear(x, residual, norm, EPS, weight, None)
    gates, carried_by_gates = kernels.norm_gated_linear(x, fresh, norm, EPS, weight)
    for result in (carried, carried_by_gates):
        assert torch.equal(result, total)
    assert carried is (x if residual is None else residual)
    assert torch.equal(x, before)
    apart = weight_from(kernels, *parts)  # the norm is not rounded to bfloat16 on the way
    assert torch.equal(out, kernels.linear(normed, apart, None).to(dtype))
    assert torch.equal(gates, kernels.gated_linear(normed, apart).to(dtype))


# ---- experts


def cases() -> Iterator[tuple[int, int, int, int, int, str]]:
    """rows, experts, experts of a row, hidden, size, activation"""
    yield 1, 4, 2, 256, 512, "silu"
    yield 33, 3, 2, 512, 256, "clamped"
    yield 300, 4, 2, 256, 256, "gelu_tanh"


@each_kind
@both_dtypes
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_experts(
    kernels: NativeKernels, form: Format, dtype: torch.dtype, case: tuple[int, int, int, int, int, str]
) -> None:
    rows, count, per_row, hidden, size, activation = case
    given = mixture(rows, count, per_row, hidden, size, dtype, activation=activation)
    given = replace(given, x=given.x / 16)
    sources = [
        some_experts(form, count, *shape, seed)
        for shape, seed in (((size, hidden), 0), ((size, hidden), 10), ((hidden, size), 20))
    ]
    weights = [experts_from(kernels, values, dtype) for values in sources]
    choices = given.chosen, given.factors, activation, given.biases
    out = kernels.experts(given.x, *weights, *choices)
    if not kernels.exact:
        expected = one_by_one(kernels, given, sources)
        high = expected.abs().max().item()
        tolerance = (
            0.02 if dtype is torch.float32 else 0.05
        )  # what is behind the gate is rounded, too: a tie moves a step
        torch.testing.assert_close(out.float(), expected, rtol=0, atol=tolerance * high)
        assert (out.float() - expected).norm() < tolerance / 4 * expected.norm()
        return
    dense = [torch.stack([value.dequantize(torch.float32) for value in values]) for values in sources]
    reference = TorchKernels()
    in_torch = reference.experts(
        given.x.float(), *(experts_from(reference, values, torch.float32) for values in sources), *choices
    )
    high = max(1.0, in_torch.abs().max().item())
    tolerance = 1e-5 if dtype is torch.float32 else 2.0**-6
    torch.testing.assert_close(out.float() / high, in_torch / high, rtol=0, atol=tolerance)
    if dtype is torch.float32 and activation == "silu":
        scaled = Mixture(given.x, *dense, given.chosen, given.factors)
        assert_mixture(out / high, replace(scaled, factors=given.factors / high))


def one_by_one(kernels: NativeKernels, given: Mixture, sources: list[list[QuantizedTensor]]) -> Tensor:
    """The mixture in float32, each expert by itself, with all rows."""
    x, out = given.x.float(), torch.zeros(given.x.shape)
    biases: ExpertBiases | tuple[None, ...] = given.biases or (None,) * 3
    for expert in range(len(sources[0])):
        both: Weight = weight_from(kernels, sources[0][expert], sources[1][expert])
        down = weight_from(kernels, sources[2][expert])
        of_both = None if given.biases is None else torch.cat((given.biases.gate[expert], given.biases.up[expert]))
        gates = gated_in_torch(kernels.linear(x, both, of_both), given.activation)
        result = kernels.linear(gates, down, None if biases[2] is None else biases[2][expert].contiguous())
        out += result * (given.factors * (given.chosen == expert)).sum(1, keepdim=True)
    return out


def test_experts_of_which_some_are_numbers(exact: NativeKernels) -> None:
    given = mixture(9, 3, 2, 256, 256, torch.float32)
    sources = [some_experts(DIFFERENT[5], 3, 256, 256, seed) for seed in (0, 10, 20)]
    weights = [experts_from(exact, values, torch.float32) for values in sources]
    expected = exact.experts(given.x, *weights, given.chosen, given.factors)
    for i, expert in ((1, 1), (2, 0)):
        weights[i].expert(expert).copy_(sources[i][expert].dequantize(torch.float32))
        assert len(weights[i].formats()) == 2, "the others stay what they are"
    out = exact.experts(given.x, *weights, given.chosen, given.factors)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


# ---- what is given


def test_inputs_may_have_gaps_and_norms_must_be_floats(kernels: NativeKernels) -> None:
    x, weight = random(6, 512, dtype=torch.float32), weight_from(kernels, drawn(DIFFERENT[5], 40, 256))
    expected = kernels.linear(x[:, :256].contiguous(), weight, None)
    assert torch.equal(kernels.linear(x[:, :256], weight, None), expected)
    assert kernels.linear(x[:0, :256], weight, None).shape == (0, 40)
    for wrong in (torch.ones(256, dtype=torch.bfloat16), torch.ones(512)[::2]):
        with pytest.raises(AssertionError):
            kernels.norm_linear(x[:, :256].contiguous(), None, wrong, EPS, weight, None)
