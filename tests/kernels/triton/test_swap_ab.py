"""Products with the weights as the left factor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from nanoengine.kernels.triton.operations import TritonKernels
from nanoengine.kernels.triton.products import swap_ab as module
from nanoengine.kernels.triton.products.fusion import Fusion
from nanoengine.kernels.triton.products.swap_ab import LEAST_PARTS, LEAST_STEPS, MOST_ROWS, swap_ab
from nanoengine.kernels.triton.tuning import DEFAULTS
from nanoengine.kernels.triton.workspace import Workspace
from tests.kernels.contract import Case, Kind, Operation, after_norm, check_operation, gated_linear, id_of, linear
from tests.kernels.formulas import DEVICE, assert_gated, assert_linear, random

HALF = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("make", [linear, gated_linear, after_norm], ids=id_of)
def test_it_keeps_the_contract_of_kernels(monkeypatch: pytest.MonkeyPatch, make: Callable[[Case], Operation]) -> None:
    """With steps so small that most products are cut into parts."""
    monkeypatch.setattr(module, "DEPTH", 16)
    monkeypatch.setattr(module, "LEAST_STEPS", 1)
    monkeypatch.setattr("nanoengine.kernels.triton.operations.product_of_few_rows", None)
    monkeypatch.setattr("nanoengine.kernels.triton.operations.MOST_GEMV_ROWS", 0)
    kernels = TritonKernels(replace(DEFAULTS, swapped_rows=99))
    check_operation(make, Kind([kernels], (MOST_ROWS, 200, 90), HALF, (), 4, DEVICE), range(6))


@pytest.mark.parametrize("activation", [None, "silu"])
def test_parts_are_added_in_their_order(activation: str | None) -> None:
    """The result is the same each time, and counters are zeros behind it."""
    x, weight, workspace = (
        random(9, 1030, dtype=torch.bfloat16).to(DEVICE),
        random(70, 1030, dtype=torch.bfloat16, seed=1).to(DEVICE),
        Workspace(),
    )
    assert module._parts(2, 17, 132) == 4
    found = [swap_ab(x, weight, Fusion(activation=activation), workspace) for _ in range(2)]
    assert torch.equal(*found)
    assert not workspace.counters(1, DEVICE).any()
    if activation is None:
        assert_linear(found[0], x, weight, None, 4)
    else:
        assert_gated(found[0], x, weight, activation, 4)


def test_no_part_is_empty() -> None:
    for tiles in (1, 5, 16, 44, 45):
        for steps in range(1, 200):
            parts = module._parts(tiles, steps, 132)
            assert parts == 1 or LEAST_PARTS <= parts <= 132 // tiles
            size = -(-steps // parts)
            assert (parts - 1) * size < steps
            assert parts == 1 or size >= LEAST_STEPS
