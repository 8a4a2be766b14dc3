"""Run the kernels of a build in which a read or write outside of a tensor ends the process: that they compute right, too.

The arguments are "vectors" or "tiles", and the library. Tiles are those of AMX, emulated.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tests.kernels import formulas
from tests.kernels.builds import Build, check_attention
from tests.kernels.contract import (
    OF_THE_LIBRARY,
    Kind,
    check_operation,
    dequantized,
    experts,
    extremes,
    gated_linear,
    linear,
)
from tests.kernels.formulas import weight_of
from tests.kernels.quantized_matrices import DIFFERENT
from tests.kernels.recurrences import check_recurrences

SIZES = (40, 300, 40)


def check_vectors(build: Build) -> None:
    for make in OF_THE_LIBRARY:
        check_operation(make, Kind(build.in_all_ways(), SIZES, formats=DIFFERENT), range(12))
    for seed in range(10):
        check_recurrences(build, seed)
    check_attention(build, range(15), work=30_000)


def check_tiles(build: Build) -> None:
    assert build.activation_dtype == "bfloat16"
    numbers = Kind([build], (130, 256, 100), (torch.bfloat16,), formats=())
    for make in (linear, gated_linear, experts):
        check_operation(make, numbers, range(12))
        # A tile is 16 dwords deep: 32 inputs of bfloat16. Any other number of inputs is multiplied in vectors.
        check_operation(make, replace(numbers, edges=(32, 64, 96, 192, 256)), range(60, 70))
        large = replace(numbers, most=(900, 1100, 70), edges=(97, 384, 385, 544, 800, 1056))
        check_operation(make, large, range(90, 92))
    edges = (1, 2, 4, 5, 16, 17, 31, 32, 33, 48, 49, 64, 65, 96, 97, 129)
    for make in (linear, gated_linear, experts, extremes, dequantized):
        check_operation(make, Kind([build], (100, 600, 70), edges=edges), range(10))
    check_large_outputs(build)
    check_few_rows(build)
    check_attention(build, range(12), work=100_000)


def check_large_outputs(build: Build) -> None:
    """Large outputs are written past the caches, by other instructions: their rows are those of a small one."""
    x = formulas.random(1100, 64, dtype=torch.bfloat16, seed=1)
    for outputs in (1024, 1000):  # whole lines, and lines that are not
        both = build.new_weight(2 * outputs, 64, torch.bfloat16, torch.device("cpu"))
        both.rows(0, 2 * outputs).copy_(formulas.random(2 * outputs, 64, dtype=torch.bfloat16, seed=2))
        for activation in (None, "silu"):
            together, _ = build.product(x, both, activation=activation)
            alone = torch.cat([build.product(some, both, activation=activation)[0] for some in x.split(100)])
            assert torch.equal(together, alone)


def check_few_rows(build: Build) -> None:
    """Few rows are multiplied in vectors, with the bits of tiles; also where numbers, products and sums are denormal."""
    for seed in range(40):
        rng = random.Random(seed)
        rows, inputs = rng.randint(1, 20), 32 * rng.choice([1, 2, 5, 15, 16, 17, 33])
        weight = weight_of(build, at_any_exponent(rng, rng.randint(1, 70), inputs))
        x = at_any_exponent(rng, rows, inputs)
        together = build.logits(x.repeat(20, 1), weight)[:rows]
        alone = torch.cat([build.logits(some, weight) for some in x.split(rng.randint(1, 4))])
        assert torch.equal(alone.isnan(), together.isnan()), seed
        assert torch.equal(alone.nan_to_num(7.5).view(torch.int32), together.nan_to_num(7.5).view(torch.int32)), seed


def at_any_exponent(rng: random.Random, *shape: int) -> Tensor:
    """bfloat16 around a drawn exponent: products of two may be denormal. Some are 0, or denormal; perhaps one is infinite."""
    generator = torch.Generator().manual_seed(rng.randrange(2**40))

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    middle = rng.choice([127, 64, 64, 40, 3])
    exponents = draw(max(0, middle - 5), middle + 6) * (draw(0, 10) > 0)
    if rng.random() < 0.2:
        exponents.view(-1)[rng.randrange(exponents.numel())] = 255
    fractions = torch.where((exponents == 255) | (draw(0, 4) == 0), 0, draw(0, 128))
    return (draw(0, 2) << 15 | exponents << 7 | fractions).to(torch.int16).view(torch.bfloat16)


if __name__ == "__main__":
    {"vectors": check_vectors, "tiles": check_tiles}[sys.argv[1]](Build(Path(sys.argv[2])))
    print("nothing was found")
