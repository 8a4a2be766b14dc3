"""The theorem of `one_number.py`, for as many draws as the suite has time for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.one_number import check_one_number

DRAWS = 6


@pytest.mark.parametrize("part", range(3))
def test_what_is_said_has_the_same_bits_in_whatever_way_it_is_computed(tmp_path: Path, part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part * DRAWS, (part + 1) * DRAWS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        seen += check_one_number(seed, folder)
    common = (
        "sent again",
        "resumed",
        "hits",
        "preemptions",
        "several",
        "constrained",
        "adapted",
        "accepted",
        "rejected",
        "failed",
        "elsewhere",
    )
    for happened in common:
        assert seen[happened] > 0, happened
