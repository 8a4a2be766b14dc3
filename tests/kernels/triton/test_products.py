"""What tests/kernels/contract.py does not say of Triton's products and gates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanoengine.kernels.operations import Norm
from nanoengine.kernels.reference.operations import RowMajor
from nanoengine.kernels.triton.operations import TritonKernels
from nanoengine.kernels.triton.products.activation import gate_and_multiply
from nanoengine.kernels.triton.products.few_rows import product_of_few_rows
from nanoengine.kernels.triton.products.fusion import Fusion
from nanoengine.kernels.triton.tuning import DEFAULTS
from nanoengine.models.quantization.at_load import quantizer
from tests.kernels.formulas import DEVICE, weight_of
from tests.kernels.mixtures import assert_mixture, mixture
from tests.kernels.noting import noting

NAMES = {"_few_rows_kernel": "few", "gemv_kernel": "gemv", "_swap_ab_kernel": "swap", "_rms_norm_kernel": "norm"}


@pytest.mark.parametrize(
    ("swapped", "num_rows", "expected"),
    [
        (0, 1, "gemv gemv gemv gemv gemv"),
        (16, 4, "gemv gemv gemv gemv gemv"),
        (0, 5, "few few few few few"),
        (0, 8, "few few few few few"),
        (0, 9, ""),
        (16, 5, "swap swap swap norm swap norm swap"),
        (16, 16, "swap swap swap norm swap norm swap"),
        (16, 17, ""),
        (99, 65, ""),
    ],
)
def test_which_kernel_computes_a_product(swapped: int, num_rows: int, expected: str) -> None:
    """The one that puts weights first, then the one that swaps its factors, then that of few rows; cuBLAS, beyond all of them."""
    kernels = TritonKernels(replace(DEFAULTS, swapped_rows=swapped))
    with DEVICE:
        x, norm = torch.randn(num_rows, 64).bfloat16(), torch.ones(64)
        weight = weight_of(kernels, torch.randn(96, 64).bfloat16())
    with noting() as launches:
        kernels.linear(x, weight, None)
        kernels.product(x, weight, activation="silu")
        kernels.logits(x, weight)
        kernels.product(x, weight, norm=Norm(norm, 1e-6), residual=x.clone())
        kernels.product(x, weight, norm=Norm(norm, 1e-6), residual=x.clone(), activation="silu")
    seen = [NAMES[launch.name] for launch in launches if launch.name in NAMES]
    if expected:
        assert seen == expected.split()
    else:
        assert set(seen) == {"norm"}


@pytest.mark.parametrize(("tuned", "of_products", "of_others"), [(0, 0, 0), (1, 1, 1), (2, 2, 1), (6, 6, 5)])
def test_only_products_let_the_next_kernel_start_at_once(tuned: int, of_products: int, of_others: int) -> None:
    """What is launched like that reads what is older than the kernel before it at its own risk (`dependent.py`)."""
    bf16 = torch.bfloat16
    for num_rows, swapped in ((2, 0), (6, 0), (6, 64), (12, 0)):
        kernels = TritonKernels(replace(DEFAULTS, dependent_launch=tuned, swapped_rows=swapped))
        x, norm = torch.empty(num_rows, 64, dtype=bf16, device="meta"), torch.empty(64, device="meta")
        weight = weight_of(kernels, torch.empty(96, 64, dtype=bf16, device="meta"))
        with noting() as launches:
            kernels.product(x, weight, norm=Norm(norm, 1e-6), residual=x)
            kernels.product(x, weight, norm=Norm(norm, 1e-6), activation="silu")
        names = {launch.name.strip("_") for launch in launches}
        assert names & {"rms_norm_kernel", "gemv_kernel", "swap_ab_kernel", "few_rows_kernel"}
        for launch in launches:
            is_product = launch.name not in ("_rms_norm_kernel", "_gate_and_multiply_kernel")
            assert launch.values["LAUNCH"] == (of_products if is_product else of_others)
            assert launch.options.get("launch_pdl", False) == bool(tuned)


@pytest.mark.parametrize("way", ["alone", "behind a product"])
def test_gates_of_any_size_do_not_overflow(way: str) -> None:
    gate = torch.tensor([[-3e38, -1000.0, -100.0, 0.0, 100.0, 1e30]], device=DEVICE)
    both = torch.cat((gate, torch.ones_like(gate)), dim=-1)
    for activation in ("silu", "gelu_tanh"):
        if way == "alone":
            found = gate_and_multiply(both, activation)
        else:
            found, _ = product_of_few_rows(both, torch.eye(12, device=DEVICE), Fusion(activation=activation))
        torch.testing.assert_close(found, gate.clamp(min=0.0), rtol=0, atol=1e-30)


def test_what_is_not_finite_stays_so_where_nothing_clamps_it() -> None:
    gate_up = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1.0, 1.0, 1.0, 1.0, torch.nan]], device=DEVICE)
    result = gate_and_multiply(gate_up, "clamped")[0]
    torch.testing.assert_close(result[0].item(), 7.0 * 2, rtol=1e-4, atol=0)
    assert result[[2, 3]].isnan().all()


# ---- experts


def test_choices_that_are_sorted_in_several_pieces() -> None:
    """Of 1,100 rows most choose the last expert."""
    given = mixture(1100, 3, 1, 4, 4, torch.float16, DEVICE.type)
    given.chosen[5:1050] = 2
    assert_mixture(given.by(TritonKernels()), given, 2)


@pytest.mark.parametrize("name", ["int8", "int4", "int4-128", "fp8"])
def test_quantized_experts_become_numbers_as_they_come(name: str) -> None:
    source = quantizer(name)(torch.randn(32, 128))
    experts = TritonKernels().new_experts(2, 32, 128, torch.float32, DEVICE)
    experts.expert(1).copy_quantized(source)
    assert isinstance(experts.weight, RowMajor)
    assert torch.equal(experts.weight.tensor[32:].cpu(), source.dequantize(torch.float32).cpu())
