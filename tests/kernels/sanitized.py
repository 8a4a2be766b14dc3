"""Run every kernel of a build in which a read or write outside of a tensor ends the process. The arguments are
the libraries of a build in vectors, and of one in tiles."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

from tests.attention.paged import Heads, Pool, Sequences
from tests.attention.test_one_number import check_one_number
from tests.kernels import shapes
from tests.kernels.builds import Build
from tests.kernels.formulas import DTYPES
from tests.kernels.quantized_matrices import DIFFERENT


def write_some(build: Build) -> None:
    """Some tokens have no slot."""
    for dtype in DTYPES:
        for tokens in (3, 70):
            sequences = Sequences(shapes.HEADS[0], 16, [tokens], dtype)
            slots = [-1 if i % 3 == 1 else slot for i, slot in enumerate(sequences.slots(0, 0, tokens))]
            for norms, rotated, one_go, quantized in itertools.product((True, False), repeat=4):
                options = {"norms": norms, "rotated": rotated, "one_go": one_go, "quantized": quantized}
                pool = Pool(sequences, build.attention(16), **options)
                pool.write(sequences.qkv[0], torch.arange(tokens), torch.tensor(slots))


def main(vectors: Path, tiles: Path) -> None:
    build, in_tiles = Build(vectors), Build(tiles)
    for inputs in (1, 7, 16, 32, 33, 64, 75):
        shapes.check_linear(build, inputs, outputs=33, rows=[1, 2, 5, 6, 7, 12, 13, 18, 97])
    for inputs in (32, 33, 64):
        shapes.check_linear(in_tiles, inputs, outputs=33, rows=[1, 15, 31, 32, 33, 97])
    shapes.check_linear(build, 32, outputs=1, rows=[1, 5])
    for check in (shapes.check_embed, shapes.check_norm, shapes.check_gated, shapes.check_experts, shapes.check_draws):
        check(build)
    shapes.check_experts(in_tiles)
    shapes.check_quantized(build)
    shapes.check_mixed(build)
    shapes.check_quantized_experts(build, DIFFERENT[::3])
    write_some(build)
    shapes.check_decode(build)
    for each in (build, in_tiles):
        shapes.check_prefill(each, [Heads(1, 1, 32), Heads(1, 3, 96)])
        shapes.check_int8(each)
        for seed in range(3):
            check_one_number(each.attention, seed, ways=2, longest=100)
    print("nothing was found")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
