"""What the tensors of a quantized layer stand for, in every format: as if unpacked number by number."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.errors import InvalidWeights
from nanoengine.quantization.layouts import layout_of
from nanoengine.quantization.scheme import Scheme, read_scheme
from nanoengine.quantization.tensor import Float8, Grouped
from tests.quantization.packed_models import FORMS, Form, Tensors, compressed, gptq_form, packed_form


def scheme_of(form: Form) -> Scheme:
    scheme = read_scheme({"quantization_config": form.config})
    assert scheme is not None
    return scheme


def read(form: Form, tensors: Tensors, dtype: torch.dtype = torch.float32) -> Grouped | Float8 | Tensor:
    matrix = layout_of(scheme_of(form)).read(tensors, dtype)
    assert isinstance(matrix, Grouped | Float8 | Tensor)
    return matrix


def numbers(matrix: Grouped | Float8 | Tensor) -> Tensor:
    return matrix if isinstance(matrix, Tensor) else matrix.dequantize(torch.float32)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@settings(max_examples=5)
@given(rows=st.integers(1, 4), columns=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_a_layer_is_what_was_packed(form: Form, rows: int, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    tensors, dense = form.make(8 * rows, 16 * columns)
    layout = layout_of(scheme_of(form))
    assert layout.shape(tensors[layout.body].shape) == dense.shape
    matrix = read(form, tensors)
    assert matrix.shape == dense.shape
    torch.testing.assert_close(numbers(matrix), dense, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_headers_are_expected_to_say_what_they_say(form: Form) -> None:
    names = {torch.int32: "I32", torch.int64: "I64", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3"}
    names |= {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
    tensors, dense = form.make(40, 48)
    layout = layout_of(scheme_of(form))
    parts = layout.parts(*dense.shape)
    assert set(parts) <= {layout.body, *layout.suffixes}
    assert set(tensors) <= {layout.body, *layout.suffixes}
    assert {suffix for suffix, part in parts.items() if part.needed} <= set(tensors)
    for suffix in parts.keys() & tensors.keys():
        tensor = tensors[suffix]
        assert tuple(tensor.shape) in parts[suffix].allowed[names[tensor.dtype]]


def test_zero_points_that_are_all_in_the_middle_are_none() -> None:
    form = gptq_form(sym=False)
    tensors, _ = gptq_form(sym=True).make(8, 32)
    matrix = read(form, tensors)
    assert isinstance(matrix, Grouped)
    assert matrix.zeros is None
    tensors, _ = form.make(8, 32)
    matrix = read(form, tensors)
    assert isinstance(matrix, Grouped)
    assert matrix.zeros is not None
    assert matrix.zeros.shape == matrix.scales.shape == (8, 2)


def test_old_files_have_zero_points_of_packed_numbers_in_bytes() -> None:
    form = packed_form(symmetric=False)
    tensors, dense = form.make(24, 32)
    matrix = read(form, tensors)
    assert isinstance(matrix, Grouped)
    assert matrix.zeros is not None
    tensors["weight_zero_point"] = (matrix.zeros.int() - 8).to(torch.int8)
    torch.testing.assert_close(numbers(read(form, tensors)), dense, rtol=1e-6, atol=0)


def test_outputs_of_packed_numbers_need_not_fill_words_of_zero_points() -> None:
    form = packed_form(symmetric=False)
    tensors, dense = form.make(13, 32)
    assert tensors["weight_zero_point"].shape == (2, 2)
    torch.testing.assert_close(numbers(read(form, tensors)), dense, rtol=1e-6, atol=0)


def test_a_zero_point_of_nothing_borrows_from_its_neighbours_in_gptq() -> None:
    """As GPTQModel stores it: one less of each in a word, taken away from the word as a whole."""
    form = gptq_form(sym=False)
    tensors, _ = form.make(8, 16)
    zeros = [0, 3, 0, 0, 15, 8, 1, 0]
    word = sum(zero << 4 * place for place, zero in enumerate(zeros)) - 0x11111111
    tensors["qzeros"] = torch.tensor([[word]], dtype=torch.int64).to(torch.int32)
    matrix = read(form, tensors)
    assert isinstance(matrix, Grouped)
    assert matrix.zeros is not None
    assert matrix.zeros.flatten().tolist() == zeros


def check(form: Form, tensors: Tensors) -> None:
    layout = layout_of(scheme_of(form))
    layout.check("a.b", (16, 32), {suffix: tensors[suffix] for suffix in layout.early & tensors.keys()})


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_what_was_packed_says_nothing_that_is_not_computed(form: Form) -> None:
    check(form, form.make(16, 32)[0])


def test_gptq_that_says_sym_and_has_other_zero_points_is_refused() -> None:
    """Some would read its zero points, and some would not."""
    tensors, _ = gptq_form(version=2).make(16, 32)
    with pytest.raises(InvalidWeights, match=r"qzeros of a\.b has other zero points than 8, but sym is true.*gptq_v2"):
        check(gptq_form(version=1), tensors)


def test_inputs_that_are_grouped_in_an_order_of_their_own_are_refused() -> None:
    form = gptq_form(desc_act=True)
    tensors, _ = form.make(16, 32)
    check(form, tensors)
    tensors["g_idx"][[3, 20]] = tensors["g_idx"][[20, 3]]
    with pytest.raises(InvalidWeights, match=r"g_idx of a\.b groups inputs in an order of its own.*only 16 neighbours"):
        check(form, tensors)


def test_numbers_of_blocks_are_rounded_once() -> None:
    form = FORMS["fp8, blocks"]
    tensors, dense = form.make(24, 40)
    matrix = read(form, tensors, torch.bfloat16)
    assert isinstance(matrix, Tensor)
    assert torch.equal(matrix, dense.bfloat16())


def test_blocks_need_not_be_square_nor_fill_the_matrix() -> None:
    form = compressed("float-quantized", type="float", strategy="block", block_structure=[8, 16])
    scheme = read_scheme({"quantization_config": form})
    assert scheme is not None
    weight, scales = torch.randn(20, 40).to(torch.float8_e4m3fn), torch.rand(3, 3)
    matrix = layout_of(scheme).read({"weight": weight, "weight_scale": scales}, torch.float32)
    assert isinstance(matrix, Tensor)
    numbers = weight.float()
    for o in range(20):
        for i in range(40):
            assert matrix[o, i] == numbers[o, i] * scales[o // 8, i // 16]
