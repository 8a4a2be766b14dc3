"""Quantized weights of the native kernels: what no drawn case reaches, and what they take of memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanoengine.kernels.memory import Arena
from nanoengine.kernels.native.addresses import WrongTensor
from nanoengine.kernels.native.operations import NativeKernels
from nanoengine.kernels.native.weights import BLOCKS, NativeWeight
from nanoengine.kernels.operations import Weight
from nanoengine.kernels.quantized.ggml_blocks import GGMLBlocks
from nanoengine.kernels.quantized.tensor import Float8, Grouped, QuantizedTensor
from tests.kernels.formulas import all_rows, new_weight, random, weight_of
from tests.kernels.marks import needs_kernels
from tests.kernels.quantized_matrices import DIFFERENT, FORMATS, Format, drawn, weight_from

pytestmark = needs_kernels
every_format = pytest.mark.parametrize("form", FORMATS, ids=str)
each_kind = pytest.mark.parametrize("form", DIFFERENT, ids=str)


@pytest.fixture(scope="module")
def exact() -> NativeKernels:
    return NativeKernels(activation_dtype="float32")


@pytest.fixture(scope="module")
def fast() -> NativeKernels:
    return NativeKernels()


@each_kind
def test_zeros_and_next_to_nothing_make_zeros(exact: NativeKernels, fast: NativeKernels, form: Format) -> None:
    """The reciprocal of a number can be infinite."""
    for kernels in (exact, fast):
        weight = weight_from(kernels, drawn(form, 40, 256))
        for size in (0.0, 1e-45, 1e-40, 1e-38, 3e-37):
            out = kernels.linear(torch.full((5, 256), size), weight, None)
            assert (out.abs() <= 1e-33).all()
        assert (kernels.linear(torch.zeros(5, 256), weight, None) == 0).all()


# ---- weights of several parts


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
    with pytest.raises(WrongTensor, match="not filled"):
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
    source, kernels = drawn(form, 64, 1024), NativeKernels(activation_dtype="float32")
    weight = weight_from(kernels, source, dtype=torch.bfloat16)
    for rows in (1, 9):
        kernels.linear(random(rows, 1024, dtype=torch.bfloat16), weight, None)
    kernels.embed(torch.arange(64), weight)
    if isinstance(source, GGMLBlocks):
        size = int(BLOCKS[source.format].weight_bits / 8 * source.shape.numel())
        assert size <= 1.8 * source.data.nbytes
    else:
        assert isinstance(source, Grouped)
        size = source.numbers.numel() * form.bits // 8 + source.scales.nbytes
        size += 0 if source.zeros is None else source.zeros.nbytes
    assert size <= sum(taken) <= 1.03 * size
