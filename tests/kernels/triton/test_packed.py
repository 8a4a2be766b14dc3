"""Weights of whole numbers: what they stand for after packing, and their products, against the formula of `Grouped`."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanoengine.kernels.gates import ACTIVATIONS
from nanoengine.kernels.triton.few_rows import ROWS, most_rows, product_of_few_rows
from nanoengine.kernels.triton.packed import Packed, can_pack
from nanoengine.quantization.tensor import Grouped
from tests.kernels.formulas import gated

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-6
FORMS = [
    (8, None, False),
    (8, 128, True),
    (4, 32, True),
    (4, 32, False),
    (4, 128, True),
    (4, 64, True),
    (4, None, False),
]
"""Bits, group, and whether there are zeros."""


def grouped(
    generator: torch.Generator, outputs: int, inputs: int, bits: int, group: int | None, *, has_zeros: bool
) -> Grouped:
    groups = 1 if group is None else inputs // group

    def whole(count: int) -> Tensor:
        return torch.randint(0, 1 << bits, (outputs, count), dtype=torch.uint8, generator=generator)

    scales = (0.5 + torch.rand(outputs, groups, generator=generator)) / (1 << bits)
    return Grouped(whole(inputs), scales.half(), whole(groups) if has_zeros else None, bits)


def packed(source: Grouped) -> Packed:
    place = Packed.like(source, source.shape[0], DEVICE)
    assert place.take_rows(0, source)
    return place


@settings(deadline=None, max_examples=25)
@given(
    form=st.sampled_from(FORMS),
    outputs=st.integers(1, 9),
    blocks=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 99),
)
def test_it_stands_for_the_same_numbers_bit_by_bit(
    form: tuple[int, int | None, bool], outputs: int, blocks: int, dtype: torch.dtype, seed: int
) -> None:
    bits, group, has_zeros = form
    generator = torch.Generator().manual_seed(seed)
    source = grouped(generator, outputs, blocks * (group or 32), bits, group, has_zeros=has_zeros)
    assert can_pack(source)
    place = packed(source)
    exact = source.dequantize(dtype)
    assert place.shape == exact.shape
    assert torch.equal(place.dequantize(dtype).cpu(), exact)
    chosen = torch.randint(0, outputs, (5,), generator=generator)
    assert torch.equal(place.dequantize(dtype, chosen.to(DEVICE)).cpu(), exact[chosen])
    assert place.dequantize(dtype, chosen[:0].to(DEVICE)).shape == (0, source.shape[1])


def test_numbers_of_4_bits_take_half_a_byte() -> None:
    source = grouped(torch.Generator().manual_seed(0), 6, 64, 4, 32, has_zeros=True)
    assert packed(source).numbers.nbytes == 6 * 64 // 2


def test_any_number_of_inputs_fits_8_bits_with_one_scale() -> None:
    source = grouped(torch.Generator().manual_seed(0), 6, 45, 8, None, has_zeros=False)
    assert can_pack(source)
    assert torch.equal(packed(source).dequantize(torch.float32).cpu(), source.dequantize(torch.float32))


@pytest.mark.parametrize(
    ("bits", "inputs", "group"), [(4, 96, 48), (4, 64, 16), (4, 40, None), (8, 96, 48), (8, 64, 8)]
)
def test_groups_that_no_kernel_computes_with_are_not_packed(bits: int, inputs: int, group: int | None) -> None:
    assert not can_pack(grouped(torch.Generator().manual_seed(0), 6, inputs, bits, group, has_zeros=True))


def test_rows_of_another_format_are_refused_and_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    place = packed(grouped(generator, 4, 128, 4, 32, has_zeros=True))
    before = place.dequantize(torch.float32)
    others = [grouped(generator, 4, 128, *form[:2], has_zeros=form[2]) for form in FORMS if form != (4, 32, True)]
    floats = grouped(generator, 4, 128, 4, 32, has_zeros=True)
    others.append(Grouped(floats.numbers, floats.scales.float(), floats.zeros, 4))
    for other in others:
        assert not place.take_rows(0, other)
    assert torch.equal(place.dequantize(torch.float32), before)


@settings(deadline=None, max_examples=25)
@given(
    form=st.sampled_from(FORMS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    num_rows=st.sampled_from([1, 5, ROWS, 9, 33, 64]),
    blocks=st.integers(1, 5),
    outputs=st.sampled_from([1, 16, 40]),
    before=st.sampled_from(["nothing", "norm", "addition and norm"]),
    behind=st.sampled_from(["nothing", "bias", *ACTIVATIONS]),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_the_numbers(
    form: tuple[int, int | None, bool],
    dtype: torch.dtype,
    num_rows: int,
    blocks: int,
    outputs: int,
    before: str,
    behind: str,
    seed: int,
) -> None:
    bits, group, has_zeros = form
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    num_rows = min(num_rows, most_rows(dtype) if before == "nothing" else ROWS)
    activation = behind if behind in ACTIVATIONS else None
    inputs = blocks * (group or 32)
    source = grouped(generator, outputs * (1 + (activation is not None)), inputs, bits, group, has_zeros=has_zeros)
    x, residual = draw(num_rows, inputs), draw(num_rows, inputs) if before == "addition and norm" else None
    norm = None if before == "nothing" else 1 + draw(inputs).float() / 8
    bias = draw(outputs) if behind == "bias" else None
    options = {"bias": bias, "residual": residual, "norm": norm, "eps": EPS, "activation": activation}
    out, _ = product_of_few_rows(x, packed(source), **options)  # type: ignore[arg-type]

    exact = x.double() if residual is None else (x + residual).double()
    if norm is not None:
        exact = exact * (exact.square().mean(1, keepdim=True) + EPS).rsqrt() * norm.double()
    weight = source.dequantize(torch.float32).double().to(DEVICE)
    magnitude = exact.abs() @ weight.abs().T
    exact = exact @ weight.T
    if bias is not None:
        exact += bias.double()
    if activation is not None:
        magnitude = magnitude.amax(1, keepdim=True).square().expand(-1, outputs)  # of two products that are multiplied
        exact = gated(*exact.chunk(2, dim=1), activation)
    unit = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}[dtype]  # bfloat16 is cut off there
    assert ((out.double() - exact).abs() <= 2 * unit * (magnitude + exact.abs() + 1)).all()


def test_a_row_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = packed(grouped(generator, 40, 96, 4, 32, has_zeros=True))
    x = torch.randn(20, 96, generator=generator).half().to(DEVICE)
    together = product_of_few_rows(x, weight)[0]
    x[3] = torch.nan
    spoilt = product_of_few_rows(x, weight)[0]
    rest = [i for i in range(20) if i != 3]
    assert torch.equal(spoilt[rest], together[rest])
    assert spoilt[3].isnan().all()
