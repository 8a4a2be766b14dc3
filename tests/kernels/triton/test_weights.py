"""Weights that learn their format from the rows that come."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.kernels.quantized.tensor import Float8, Grouped, QuantizedTensor
from nanoengine.kernels.reference.operations import RowMajor
from nanoengine.kernels.triton.products.float8 import Float8Rows
from nanoengine.kernels.triton.products.packed import PackedWeight, can_pack
from nanoengine.kernels.triton.products.weights import LateWeight
from tests.kernels.formulas import DEVICE
from tests.kernels.quantized_matrices import GROUPS, Format, drawn

INPUTS = 128
FLOATS = Format("fp8")
FORMATS = [*GROUPS, FLOATS, None]
"""None: numbers."""


def rows(form: Format | None, count: int, inputs: int = INPUTS) -> Tensor | QuantizedTensor:
    if form is None:
        return torch.randn(count, inputs)
    if form is FLOATS:
        return Float8(torch.randn(count, inputs).to(torch.float8_e4m3fn), torch.rand(count, 1))
    return drawn(form, count, inputs, seed=count)


def numbers_of(source: Tensor | QuantizedTensor, dtype: torch.dtype) -> Tensor:
    return source.to(dtype) if isinstance(source, Tensor) else source.dequantize(dtype)


def fill(weight: LateWeight, first: int, source: Tensor | QuantizedTensor) -> None:
    place = weight.rows(first, source.shape[0])
    assert place.shape == source.shape
    place.copy_(source) if isinstance(source, Tensor) else place.copy_quantized(source)


@settings(max_examples=15)
@given(
    parts=st.lists(st.tuples(st.sampled_from(FORMATS), st.integers(1, 3)), min_size=1, max_size=4),
    alike=st.booleans(),
    order=st.randoms(use_true_random=False),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_parts_of_any_formats_in_any_order_are_what_they_stand_for(
    parts: list[tuple[Format | None, int]], alike: bool, order: object, dtype: torch.dtype
) -> None:
    """One format stays; where there are several, they are numbers."""
    forms = {parts[0][0] if alike else form for form, _ in parts}
    sources = [rows(parts[0][0] if alike else form, 16 * count) for form, count in parts]
    firsts = [sum(source.shape[0] for source in sources[:i]) for i in range(len(sources))]
    weight = LateWeight(sum(source.shape[0] for source in sources), INPUTS, dtype, DEVICE, has_float8=True)
    places = list(zip(firsts, sources, strict=True))
    order.shuffle(places)  # type: ignore[attr-defined]
    for first, source in places:
        fill(weight, first, source)
    content, exact = weight.content, torch.cat([numbers_of(source, dtype) for source in sources])
    kind = RowMajor if len(forms) > 1 or forms == {None} else Float8Rows if forms == {FLOATS} else PackedWeight
    assert type(content) is kind
    if isinstance(content, RowMajor):
        assert torch.equal(content.tensor.cpu(), exact)
        return
    chosen = torch.tensor([5, 0, 5, 15])
    assert torch.equal(content.dequantize(dtype).cpu(), exact)
    assert torch.equal(content.dequantize(dtype, chosen.to(DEVICE)).cpu(), exact[chosen])
    assert content.dequantize(dtype, chosen[:0].to(DEVICE)).shape == (0, INPUTS)
    [(_, nbytes)] = weight.formats().items()
    assert nbytes < 4 * len(exact) * INPUTS // 2 or dtype is torch.float16


@pytest.mark.parametrize(
    ("bits", "inputs", "group", "fits"),
    [
        (4, 96, 48, False),
        (4, 64, 16, False),
        (4, 40, None, False),
        (8, 96, 48, False),
        (8, 64, 8, False),
        (8, 45, None, True),
        (4, 64, 32, True),
    ],
)
def test_groups_that_no_kernel_computes_with_become_numbers(
    bits: int, inputs: int, group: int | None, fits: bool
) -> None:
    numbers = torch.randint(0, 1 << bits, (6, inputs), dtype=torch.uint8)
    source = Grouped(numbers, torch.rand(6, inputs // group if group else 1).half(), None, bits)
    assert can_pack(source) is fits
    weight = LateWeight(6, inputs, torch.float32, DEVICE)
    fill(weight, 0, source)
    content = weight.content
    assert isinstance(content, PackedWeight if fits else RowMajor)
    found = content.tensor if isinstance(content, RowMajor) else content.dequantize(torch.float32)  # type: ignore[union-attr]
    assert torch.equal(found.cpu(), source.dequantize(torch.float32))


@pytest.mark.parametrize(
    ("has_float8", "outputs", "inputs"),
    [(False, 32, 64), (True, 30, 64), (True, 32, 60)],
    ids=["device", "outputs", "inputs"],
)
def test_floats_of_8_bits_that_nobody_multiplies_become_numbers(has_float8: bool, outputs: int, inputs: int) -> None:
    weight, source = (
        LateWeight(outputs, inputs, torch.bfloat16, DEVICE, has_float8=has_float8),
        rows(FLOATS, outputs, inputs),
    )
    fill(weight, 0, source)
    assert isinstance(weight.content, RowMajor)
    assert torch.equal(weight.content.tensor.cpu(), numbers_of(source, torch.bfloat16))


def test_a_weight_without_rows_is_one_of_numbers() -> None:
    content = LateWeight(3, 5, torch.float16, DEVICE).content
    assert isinstance(content, RowMajor)
    assert (content.tensor.shape, content.tensor.dtype) == ((3, 5), torch.float16)
