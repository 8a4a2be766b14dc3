"""The kernels in plain torch: what no layer shows."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.core.kernels import CoreKernels, DenseWeight
from nanoengine.core.sampling import SamplingTable

KERNELS = CoreKernels()


def weight_of(rows: Tensor) -> DenseWeight:
    weight = KERNELS.new_weight(*rows.shape, rows.dtype, rows.device)
    assert isinstance(weight, DenseWeight)
    for row, values in enumerate(rows):
        weight.rows(row, 1).copy_(values[None])
    return weight


def test_rows_of_a_weight_and_logits() -> None:
    """All else that is of a weight or of norms is shown by the layers."""
    x, rows = torch.randn(4, 6), torch.randn(8, 6)
    weight = weight_of(rows)
    torch.testing.assert_close(KERNELS.logits(x, weight).double(), x.double() @ rows.double().T, rtol=1e-5, atol=1e-5)
    assert torch.equal(KERNELS.embed(torch.tensor([4, 0]), weight), rows[[4, 0]])


def test_logits_are_float32_and_other_results_have_the_dtype_of_their_input() -> None:
    x, weight, norm = torch.randn(3, 8).bfloat16(), weight_of(torch.randn(4, 8).bfloat16()), torch.rand(8)
    assert KERNELS.logits(x, weight).dtype is torch.float32
    for result in (KERNELS.linear(x, weight, None), KERNELS.rms_norm(x, norm, 1e-6)):
        assert result.dtype is torch.bfloat16


def test_the_slots_of_a_step() -> None:
    """A decode whose token the device knows, a chunk across the border of a block, and a row of padding."""
    ints = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    tables = ints(*[7, 3, 5], *[2, 9, 4], *[0, 0, 0]).view(1, 3, 3)
    last_tokens = torch.tensor([50, 60, -1])
    placed = KERNELS.compute_slot_mapping(
        ints(-1, 11, 12, 13, -1), ints(1, 0, 2), ints(0, 1, 4, 5), ints(8, 3, 0), last_tokens, tables, 4, 3
    )
    assert placed.input_ids.tolist() == [60, 11, 12, 13, 0]
    assert placed.positions.tolist() == [8, 3, 4, 5, 0]
    assert placed.slot_mapping.tolist() == [[16, 31, 12, 13, -1]]
    assert placed.seq_lens.tolist() == [9, 6, 0]


def test_draws_follow_the_distribution_that_the_filters_leave() -> None:
    chances = torch.tensor([0.4, 0.3, 0.2, 0.1])
    count = 8000
    ones = torch.ones(count)
    table = SamplingTable(
        temperature=ones * 2,
        top_k=torch.full((count,), 3, dtype=torch.int32),
        top_p=ones * 0.7,  # of what top_k leaves: 4/9, 3/9, which reaches it, and 2/9
        min_p=ones * 0.1,
        seeds=torch.arange(count),
    )
    rows = torch.arange(count, dtype=torch.int32)
    drawn = KERNELS.choose_tokens(2 * chances.log().expand(count, -1), table, rows, torch.full((count,), 5))
    counts = torch.bincount(drawn, minlength=4) / count
    torch.testing.assert_close(counts, torch.tensor([4 / 7, 3 / 7, 0.0, 0.0]), rtol=0, atol=0.02)
