"""What the tensors of a quantized layer stand for, in every format: as if unpacked number by number."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.models.quantization.layouts import layout_of
from nanoengine.models.quantization.scheme import Scheme, read_scheme
from tests.models.quantization.packed_models import FORMS, Form, Tensors, compressed, gptq_form, packed_form


def scheme_of(form: Form) -> Scheme:
    scheme = read_scheme({"quantization_config": form.config})
    assert scheme is not None
    return scheme


def read(form: Form, tensors: Tensors, dtype: torch.dtype = torch.float32) -> Any:
    return layout_of(scheme_of(form)).read(tensors, dtype)


def numbers(matrix: Any) -> Tensor:
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


def test_zero_points_that_are_all_in_the_middle_are_none() -> None:
    form = gptq_form(sym=False)
    assert read(form, gptq_form(sym=True).make(8, 32)[0]).zeros is None
    matrix = read(form, form.make(8, 32)[0])
    assert matrix.zeros.shape == matrix.scales.shape == (8, 2)


def test_zero_points_of_packed_numbers_are_in_bytes_in_old_files_and_need_not_fill_words() -> None:
    form = packed_form(symmetric=False)
    tensors, dense = form.make(13, 32)
    assert tensors["weight_zero_point"].shape == (2, 2)
    matrix = read(form, tensors)
    torch.testing.assert_close(numbers(matrix), dense, rtol=1e-6, atol=0)
    tensors["weight_zero_point"] = (matrix.zeros.int() - 8).to(torch.int8)
    torch.testing.assert_close(numbers(read(form, tensors)), dense, rtol=1e-6, atol=0)


def test_a_zero_point_of_nothing_borrows_from_its_neighbours_in_gptq() -> None:
    """As GPTQModel stores it: one less of each in a word, taken away from the word as a whole."""
    form = gptq_form(sym=False)
    tensors, _ = form.make(8, 16)
    zeros = [0, 3, 0, 0, 15, 8, 1, 0]
    word = sum(zero << 4 * place for place, zero in enumerate(zeros)) - 0x11111111
    tensors["qzeros"] = torch.tensor([[word]], dtype=torch.int64).to(torch.int32)
    assert read(form, tensors).zeros.flatten().tolist() == zeros


def test_numbers_of_blocks_are_rounded_once() -> None:
    form = FORMS["fp8, blocks"]
    tensors, dense = form.make(24, 40)
    assert torch.equal(read(form, tensors, torch.bfloat16), dense.bfloat16())


def test_blocks_need_not_be_square_nor_fill_the_matrix() -> None:
    form = compressed("float-quantized", type="float", strategy="block", block_structure=[8, 16])
    scheme = read_scheme({"quantization_config": form})
    assert scheme is not None
    weight, scales = torch.randn(20, 40).to(torch.float8_e4m3fn), torch.rand(3, 3)
    matrix = layout_of(scheme).read({"weight": weight, "weight_scale": scales}, torch.float32)
    assert isinstance(matrix, Tensor)
    for o, i in itertools.product(range(20), range(40)):
        assert matrix[o, i] == weight[o, i].float() * scales[o // 8, i // 16]
