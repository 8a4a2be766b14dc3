"""The theorem of `one_number.py`, for as many draws as the suite has time for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.one_number import check_one_number

SEEDS = ((0, 3, 16, 19, 24, 26), (5, 9, 10, 25, 29, 153), (11, 17, 23, 27, 40, 64))
"""Nearly all are draws of models of different families. Among them are all kinds of layers with states,
and models with experts, windows, chunks and sinks; and in each part models with states.
"""
COMMON = "sent again|resumed|hits|preemptions|several|constrained|adapted|accepted|rejected|failed|elsewhere|states"
"""What happens in each part."""


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_what_is_said_has_the_same_bits_in_whatever_way_it_is_computed(tmp_path: Path, seeds: tuple[int, ...]) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        seen += check_one_number(seed, folder)
    for happened in COMMON.split("|"):
        assert seen[happened] > 0, happened
