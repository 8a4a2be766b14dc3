"""What the filters keep on the device, against a sort in float64."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.kernels.triton.draws.filters import Limits, find_limits
from tests.kernels.sampled_rows import (
    DEVICE,
    GREEDY,
    KINDS,
    VOCAB_SIZES,
    Rows,
    kept_exactly,
    random_logits,
    random_params,
)


def limits_of(rows: Rows, logits: Tensor) -> Limits:
    return find_limits(logits, rows.table(), rows.rows())


def kept_by(rows: Rows, logits: Tensor) -> Tensor:
    """Whether the thresholds keep each token."""
    lowest, last_ids, *_ = limits_of(rows, logits)
    ids = torch.arange(logits.shape[1], device=DEVICE)
    return (logits > lowest[:, None]) | ((logits == lowest[:, None]) & (ids <= last_ids[:, None]))


@settings(max_examples=10)
@given(
    kind=st.sampled_from(KINDS),
    n=st.integers(1, 4),
    vocab_size=st.sampled_from(VOCAB_SIZES),
    seed=st.integers(0, 10_000),
)
@example(kind="banned", n=3, vocab_size=17, seed=7391)  # top_k above the number of tokens that are not banned
@example(kind="random", n=2, vocab_size=20_011, seed=0)
@example(kind="peaked", n=2, vocab_size=20_011, seed=1)
@example(kind="ties", n=2, vocab_size=20_011, seed=2)
@example(kind="banned", n=2, vocab_size=20_011, seed=3)
@example(kind="wide", n=2, vocab_size=20_011, seed=4)
def test_what_is_kept_is_what_a_sort_keeps(kind: str, n: int, vocab_size: int, seed: int) -> None:
    rng, logits = random.Random(seed), random_logits(kind, n, vocab_size, seed)
    rows = Rows([random_params(rng, vocab_size) for _ in range(n)], seed)
    for row, params, mask in zip(logits, rows.params, kept_by(rows, logits), strict=True):
        if params.temperature == 0:
            assert mask.all()  # nothing to look for
            continue
        exact, close = kept_exactly(row, params)
        assert not ((mask ^ exact) & row.isfinite() & ~close).any(), (kind, params)


def test_values_of_all_sizes_end_the_search() -> None:
    logits = torch.tensor([[3e38, 1e38, 1.0, 1e-45, 0.0, -0.0, -1e-45, -1e-30, -1.0, -3e38, -torch.inf]], device=DEVICE)
    for top_k in range(1, 12):
        mask = kept_by(Rows([{"top_k": top_k}]), logits)[0]
        assert int(mask[:10].sum()) == min(top_k, 10), top_k
        assert mask[: min(top_k, 10)].all()


# ---- candidates


@pytest.mark.parametrize(
    ("params", "among_candidates"),
    [
        ({"top_k": 100}, True),
        ({"top_k": 5000}, False),
        ({"top_k": 5000, "top_p": 0.1}, False),  # what top_k leaves has to be known
        ({"top_p": 0.3}, True),
        ({"top_p": 0.99}, False),
        ({"min_p": 0.3}, True),
        ({"min_p": 1e-6}, False),
        ({"top_p": 0.99, "min_p": 0.3}, True),
        ({}, False),
        (GREEDY, False),
    ],
    ids=str,
)
def test_the_whole_row_is_searched_only_where_candidates_do_not_tell(
    params: dict[str, float], among_candidates: bool
) -> None:
    logits = random_logits("random", 1, 20_011, 5)
    logits[0, 77:20_000:400] += 8  # 50 tokens have nearly all of the probability
    rows = Rows([params])
    assert bool(limits_of(rows, logits).counts[0]) == among_candidates
    found = kept_by(rows, logits)[0]
    if params != GREEDY:
        exact, close = kept_exactly(logits[0], rows.params[0])
        assert not ((found ^ exact) & ~close).any()
