"""The native mixture of experts against its formula in float64, in every shape at which it cuts or pads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.kernels.gates import ACTIVATIONS
from nanoengine.kernels.native_kernels import NativeKernels
from nanoengine.kernels.native_operations import unsupported_reason
from tests.drawn import FAST
from tests.kernels.formulas import DTYPES
from tests.kernels.mixtures import Mixture, assert_mixture, experts_of, mixture

REASON = unsupported_reason(torch.device("cpu"), torch.float32)
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return NativeKernels()


@both_dtypes
@pytest.mark.parametrize("experts", [*range(1, 10), 64])
def test_any_number_of_experts(kernels: NativeKernels, experts: int, dtype: torch.dtype) -> None:
    for per_row in range(1, experts + 1) if experts < 10 else (1, 8, 64):
        given = mixture(5, experts, per_row, 18, 21, dtype)
        assert_mixture(given.by(kernels), given)


@both_dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "hidden", "size"), [(1, 18, 21), (97, 40, 33), (5, 64, 96)])
def test_gates_of_every_kind_and_biases(
    kernels: NativeKernels, rows: int, hidden: int, size: int, activation: str, dtype: torch.dtype
) -> None:
    given = mixture(rows, 4, 2, hidden, size, dtype, activation=activation)
    assert_mixture(given.by(kernels), given)


@FAST
@given(
    st.integers(1, 130), st.integers(1, 9), st.integers(1, 100), st.integers(1, 100), st.sampled_from(DTYPES), st.data()
)
def test_any_shape(rows: int, experts: int, hidden: int, size: int, dtype: torch.dtype, data: st.DataObject) -> None:
    given = mixture(rows, experts, data.draw(st.integers(1, min(experts, 3))), hidden, size, dtype)
    assert_mixture(given.by(NativeKernels()), given)


@both_dtypes
@pytest.mark.parametrize("rows", [96, 97, 256, 257, 600])
def test_more_rows_than_are_copied_at_a_time(kernels: NativeKernels, rows: int, dtype: torch.dtype) -> None:
    """All of one expert, and some of each of three."""
    for experts, per_row in ((1, 1), (3, 2)):
        given = mixture(rows, experts, per_row, 40, 33, dtype)
        assert_mixture(given.by(kernels), given)


@both_dtypes
def test_all_rows_may_choose_the_same_experts(kernels: NativeKernels, dtype: torch.dtype) -> None:
    few = mixture(1, 9, 2, 50, 32, dtype)
    x = torch.randn(97, 50).to(dtype)
    given = replace(few, x=x, chosen=few.chosen.expand(97, 2), factors=few.factors.expand(97, 2))
    assert_mixture(given.by(kernels), given)


@both_dtypes
def test_rows_that_are_not_finite_spoil_no_other(kernels: NativeKernels, dtype: torch.dtype) -> None:
    given = mixture(20, 4, 2, 40, 33, dtype)
    expected = given.by(kernels)
    x, factors = given.x.clone(), given.factors.clone()
    x[3], x[4, 1], factors[5] = torch.nan, torch.inf, torch.nan
    out = replace(given, x=x, factors=factors).by(kernels)
    assert not out[3:6].isfinite().all(1).any()
    rest = [i for i in range(20) if i not in (3, 4, 5)]
    assert torch.equal(out[rest], expected[rest])


@both_dtypes
def test_no_rows(kernels: NativeKernels, dtype: torch.dtype) -> None:
    assert mixture(1, 4, 2, 40, 33, dtype).rows(slice(0, 0)).by(kernels).shape == (0, 40)


def test_inputs_may_have_gaps_between_their_rows(kernels: NativeKernels) -> None:
    given = mixture(8, 4, 2, 40, 33, torch.float32)

    def with_gaps(values: torch.Tensor) -> torch.Tensor:
        return torch.cat((values, torch.zeros_like(values)), dim=1)[:, : values.shape[1]]

    apart = Mixture(
        with_gaps(given.x), given.gate, given.up, given.down, *map(with_gaps, (given.chosen, given.factors))
    )
    assert not apart.chosen.is_contiguous()
    assert torch.equal(apart.by(kernels), given.by(kernels))


def test_weights_have_the_shape_that_was_asked_for(kernels: NativeKernels) -> None:
    weights = experts_of(kernels, torch.randn(3, 33, 7))
    assert weights.shape == (3, 33, 7)
    assert weights.expert(2).shape == (33, 7)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        weights.expert(1).copy_(torch.zeros(32, 7))
