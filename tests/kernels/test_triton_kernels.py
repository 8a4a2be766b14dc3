"""The kernels for NVIDIA GPUs as one implementation, against the one in torch."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanoengine.core.sampling import SamplingTable
from nanoengine.kernels import triton_kernels as module
from nanoengine.kernels.interface import Kernels
from nanoengine.kernels.torch_kernels import RowMajor, TorchKernels
from nanoengine.kernels.triton.few_rows import product_of_few_rows
from nanoengine.kernels.triton.launch import float8_unsupported_reason
from nanoengine.kernels.triton.tuning import DEFAULTS
from nanoengine.kernels.triton_kernels import TritonKernels
from nanoengine.quantization.at_load import quantizer
from tests.kernels.mixtures import mixture
from tests.kernels.triton.test_float8 import scaled_product

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
KERNELS, REFERENCE = TritonKernels(), TorchKernels()


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(DEVICE)


def weight(kernels: Kernels | TritonKernels, rows: Tensor) -> object:
    result = kernels.new_weight(*rows.shape, rows.dtype, rows.device)
    result.rows(0, len(rows)).copy_(rows)
    return result


def assert_near(result: object, expected: object, dtype: torch.dtype) -> None:
    torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_every_operation_is_that_of_the_reference(dtype: torch.dtype) -> None:
    rows, x, bias = random(96, 64, dtype=dtype) / 8, random(5, 64, dtype=dtype), random(96, dtype=dtype)
    mine, other = weight(KERNELS, rows), weight(REFERENCE, rows)
    pairs = [(getattr(KERNELS, name), getattr(REFERENCE, name)) for name in ("linear", "gated_linear", "embed")]
    arguments = [(x, bias), (x,), (torch.tensor([3, 0, 95], device=DEVICE),)]
    for (here, there), (first, *rest) in zip(pairs, arguments, strict=True):
        assert_near(here(first, mine, *rest), there(first, other, *rest), dtype)
    assert_near(KERNELS.gated_linear(x, mine, "gelu_tanh"), REFERENCE.gated_linear(x, other, "gelu_tanh"), dtype)
    scale, residual = random(64, dtype=torch.float32), random(6, 64, dtype=dtype)[:5]
    assert_near(KERNELS.rms_norm(x, scale, 1e-6), REFERENCE.rms_norm(x, scale, 1e-6), dtype)
    expected = REFERENCE.add_rms_norm(x, residual.clone(), scale, 1e-6)
    assert_near(KERNELS.add_rms_norm(x, residual, scale, 1e-6), expected, dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_mixture_of_experts_is_that_of_the_reference(dtype: torch.dtype) -> None:
    given = mixture(6, 4, 2, 33, 20, dtype, DEVICE.type)
    tolerance = 4 * TOLERANCE[dtype]  # each is off by less than half of that
    torch.testing.assert_close(given.by(KERNELS), given.by(REFERENCE), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("most", "num_rows", "ours"), [(8, 1, True), (8, 8, True), (8, 9, False), (0, 1, False), (99, 9, False)]
)
def test_products_of_few_rows_are_our_own(
    monkeypatch: pytest.MonkeyPatch, most: int, num_rows: int, ours: bool
) -> None:
    """As many as the tuning says, and as the kernel can."""
    kernels, seen = TritonKernels(replace(DEFAULTS, most_product_rows=most)), []

    def watched(x: Tensor, *_: object, **options: object) -> tuple[Tensor, Tensor]:
        seen.append(len(x))
        return product_of_few_rows(x, *_, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "product_of_few_rows", watched)
    rows, x, norm = (
        random(96, 64, dtype=torch.float32),
        random(num_rows, 64, dtype=torch.float32),
        torch.ones(64).to(DEVICE),
    )
    mine: Any = weight(kernels, rows)
    kernels.linear(x, mine, None)
    kernels.gated_linear(x, mine)
    kernels.logits(x, mine)
    kernels.norm_linear(x, x.clone(), norm, 1e-6, mine, None)
    kernels.norm_gated_linear(x, None, norm, 1e-6, mine)
    assert seen == [num_rows] * 5 * ours


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_logits_are_float32(dtype: torch.dtype) -> None:
    rows, x = random(96, 64, dtype=dtype), random(5, 64, dtype=dtype)
    logits = KERNELS.logits(x, weight(KERNELS, rows))  # type: ignore[arg-type]
    assert logits.dtype == torch.float32
    # On the CPU they are rounded to the dtype on the way.
    tolerance = 1e-5 if dtype is torch.float32 or DEVICE.type == "cuda" else TOLERANCE[dtype]
    exact = x.double() @ rows.double().T
    torch.testing.assert_close(logits.double(), exact, rtol=tolerance, atol=10 * tolerance)


def test_places_and_choices_are_delegated() -> None:
    def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    last_tokens, tables = ints(5, 0, dtype=torch.int64), ints(3, 4, 0, 0, 8, 6, 0, 0).view(2, 2, 2)
    placed = KERNELS.compute_slot_mapping(ints(9, -1), ints(0), ints(0, 2), ints(15), last_tokens, tables, 16, 2)
    assert [values.tolist() for values in placed] == [[9, 5], [15, 16], [[63, 64], [143, 96]], [17]]
    zero, one = torch.zeros(1, device=DEVICE), torch.ones(1, device=DEVICE)
    logits, seeds = random(1, 50, dtype=torch.float32), ints(1, dtype=torch.int64)
    table = SamplingTable(zero, ints(0), one, zero, seeds)
    chosen = KERNELS.choose_tokens(logits, table, ints(0), seeds)
    assert torch.equal(chosen, logits.argmax(-1))


QUANTIZED = ["int8", "int4", "int4-128", "fp8"]


def quantized(kernels: TritonKernels, rows: Tensor, name: str) -> tuple[Any, Any]:
    """A weight of rows that were quantized, in two parts, and the numbers that they stand for, for the reference."""
    mine = kernels.new_weight(*rows.shape, rows.dtype, rows.device)
    parts = [quantizer(name)(part) for part in (rows[:32], rows[32:])]
    mine.rows(32, len(rows) - 32).copy_quantized(parts[1])
    mine.rows(0, 32).copy_quantized(parts[0])
    assert not isinstance(mine.content, RowMajor)
    return mine, weight(REFERENCE, torch.cat([part.dequantize(rows.dtype) for part in parts]))


@pytest.mark.parametrize(
    ("dtype", "num_rows"),
    [
        (torch.float32, 1),
        (torch.float32, 9),
        (torch.float16, 8),
        (torch.float16, 9),
        (torch.float16, 70),
        (torch.bfloat16, 9),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_are_the_numbers_that_they_stand_for(name: str, num_rows: int, dtype: torch.dtype) -> None:
    """But for floats of 8 bits, where x is rounded to match."""
    kernels = TritonKernels(multiply=scaled_product)
    rows, x, bias = random(96, 128, dtype=dtype) / 11, random(num_rows, 128, dtype=dtype), random(96, dtype=dtype)
    mine, other = quantized(kernels, rows, name)
    ids = torch.tensor([3, 0, 95, 3], device=DEVICE)
    assert_near(kernels.embed(ids, mine), REFERENCE.embed(ids, other), dtype)
    norm, residual = 1 + random(128, dtype=torch.float32) / 8, random(num_rows + 1, 128, dtype=dtype)[1:]
    pairs: list[tuple[Any, Any]] = [
        (k.linear(x, w, bias), k.logits(x, w)) for k, w in ((kernels, mine), (REFERENCE, other))
    ]
    around = [
        (
            k.gated_linear(x, w),
            *k.norm_linear(x, residual.clone(), norm, 1e-6, w, bias),
            *k.norm_gated_linear(x, None, norm, 1e-6, w, "gelu_tanh"),
        )
        for k, w in ((kernels, mine), (REFERENCE, other))
    ]
    tolerance = 0.15 if name == "fp8" else 4 * TOLERANCE[dtype]
    for found, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for found, expected in zip(*around, strict=True):
        torch.testing.assert_close(found, expected, rtol=2 * tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("name", QUANTIZED)
def test_experts_are_dequantized_as_they_come(name: str) -> None:
    source = quantizer(name)(random(32, 64, dtype=torch.float32))
    experts = KERNELS.new_experts(2, 32, 64, torch.float32, DEVICE)
    experts.expert(1).copy_quantized(source)
    assert torch.equal(experts.tensor[1].cpu(), source.dequantize(torch.float32).cpu())


def test_floats_of_8_bits_are_numbers_where_nothing_multiplies_them() -> None:
    assert "cpu" in str(float8_unsupported_reason(torch.device("cpu")))
    mine = TritonKernels().new_weight(32, 64, torch.bfloat16, torch.device("cpu"))
    mine.rows(0, 32).copy_quantized(quantizer("fp8")(torch.randn(32, 64)))
    assert isinstance(mine.content, RowMajor)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch multiplies floats of 8 bits by its own kernels on a GPU"
)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("num_rows", [1, 9, 300])
def test_the_product_of_torch_is_its_formula(num_rows: int, dtype: torch.dtype) -> None:
    if (reason := float8_unsupported_reason(DEVICE)) is not None:
        pytest.skip(reason)
    rows, x, bias = random(96, 128, dtype=dtype) / 11, random(num_rows, 128, dtype=dtype), random(96, dtype=dtype)
    found = [
        (kernels.linear(x, mine, bias), kernels.logits(x, mine))
        for kernels in (TritonKernels(), TritonKernels(multiply=scaled_product))
        for mine, _ in [quantized(kernels, rows, "fp8")]
    ]
    assert_near(found[0], found[1], dtype)


def test_it_says_what_it_is() -> None:
    assert (KERNELS.name, KERNELS.description) == ("triton", "Triton kernels and cuBLAS")
