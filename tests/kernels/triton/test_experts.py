"""The mixture of experts on a GPU, against its formula in float64."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanoengine.kernels.gates import ACTIVATIONS
from nanoengine.kernels.triton.experts import mixture as computed
from tests.kernels.mixtures import Mixture, assert_mixture, mixture

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LOOSER = 2  # Triton's interpreter does not round bfloat16 to the nearest


def by_triton(given: Mixture) -> torch.Tensor:
    return computed(
        given.x, given.gate, given.up, given.down, given.chosen, given.factors, given.activation, given.biases
    )


@settings(deadline=None, max_examples=12)
@given(
    rows=st.integers(1, 12),
    experts=st.integers(1, 9),
    hidden=st.sampled_from([1, 16, 33]),
    size=st.sampled_from([1, 17, 32]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_it_is_the_formula(
    rows: int, experts: int, hidden: int, size: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    activation = data.draw(st.sampled_from(ACTIVATIONS))
    given = mixture(rows, experts, data.draw(st.integers(1, min(experts, 3))), hidden, size, dtype, DEVICE, activation)
    assert_mixture(by_triton(given), given, LOOSER)


@pytest.mark.parametrize(("experts", "per_row"), [(9, 9), (64, 8)])
def test_many_choices(experts: int, per_row: int) -> None:
    given = mixture(2, experts, per_row, 16, 16, torch.float32, DEVICE)
    assert_mixture(by_triton(given), given, LOOSER)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_tiles_of_rows_of_one_expert(dtype: torch.dtype) -> None:
    given = mixture(97, 2, 1, 40, 20, dtype, DEVICE)
    assert_mixture(by_triton(given), given, LOOSER)


def test_choices_that_are_sorted_in_several_pieces() -> None:
    """Of 1,100 rows most choose the last expert."""
    given = mixture(1100, 3, 1, 4, 4, torch.float16, DEVICE)
    chosen = given.chosen.clone()
    chosen[5:1050] = 2
    given = replace(given, chosen=chosen)
    assert_mixture(by_triton(given), given, LOOSER)


def test_a_row_does_not_depend_on_the_others() -> None:
    given = mixture(20, 3, 2, 33, 16, torch.float32, DEVICE)
    together = by_triton(given)
    torch.testing.assert_close(by_triton(given.rows(slice(7, 8))), together[7:8], rtol=1e-6, atol=1e-6)
    x, factors = given.x.clone(), given.factors.clone()
    x[3], factors[4] = torch.nan, torch.nan
    spoilt = by_triton(replace(given, x=x, factors=factors))
    assert spoilt[3:5].isnan().all()
    rest = [i for i in range(20) if i not in (3, 4)]
    assert torch.equal(spoilt[rest], together[rest])


def test_no_rows_are_no_work() -> None:
    assert by_triton(mixture(1, 3, 2, 33, 16, torch.float32, DEVICE).rows(slice(0, 0))).shape == (0, 33)
