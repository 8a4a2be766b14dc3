"""Products of one to four rows whose weights come first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nanoengine.kernels.operations import Norm
from nanoengine.kernels.triton.operations import TritonKernels
from nanoengine.kernels.triton.products import gemv as module
from nanoengine.kernels.triton.products.few_rows import product_of_few_rows
from nanoengine.kernels.triton.products.fusion import Fusion
from nanoengine.kernels.triton.products.gemv import MOST_ROWS, gemv
from tests.kernels.contract import Case, Kind, Operation, after_norm, check_operation, gated_linear, id_of, linear
from tests.kernels.formulas import DEVICE, random

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("make", [linear, gated_linear, after_norm], ids=id_of)
def test_it_keeps_the_contract_of_kernels(monkeypatch: pytest.MonkeyPatch, make: Callable[[Case], Operation]) -> None:
    """With chunks so small that there are several, and only some are held in registers."""
    monkeypatch.setattr(module, "CHUNK", 64)
    monkeypatch.setattr(module, "LARGEST_CHUNK", 64)
    monkeypatch.setattr(module, "HELD_BYTES", 1 << 11)
    monkeypatch.setattr("nanoengine.kernels.triton.operations.product_of_few_rows", None)
    kind = Kind([TritonKernels()], (MOST_ROWS, 300, 12), DTYPES, (), 4, DEVICE)
    for size, cases in ((600, range(3)), (1 << 14, range(3, 6))):
        monkeypatch.setattr(module, "BYTES", size)
        check_operation(make, kind, cases)


@pytest.mark.parametrize(("inputs", "rows"), [(3072, 3), (9728, 1)])
def test_it_stands_in_for_the_other_product_of_few_rows(inputs: int, rows: int) -> None:
    """Sums may differ in their order: not in what they are rounded to before."""

    def numbers(*shape: int) -> Tensor:
        return random(*shape, dtype=torch.bfloat16, seed=len(shape) + shape[0]).to(DEVICE)

    x, weight, norm = numbers(rows, inputs), numbers(5, inputs), Norm(torch.rand(inputs, device=DEVICE), 1e-6)
    fusion = Fusion(numbers(5), norm, numbers(rows, inputs) * 9, dtype=torch.float32)
    (found, total), (expected, sums) = (product(x, weight, fusion) for product in (gemv, product_of_few_rows))
    assert torch.equal(total, sums)
    normed = torch.nn.functional.rms_norm(total.float(), (inputs,), *norm)
    magnitudes = normed.abs() @ weight.float().abs().T
    assert ((found - expected).abs() <= 4e-7 * magnitudes + 1e-6).all()
