"""Ranks that share a model have some rows of each B. All requests get the bits of one device: tests/scale/parallel. A replica has
its adapters from the front, whatever computes for it: test_replicas.py.
"""

from __future__ import annotations

import random

import pytest
import torch

from nanoengine.features.lora.adapted_products import _rows_of


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_b_are_those_of_the_ranks_outputs(seed: int) -> None:
    """Some outputs of a matrix have an adapter, and some are here."""
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(60), 2 * rng.randint(1, 4)))
    kept = [range(start, stop) for start, stop in zip(cuts[::2], cuts[1::2], strict=True)]
    first, count = rng.randrange(60), rng.randint(1, 30)
    b = torch.arange(first, first + count)[:, None]  # each row is the output that it is of
    at, rows = _rows_of(first, b, kept)
    here = [row for own in kept for row in own]
    assert rows.flatten().tolist() == [row for row in here if first <= row < first + count]
    assert here[at : at + len(rows)] == rows.flatten().tolist()
