"""Quantized weights of the native kernels: every format against its numbers, in float64 and rounded as they say."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.gguf.blocks import GGMLBlocks
from nanoengine.kernels.interface import Weight
from nanoengine.kernels.memory import Arena
from nanoengine.kernels.native_kernels import NativeKernels
from nanoengine.kernels.native_operations import unsupported_reason
from nanoengine.kernels.native_weights import NativeWeight
from nanoengine.quantization.tensor import Float8, Grouped, QuantizedTensor
from tests.drawn import FAST
from tests.kernels.formulas import DTYPES, assert_linear, new_weight, random, weight_of
from tests.kernels.quantized_matrices import (
    DIFFERENT,
    FORMATS,
    Format,
    assert_numbers,
    assert_rounded,
    drawn,
    weight_from,
)

REASON = unsupported_reason(torch.device("cpu"), torch.float32)
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")
every_format = pytest.mark.parametrize("form", FORMATS, ids=str)
each_kind = pytest.mark.parametrize("form", DIFFERENT, ids=str)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
SHAPES = [(48, 256), (33, 512), (100, 768)]


@pytest.fixture(scope="module")
def exact() -> NativeKernels:
    return NativeKernels(exact=True)


@pytest.fixture(scope="module")
def fast() -> NativeKernels:
    return NativeKernels()


def all_rows(kernels: NativeKernels, weight: Weight) -> Tensor:
    return kernels.embed(torch.arange(weight.shape[0]), weight)


# ---- what is packed comes back, and products are those of its numbers


@every_format
@both_dtypes
def test_packed_numbers_come_back(exact: NativeKernels, form: Format, dtype: torch.dtype) -> None:
    for outputs, inputs in SHAPES:
        source = drawn(form, outputs, inputs)
        weight = weight_from(exact, source, dtype=dtype)
        assert_numbers(all_rows(exact, weight), form, source)
        ids = torch.tensor([outputs - 1, 0, 17, 0])
        assert torch.equal(exact.embed(ids, weight), all_rows(exact, weight)[ids])


@every_format
def test_products(exact: NativeKernels, fast: NativeKernels, form: Format) -> None:
    for (outputs, inputs), dtype in zip(SHAPES, (torch.float32, torch.bfloat16, torch.float32), strict=True):
        source = drawn(form, outputs, inputs)
        floats, rounds = (weight_from(kernels, source, dtype=dtype) for kernels in (exact, fast))
        dense = source.dequantize(torch.float32)
        for rows in (1, 3, 5, 13, 97):
            x = random(rows, inputs, dtype=dtype, seed=rows)
            assert_linear(exact.logits(x, floats), x, dense, None)
            assert_rounded(fast.logits(x, rounds), x, source)


@FAST
@given(st.sampled_from(FORMATS), st.integers(1, 110), st.integers(1, 110), st.integers(1, 600), st.sampled_from(DTYPES))
def test_products_of_any_shape(form: Format, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    inputs += -inputs % form.unit
    source, x = drawn(form, outputs, inputs, seed=rows), random(rows, inputs, dtype=dtype)
    for kernels in (NativeKernels(exact=True), NativeKernels()):
        weight = weight_from(kernels, source, dtype=dtype)
        assert_numbers(all_rows(kernels, weight), form, source)
        if kernels.exact:
            assert_linear(kernels.logits(x, weight), x, source.dequantize(torch.float32), None)
        else:
            assert_rounded(kernels.logits(x, weight), x, source)


def largest(form: Format, number: int) -> QuantizedTensor:
    """[20, 256]: every number is the lowest (0) or the highest (1) of its bits, or, of 8 bits, -128 as it is stored."""
    if form.bits:
        numbers = torch.full((20, 256), number * ((1 << form.bits) - 1), dtype=torch.uint8)
        scales = torch.ones(20, 256 // (form.group or 256), dtype=form.scales)
        zeros = (
            torch.full(scales.shape, (1 - number) * ((1 << form.bits) - 1), dtype=torch.uint8) if form.zeros else None
        )
        return Grouped(numbers, scales, zeros, form.bits)
    source = drawn(form, 20, 256)
    assert isinstance(source, GGMLBlocks)
    ones = {"Q8_0": 0x7F, "Q6_K": 0xFF}.get(form.name, 0xFF) if number else {"Q8_0": 0x80}.get(form.name, 0)
    data = torch.full_like(source.data, ones).view(20, -1, drawn_bytes(form))
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(form.name, (0,))
    for at in halves:
        data[:, :, at : at + 2] = torch.tensor([1.0]).half().view(torch.uint8)
    if form.name in ("Q4_K", "Q5_K"):
        data[:, :, 4:16] = 0xFF
    if form.name == "Q6_K":
        data[:, :, 192:208] = 0x80  # -128
    return GGMLBlocks(data.flatten(1), form.name)


def drawn_bytes(form: Format) -> int:
    source = drawn(form, 1, form.unit)
    assert isinstance(source, GGMLBlocks)
    return source.data.shape[1]


@every_format
@pytest.mark.parametrize("number", [0, 1])
def test_no_sum_saturates(exact: NativeKernels, fast: NativeKernels, form: Format, number: int) -> None:
    """All numbers at an end of what they can be, all activations at an end of theirs."""
    source, signs = largest(form, number), (torch.arange(256) % 2 * 2 - 1).float()
    for x in (torch.full((6, 256), 127.0), torch.full((6, 256), -127.0), (127 * signs).expand(6, -1).contiguous()):
        dense = source.dequantize(torch.float32).double()
        allowed = 1e-5 * x.double().abs() @ dense.abs().T
        for kernels, rows in itertools.product((exact, fast), (1, 6)):
            result = kernels.logits(x[:rows], weight_from(kernels, source)).double()
            assert ((result - x[:rows].double() @ dense.T).abs() <= allowed[:rows]).all()


@each_kind
@both_dtypes
def test_rows_that_are_not_finite_spoil_no_other(
    exact: NativeKernels, fast: NativeKernels, form: Format, dtype: torch.dtype
) -> None:
    for kernels, rows in itertools.product((exact, fast), (3, 20)):
        weight, x = weight_from(kernels, drawn(form, 40, 512), dtype=dtype), random(rows, 512, dtype=dtype)
        expected = kernels.linear(x, weight, None)
        for place, value in ((0, torch.nan), (300, torch.inf), (511, -torch.inf)):
            spoilt = x.clone()
            spoilt[1, place] = value
            out = kernels.linear(spoilt, weight, None)
            assert not out[1].isfinite().any()
            rest = [i for i in range(rows) if i != 1]
            assert torch.equal(out[rest], expected[rest])


@each_kind
def test_zeros_and_next_to_nothing_make_zeros(exact: NativeKernels, fast: NativeKernels, form: Format) -> None:
    """The reciprocal of a number can be infinite."""
    for kernels in (exact, fast):
        weight = weight_from(kernels, drawn(form, 40, 256))
        for size in (0.0, 1e-45, 1e-40, 1e-38, 3e-37):
            out = kernels.linear(torch.full((5, 256), size), weight, None)
            assert (out.abs() <= 1e-33).all()
        assert (kernels.linear(torch.zeros(5, 256), weight, None) == 0).all()


@pytest.mark.parametrize("size", [1e-25, 1e-12, 1e12, 1e25])
def test_small_and_large_activations(fast: NativeKernels, size: float) -> None:
    source = drawn(FORMATS[0], 40, 256)
    x = random(7, 256, dtype=torch.float32) * size
    assert_rounded(fast.linear(x, weight_from(fast, source), None), x, source)


# ---- weights of several parts


def test_parts_of_different_formats_in_any_order(exact: NativeKernels, fast: NativeKernels) -> None:
    kinds = [DIFFERENT[5], DIFFERENT[7], DIFFERENT[9]]
    parts = [
        drawn(form, outputs, 256, seed=i) for i, (form, outputs) in enumerate(zip(kinds, (70, 16, 33), strict=True))
    ]
    x, firsts = random(9, 256, dtype=torch.float32), (0, 70, 86)
    dense = torch.cat([part.dequantize(torch.float32) for part in parts])
    results = []
    for order in itertools.permutations(range(3)):
        floats, rounds = (new_weight(kernels, 119, 256, torch.float32) for kernels in (exact, fast))
        for i, weight in itertools.product(order, (floats, rounds)):
            weight.rows(firsts[i], parts[i].shape[0]).copy_quantized(parts[i])
        assert torch.equal(all_rows(exact, floats), dense)
        assert_linear(exact.linear(x, floats, None), x, dense, None)
        results.append(fast.linear(x, rounds, None))
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.equal(results[0], torch.cat([fast.linear(x, weight_from(fast, part), None) for part in parts], 1))


@both_dtypes
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_a_part_of_numbers_leaves_the_others_quantized(
    exact: NativeKernels, fast: NativeKernels, order: tuple[int, ...], dtype: torch.dtype
) -> None:
    """As where q and k are in 4 bits, and v is not: each part is what it would be alone, to the bit."""
    first, last = drawn(DIFFERENT[5], 33, 256), drawn(DIFFERENT[8], 40, 256)
    numbers = random(20, 256, dtype=dtype)
    for kernels in (exact, fast):
        weight, norm = new_weight(kernels, 93, 256, dtype), random(256, dtype=torch.float32)
        for i in order:
            if i == 0:
                weight.rows(0, 33).copy_quantized(first)
            elif i == 1:
                weight.rows(33, 20).copy_(numbers)
            else:
                weight.rows(53, 40).copy_quantized(last)
        assert len(weight.formats()) == 3
        dense = torch.cat((first.dequantize(dtype), numbers, last.dequantize(dtype)))
        assert torch.equal(all_rows(kernels, weight), dense)
        alone = [weight_from(kernels, part, dtype=dtype) for part in (first, last)]
        alone.insert(1, weight_of(kernels, numbers))
        for rows in (1, 5, 97):
            x, residual = random(rows, 256, dtype=dtype), random(rows, 256, dtype=dtype, seed=1)
            expected = torch.cat([kernels.linear(x, one, None) for one in alone], 1)
            assert torch.equal(kernels.linear(x, weight, None), expected)
            normed = [kernels.norm_linear(x, residual.clone(), norm, 1e-6, one, None)[0] for one in alone]
            found, total = kernels.norm_linear(x, residual, norm, 1e-6, weight, None)
            assert torch.equal(found, torch.cat(normed, 1))
            assert torch.equal(total, residual), "the residual is added once"


def test_rows_may_be_written_again(exact: NativeKernels) -> None:
    """Numbers over numbers stay where they are; anything else takes the place of its part."""
    weight, numbers = new_weight(exact, 60, 256, torch.float32), random(60, 256, dtype=torch.float32)
    weight.rows(0, 60).copy_(torch.zeros(60, 256))
    before = weight.address
    weight.rows(0, 60).copy_(numbers)
    weight.rows(7, 30).copy_(2 * numbers[7:37])
    assert weight.address == before
    numbers[7:37] *= 2
    assert torch.equal(all_rows(exact, weight), numbers)
    source = drawn(DIFFERENT[5], 60, 256)
    weight.rows(0, 60).copy_quantized(source)
    assert torch.equal(all_rows(exact, weight), source.dequantize(torch.float32))
    weight.rows(0, 60).copy_(numbers)
    assert torch.equal(all_rows(exact, weight), numbers)


@pytest.mark.parametrize(
    "source",
    [
        Float8(torch.randn(40, 64).to(torch.float8_e4m3fn), torch.rand(40, 1)),
        Grouped(torch.randint(0, 16, (40, 48), dtype=torch.uint8), torch.rand(40, 3), None, 4),
    ],
    ids=["fp8", "groups of 16"],
)
def test_formats_that_no_kernel_knows_become_numbers(exact: NativeKernels, source: QuantizedTensor) -> None:
    weight = new_weight(exact, 40, source.shape[1], torch.bfloat16)
    weight.rows(0, 40).copy_quantized(source)
    assert weight.formats().keys() == {"bfloat16"}
    assert torch.equal(all_rows(exact, weight), source.dequantize(torch.bfloat16))


def test_a_weight_with_rows_that_nobody_filled_is_refused(exact: NativeKernels) -> None:
    weight = new_weight(exact, 80, 256, torch.float32)
    weight.rows(0, 40).copy_quantized(drawn(DIFFERENT[0], 40, 256))
    with pytest.raises(AssertionError, match="not filled"):
        exact.linear(torch.ones(1, 256), weight, None)


def test_shapes_that_do_not_match_are_refused(exact: NativeKernels) -> None:
    weight = new_weight(exact, 40, 256, torch.float32)
    for outputs, inputs in ((39, 256), (40, 512)):
        with pytest.raises(AssertionError):
            weight.rows(0, 40).copy_quantized(drawn(DIFFERENT[0], outputs, inputs))
    with pytest.raises(AssertionError):
        weight.rows(1, 40)


def test_halves_match_where_both_begin_with_a_panel(exact: NativeKernels) -> None:
    kind, other, width = DIFFERENT[5], DIFFERENT[7], exact.packer.panel_width
    assert halves_match(weight_from(exact, drawn(kind, 4 * width, 256)))
    assert halves_match(weight_from(exact, drawn(kind, 33, 256), drawn(other, 33, 256)))
    assert not halves_match(weight_from(exact, drawn(kind, 2 * width + 2, 256)))
    assert not halves_match(weight_from(exact, drawn(kind, 10, 256), drawn(kind, 2 * width - 10, 256)))
    for size, matching in ((32, True), (33, False)):
        assert halves_match(weight_of(exact, torch.zeros(2 * size, 8))) == matching


def halves_match(weight: Weight) -> bool:
    assert isinstance(weight, NativeWeight)
    return weight.halves_match


# ---- memory


@every_format
def test_a_quantized_weight_takes_little_more_than_its_blocks(monkeypatch: pytest.MonkeyPatch, form: Format) -> None:
    taken: list[int] = []
    zeros = Arena.zeros

    def watched(arena: Arena, size: int) -> Tensor:
        taken.append(size)
        return zeros(arena, size)

    monkeypatch.setattr(Arena, "zeros", watched)
    source, kernels = drawn(form, 64, 1024), NativeKernels(exact=True)
    weight = weight_from(kernels, source, dtype=torch.bfloat16)
    for rows in (1, 9):
        kernels.linear(random(rows, 1024, dtype=torch.bfloat16), weight, None)
    kernels.embed(torch.arange(64), weight)
    if isinstance(source, GGMLBlocks):
        size = source.data.nbytes
    else:
        assert isinstance(source, Grouped)
        size = source.numbers.numel() * form.bits // 8 + source.scales.nbytes
        size += 0 if source.zeros is None else source.zeros.nbytes
    assert sum(taken) <= 1.03 * size


def test_matrices_of_experts_begin_with_a_panel_each(exact: NativeKernels) -> None:
    experts = exact.new_experts(3, 40, 256, torch.float32, torch.device("cpu"))
    assert experts.shape == (3, 40, 256)
    for i in (2, 0, 1):
        experts.expert(i).copy_quantized(drawn(DIFFERENT[i], 40, 256))
    firsts = experts.weight._table[1:, 2]
    assert (firsts[:: len(firsts) // 3] == 40 * torch.arange(3)).all()
    with pytest.raises(AssertionError):
        experts.expert(0).copy_quantized(drawn(DIFFERENT[0], 39, 256))
