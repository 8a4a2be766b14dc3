"""Gates inside products of many rows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from nanoengine.kernels.reference.gates import ACTIVATIONS, GATES
from nanoengine.kernels.triton.operations import TritonKernels
from nanoengine.kernels.triton.tuning import DEFAULTS
from tests.kernels.attention.every_backend import DEVICE
from tests.kernels.noting import noting

NAMES = "_gated_product_kernel", "_swap_ab_kernel"


@pytest.mark.parametrize("seed", range(4))
def test_any_product(seed: int) -> None:
    rng, random_numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, inputs, outputs = rng.choice([65, 128, 200]), 8 * rng.randint(3, 25), rng.choice([128, 256])
    dtype, activation = rng.choice([torch.bfloat16, torch.float16]), ACTIVATIONS[seed % len(ACTIVATIONS)]
    x = torch.randn(rows, inputs + 8, generator=random_numbers).to(DEVICE, dtype)[:, 4:-4]
    if rng.random() < 0.7:
        x = x.contiguous()  # else it begins where no copy can, and cuBLAS computes it
    numbers = (torch.randn(2 * outputs, inputs, generator=random_numbers) / inputs**0.5).to(DEVICE, dtype)
    kernels = TritonKernels(replace(DEFAULTS, gated_rows=256))
    weight = kernels.new_weight(2 * outputs, inputs, dtype, DEVICE)
    weight.put_numbers(0, numbers)
    found, _ = kernels.product(x, weight, activation=activation)
    both = x.double() @ numbers.double().T
    exact = GATES[activation](both[:, :outputs], both[:, outputs:])
    rounding = 2.0**-7 if dtype is torch.bfloat16 else 2.0**-10
    torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=2 * rounding)


@pytest.mark.parametrize(
    ("fields", "rows", "name"),
    [
        ({"gated_rows": 64}, 64, "_swap_ab_kernel"),
        ({"gated_rows": 64}, 65, None),
        ({"gated_rows": 256}, 256, "_gated_product_kernel"),
        ({"gated_rows": 256}, 257, None),
        ({"gated_prompts": 1}, 257, "_gated_product_kernel"),
        ({"gated_prompts": 1}, 256, None),
    ],
)
def test_it_is_for_the_rows_that_tuning_says(fields: dict[str, int], rows: int, name: str | None) -> None:
    kernels = TritonKernels(replace(DEFAULTS, **fields))
    weight = kernels.new_weight(256, 64, torch.bfloat16, DEVICE)
    with noting() as launches:
        kernels.product(torch.zeros(rows, 64, dtype=torch.bfloat16, device=DEVICE), weight, activation="silu")
    assert [launch.name for launch in launches if launch.name in NAMES] == ([name] if name else [])
