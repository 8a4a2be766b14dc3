"""The oracle itself, against formulas in float64."""

from __future__ import annotations

import random as random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.kernels.gates import ACTIVATIONS
from nanoengine.kernels.torch_kernels import TorchKernels
from tests.kernels.formulas import gated
from tests.kernels.mixtures import TOLERANCE, assert_mixture, mixture


def weight_of(kernels: TorchKernels, rows: torch.Tensor) -> object:
    weight = kernels.new_weight(*rows.shape, rows.dtype, rows.device)
    weight.rows(0, len(rows)).copy_(rows)
    return weight


def test_a_weight_is_filled_row_by_row() -> None:
    kernels, rows = TorchKernels(), torch.randn(5, 3)
    weight = kernels.new_weight(5, 3, torch.float32, torch.device("cpu"))
    weight.rows(3, 2).copy_(rows[3:])
    weight.rows(0, 3).copy_(rows[:3])
    assert weight.shape == (5, 3)
    assert torch.equal(kernels.embed(torch.tensor([4, 0]), weight), rows[[4, 0]])


def test_products_norms_and_gates_are_their_formulas() -> None:
    kernels, rows, x = TorchKernels(), torch.randn(8, 6), torch.randn(4, 6)
    weight, exact = weight_of(kernels, rows), x.double() @ rows.double().T
    bias, scale, residual = torch.randn(8), torch.randn(6), torch.randn(4, 6)

    def check(result: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)

    check(kernels.linear(x, weight, bias), exact + bias.double())  # type: ignore[arg-type]
    for activation in ACTIVATIONS:
        right = gated(*exact.chunk(2, dim=-1), activation)
        check(kernels.gated_linear(x, weight, activation), right)  # type: ignore[arg-type]
    total = (x + residual).double()
    normed, after = kernels.add_rms_norm(x, residual, scale, 1e-6)
    check(after, total)
    check(normed, total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale.double())


def test_a_norm_before_a_gated_product_takes_every_activation() -> None:
    kernels, x, norm = TorchKernels(), torch.randn(3, 8), torch.rand(8)
    weight = weight_of(kernels, torch.randn(10, 8))
    for activation in ACTIVATIONS:
        out, _ = kernels.norm_gated_linear(x, None, norm, 1e-6, weight, activation)  # type: ignore[arg-type]
        expected = kernels.gated_linear(kernels.rms_norm(x, norm, 1e-6), weight, activation)  # type: ignore[arg-type]
        assert torch.equal(out, expected)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(1, 9), st.sampled_from(list(TOLERANCE)), st.data())
def test_a_mixture_of_experts_is_its_formula(rows: int, experts: int, dtype: torch.dtype, data: st.DataObject) -> None:
    per_row, activation = data.draw(st.integers(1, experts)), data.draw(st.sampled_from(ACTIVATIONS))
    drawn = mixture(rows, experts, per_row, 19, 12, dtype, activation=activation)
    assert_mixture(drawn.by(TorchKernels()), drawn)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_with_a_weight_near_1_is_rounded_once(dtype: torch.dtype) -> None:
    """1 + w in the dtype would be 1."""
    x, weight = torch.randn(4, 64).to(dtype), 1 + torch.randn(64) * 2e-3
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert torch.equal(TorchKernels().rms_norm(x, weight, 1e-6), exact.float().to(dtype))


def test_logits_are_float32_whatever_the_weights_are() -> None:
    weight = TorchKernels().new_weight(7, 4, torch.bfloat16, torch.device("cpu"))
    weight.rows(0, 7).copy_(torch.ones(7, 4))
    logits = TorchKernels().logits(torch.ones(2, 4, dtype=torch.bfloat16), weight)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, torch.full((2, 7), 4.0))


@pytest.mark.parametrize(
    ("reason", "description"), [(None, "plain torch"), ("no native ones: no compiler", "no native ones: no compiler")]
)
def test_it_says_why_it_was_chosen(reason: str | None, description: str) -> None:
    assert description in TorchKernels(reason).description


# ---- where tokens stand

BATCHES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9), st.booleans()),  # tokens before, new tokens, is padding
    min_size=1,
    max_size=5,
)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@settings(max_examples=150, deadline=None)
@given(batch=BATCHES, block_size=st.sampled_from([1, 4, 16, 256]), is_decode=st.booleans(), seed=st.integers(0, 99))
def test_tokens_stand_where_the_formula_says(
    batch: list[tuple[int, int, bool]], block_size: int, is_decode: bool, seed: int
) -> None:
    """Kernels.compute_slot_mapping against a loop, over tables of two groups, of block ids beyond 32 bits of slots."""
    rng = random.Random(seed)
    num_rows = 8
    tables = [[[rng.randrange(1 << 30) for _ in range(70)] for _ in range(num_rows)] for _ in range(2)]
    last_tokens = [rng.randrange(1000) for _ in range(num_rows)]
    rows = rng.sample(range(num_rows - 1), len(batch))
    tokens, ids, positions, seq_lens, starts = [], [], [], [], [0]
    slots: list[list[int]] = [[], []]
    for i, (before, count, is_padding) in enumerate(batch):
        count = 1 if is_decode else count
        rows[i] = row = num_rows - 1 if is_padding else rows[i]
        for position in range(before, before + count):
            tokens.append(rng.choice([-1, rng.randrange(1000)]))
            ids.append(last_tokens[row] if tokens[-1] < 0 else tokens[-1])
            positions.append(position)
            for table, of_group in zip(tables, slots, strict=True):
                slot = table[row][position // block_size] * block_size + position % block_size
                of_group.append(-1 if is_padding else slot)
        starts.append(len(tokens))
        seq_lens.append(0 if is_padding else before + count)
    computed = [before for before, _, _ in batch]
    longest = max(end - start for start, end in pairwise(starts))
    placed = TorchKernels().compute_slot_mapping(
        ints(tokens),
        ints(rows),
        ints(starts),
        ints(computed),
        torch.tensor(last_tokens),
        ints(tables),
        block_size,
        longest,
    )
    assert placed.input_ids.tolist() == ids
    assert placed.positions.tolist() == positions
    assert placed.slot_mapping.tolist() == slots
    assert placed.seq_lens.tolist() == seq_lens
    assert {placed.input_ids.dtype, placed.positions.dtype, placed.slot_mapping.dtype} == {torch.int64}
    assert placed.seq_lens.dtype == torch.int32


def test_a_last_token_that_could_not_be_sampled_is_a_token_nevertheless() -> None:
    """So that nothing is read out of bounds before its sequence is ended."""
    tables = torch.zeros(1, 2, 4, dtype=torch.int32)
    placed = TorchKernels().compute_slot_mapping(
        ints([-1]), ints([0]), ints([0, 1]), ints([3]), torch.tensor([-1, 0]), tables, 4, 1
    )
    assert placed.input_ids.tolist() == [0]
