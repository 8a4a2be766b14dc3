"""Run every kernel of a build in which a read or write outside of a tensor ends the process. The arguments are
the libraries of a build in vectors, and of one in tiles."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from tests.kernels.attention.contract import check_step, check_write
from tests.kernels.attention.every_backend import NATIVE
from tests.kernels.builds import Build
from tests.kernels.contract import OF_THE_LIBRARY, Kind, check_operation, experts, gated_linear, linear
from tests.kernels.quantized_matrices import DIFFERENT
from tests.kernels.recurrences import check_recurrences

SIZES = (40, 300, 40)
SMALL = replace(NATIVE, longest=300, work=30_000)


def main(vectors: Path, tiles: Path) -> None:
    build, in_tiles = Build(vectors), Build(tiles)
    for make in OF_THE_LIBRARY:
        check_operation(make, Kind(build.in_all_ways(), SIZES, formats=DIFFERENT), range(6))
    for seed in range(6):
        check_recurrences(build, seed)
    for make in (linear, gated_linear, experts):
        check_operation(make, Kind([in_tiles], SIZES, (torch.bfloat16,), formats=()), range(6))
        check_operation(make, Kind([in_tiles], (70, 300, 40), formats=DIFFERENT), range(6))
    for each in (build, in_tiles):
        for seed in range(10):
            check_step(SMALL, each.attention, seed)
            check_write(SMALL, each.attention, seed, most=70)
    print("nothing was found")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
