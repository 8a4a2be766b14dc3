"""Products of one to four rows with weights of 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nanoengine.kernels.quantized.tensor import Grouped
from nanoengine.kernels.triton.operations import TritonKernels
from nanoengine.kernels.triton.products import packed_gemv as module
from nanoengine.kernels.triton.products.fusion import Fusion
from nanoengine.kernels.triton.products.packed import PackedWeight
from nanoengine.kernels.triton.products.packed_gemv import MOST_ROWS, packed_gemv
from tests.kernels.contract import Case, Kind, Operation, after_norm, check_operation, gated_linear, id_of, linear
from tests.kernels.formulas import DEVICE, random
from tests.kernels.quantized_matrices import GROUPS, Format, at_its_ends, drawn

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def packed(source: Grouped) -> PackedWeight:
    weight = PackedWeight.like(source, source.shape[0], DEVICE)
    assert weight.take_rows(0, source)
    return weight


@pytest.mark.parametrize("make", [linear, gated_linear, after_norm], ids=id_of)
def test_it_keeps_the_contract_of_kernels(monkeypatch: pytest.MonkeyPatch, make: Callable[[Case], Operation]) -> None:
    monkeypatch.setattr(module, "PROGRAMS", 2)
    kind = Kind([TritonKernels()], (MOST_ROWS, 300, 24), DTYPES, GROUPS, 4, DEVICE)
    check_operation(make, kind, range(10))


@pytest.mark.parametrize("form", [GROUPS[0], GROUPS[5], GROUPS[18], GROUPS[22], GROUPS[-2], GROUPS[-1]], ids=str)
def test_chunks_of_all_sizes_some_of_which_are_not_there_in_time(monkeypatch: pytest.MonkeyPatch, form: Format) -> None:
    """Two chunks are held; the last one of 8 bits ends before all threads have a piece of it."""
    monkeypatch.setattr(module, "HELD_BYTES", 1 << 14)
    monkeypatch.setattr(module, "PROGRAMS", 2)
    inputs = 4096 + 2 * 896 if form.bits == 4 else 2048 + 960
    source = drawn(form, 16, inputs)
    assert isinstance(source, Grouped)
    exact = source.dequantize(torch.float32).double()
    x = random(2, inputs, dtype=torch.bfloat16).to(DEVICE)
    found, same = packed_gemv(x, packed(source), Fusion(dtype=torch.float32))
    assert same is x
    magnitude = x.double().abs() @ exact.abs().T.to(DEVICE)
    assert ((found.double() - x.double() @ exact.T.to(DEVICE)).abs() <= 3e-7 * magnitude).all(), "nothing is rounded"


@pytest.mark.parametrize("form", [GROUPS[3], GROUPS[-1]], ids=str)
def test_numbers_that_are_their_zeros_add_nothing(form: Format) -> None:
    source = at_its_ends(form, 8, 128, high=False)
    assert isinstance(source, Grouped)
    source.numbers.copy_(source.zeros.repeat_interleave(source.group, 1))  # type: ignore[union-attr]
    found, _ = packed_gemv(random(1, 128, dtype=torch.float32).to(DEVICE), packed(source), Fusion())
    assert (found == 0).all()


def test_a_thread_has_one_place_in_all_outputs_of_a_program() -> None:
    for width in (1, 45, 64, 127, 512, 896, 1024, 1280, 2560, 4864, 9728, 28672 + 8):
        end = 0
        for first, size in module._chunks(width):
            assert first == end
            assert first % size == 0
            end += size * 128
        assert width <= end < width + 128, "what is read beyond the end is less than a byte for each thread"
