"""Filters in a large vocabulary: what is found among the likeliest few is what sorting all of it would keep."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.kernels.reference.filters import FIRST_TRY, filter_tokens
from nanoengine.kernels.reference.operations import log_sum_exp

VOCAB = 20 * FIRST_TRY


def keep(logits: Tensor, *rows: dict[str, float]) -> tuple[Tensor, Tensor]:
    """`filter_tokens` with the filters of each row."""
    columns = {"top_k": (0, torch.int32), "top_p": (1.0, torch.float32), "min_p": (0.0, torch.float32)}
    top_k, top_p, min_p = (
        torch.tensor([row.get(name, off) for row in rows], dtype=dtype) for name, (off, dtype) in columns.items()
    )
    values, token_ids = torch.full_like(logits, -torch.inf), torch.zeros_like(logits, dtype=torch.int64)
    for own, some, ids in filter_tokens(logits, top_k, top_p, min_p, log_sum_exp):
        values[own, : some.shape[1]], token_ids[own, : some.shape[1]] = some, ids
    return values, token_ids


def kept(logits: Tensor, **filters: float) -> list[int]:
    values, token_ids = keep(logits[None].clone(), filters)
    return token_ids[0][values[0].isfinite()].tolist()


def sorted_reference(logits: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    ordered = logits.double().sort(descending=True, stable=True)
    count = top_k if top_k > 0 else len(logits)
    values = ordered.values[:count]
    values = values[values >= values[0] + math.log(min_p)] if min_p else values
    probabilities = values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    keep = (before < top_p) | (top_p == 1)
    keep[0] = True
    return ordered.indices[: len(values)][keep].tolist()


@settings(max_examples=80)
@given(
    vocab_size=st.sampled_from([2, 3, 17, 64, VOCAB, VOCAB]),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.01, 1.0, 4.0, 12.0]),
    top_k=st.sampled_from([0, 1, 2, 50, FIRST_TRY - 1, FIRST_TRY, 5000, VOCAB, VOCAB + 5, 2**31 - 1]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.31, 0.0123]),
    min_p=st.sampled_from([0.0, 0.0317, 0.9]),
)
def test_the_same_tokens_as_by_sorting(
    vocab_size: int, seed: int, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    found, expected = kept(logits, top_k=top_k, top_p=top_p, min_p=min_p), sorted_reference(logits, top_k, top_p, min_p)
    # A flat distribution has thousands of tokens at the limit of top_p: float32 may keep a few more or fewer of them.
    assert abs(len(found) - len(expected)) <= len(expected) // 500
    common = min(len(found), len(expected))
    assert found[:common] == expected[:common]


def test_of_equal_tokens_the_lower_ids_are_kept() -> None:
    logits = torch.zeros(VOCAB)
    logits[17] = 1.0
    assert kept(logits, top_k=4) == [17, 0, 1, 2]
    found = kept(torch.zeros(VOCAB), top_p=0.25)
    assert found == list(range(len(found)))
    assert len(found) == pytest.approx(VOCAB / 4, abs=2)


@pytest.mark.parametrize("vocab_size", [5, VOCAB])
def test_logits_that_are_kept_are_not_changed_nor_are_those_that_are_given(vocab_size: int) -> None:
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(5)) * 4
    before = logits.clone()
    values, token_ids = keep(logits, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1})
    assert torch.equal(logits, before)
    finite = values.isfinite()
    assert torch.equal(values[finite], logits.gather(-1, token_ids)[finite])


def test_a_row_that_keeps_many_makes_no_other_row_look_at_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted are the tokens that are ordered. And its neighbours have the very bits that they have alone."""
    ordered: list[tuple[int, ...]] = []
    plain_sort = Tensor.sort

    def sort(self: Tensor, *args: Any, **options: Any) -> Any:
        ordered.append(tuple(self.shape))
        return plain_sort(self, *args, **options)

    monkeypatch.setattr(Tensor, "sort", sort)
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(6)) * 4
    few: list[dict[str, float]] = [{"top_k": 20, "top_p": 0.9}] * 5 + [{"top_p": 0.9}] * 2
    rows: list[dict[str, float]] = [*few, {"top_k": VOCAB - 1}, {"top_k": 5 * FIRST_TRY}]
    values, token_ids = keep(logits, *rows)
    beside = [shape for shape in ordered if len(shape) == 2]
    assert sum(count * width for count, width in beside) <= 2 * (7 * FIRST_TRY + 5 * FIRST_TRY + VOCAB + 2)
    for i, alone in enumerate(rows):
        own_values, own_ids = keep(logits[i, None], alone)
        is_kept = own_values[0].isfinite()
        assert torch.equal(values[i][is_kept], own_values[0][is_kept])
        assert torch.equal(token_ids[i][is_kept], own_ids[0][is_kept])
        assert values[i].isfinite().sum() == is_kept.sum()
