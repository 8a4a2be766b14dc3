"""Sampling around the choice of tokens: bans, log probabilities, and what is said where no token can be chosen.

How tokens are chosen is tested with the kernels, in tests/kernels/test_sampling.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.engine.messages import UNKNOWN, Phase, SampledBatch, SamplingRow, ScheduledBatch
from nanoengine.engine.randomness import sequence_seed
from nanoengine.errors import NotFiniteLogits
from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.runner.rows import Rows
from nanoengine.runner.sampler import Sampler, is_plain, read_samples
from tests.runner.fake_stream import FakeStream

KERNELS = TorchKernels()


def row(*, seed: int = 1, banned: tuple[int, ...] = (), **params: object) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), sequence_seed(seed, 0), banned)  # type: ignore[arg-type]


def run(logits: Tensor, rows: list[SamplingRow]) -> SampledBatch:
    """Sample every row; the rows of the device are in the opposite order."""
    stream, count = FakeStream(), len(rows)
    into = list(range(count))[::-1]
    device = Rows(count, 1, stream)
    device.apply(device.find_changes(ScheduledBatch(Phase.DECODE, sampled_into=into, sampling=rows)))
    tokens, logprobs = Sampler(KERNELS, stream).sample(
        logits.clone(),
        device.sampling,
        torch.tensor(into, dtype=torch.int32),
        torch.full((count,), 7, dtype=torch.int32),
        rows,
    )
    assert tokens.shape == (count,)
    assert tokens.dtype == torch.int64
    return read_samples(tokens, logprobs, rows)


def sample(logits: Tensor, rows: list[SamplingRow]) -> list[int]:
    sampled = run(logits, rows)
    assert sampled.error is None
    return sampled.token_ids


def random_logits(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


# ---- rows and the table


def test_each_row_is_sampled_as_its_entry_of_the_table_says() -> None:
    logits = random_logits(1, 40, 50)
    rows = [row(seed=i, temperature=0 if i % 3 == 0 else 50.0, top_k=i % 4) for i in range(40)]
    tokens = sample(logits, rows)
    best = logits.argmax(-1).tolist()
    assert tokens[::3] == best[::3]
    assert tokens != best  # the others do draw
    assert tokens == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(40)]


def test_without_a_rest_the_table_alone_says_it() -> None:
    """As in a recorded step, which knows no SamplingRow."""
    logits, stream = random_logits(2, 5, 50), FakeStream()
    rows = [row(seed=i, temperature=2.0 * (i % 2)) for i in range(5)]
    device = Rows(5, 1, stream)
    device.apply(device.find_changes(ScheduledBatch(Phase.DECODE, sampled_into=list(range(5)), sampling=rows)))
    into, positions = torch.arange(5, dtype=torch.int32), torch.full((5,), 7, dtype=torch.int32)
    tokens, logprobs = Sampler(KERNELS, stream).sample(logits.clone(), device.sampling, into, positions, [])
    assert logprobs is None
    assert tokens.tolist() == sample(logits, rows)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], True),
        ([row(), row(temperature=0), row(top_k=3, top_p=0.5, min_p=0.1)], True),
        ([row(), row(banned=(3,))], False),
        ([row(logprobs=0), row()], False),
        ([row(logprobs=2)], False),
    ],
)
def test_plain_is_where_nothing_but_tokens_is_wanted(rows: list[SamplingRow], expected: bool) -> None:
    assert is_plain(rows) == expected


# ---- bans


def test_banned_tokens_are_never_sampled() -> None:
    logits = random_logits(8, 12).expand(2000, -1)
    best = int(logits[0].argmax())
    banned = (best, 3, 5)
    settings = ({"temperature": 0}, {"temperature": 20.0}, {"temperature": 20.0, "top_k": 4, "top_p": 0.9})
    rows = [row(seed=i, banned=banned, **settings[i % 3]) for i in range(2000)]  # type: ignore[arg-type]
    drawn = set(sample(logits, rows))
    assert not drawn & set(banned)
    assert drawn


def test_a_ban_binds_its_own_row_only() -> None:
    logits = random_logits(9, 12).expand(2, -1)
    best = int(logits[0].argmax())
    tokens = sample(logits, [row(temperature=0, banned=(best,)), row(temperature=0)])
    assert tokens[0] != best
    assert tokens[1] == best


def test_rows_may_ban_different_tokens() -> None:
    logits = torch.arange(6.0).expand(4, -1)
    banned = [(5,), (), (5, 4), (4, 5, 3, 0)]
    assert sample(logits, [row(temperature=0, banned=tokens) for tokens in banned]) == [4, 5, 3, 2]


def test_top_k_counts_the_tokens_that_are_not_banned() -> None:
    logits = random_logits(10, 1, 12)
    second = int(logits[0].argsort(descending=True)[1])
    best = int(logits.argmax())
    assert {sample(logits, [row(seed=s, temperature=9.0, top_k=1, banned=(best,))])[0] for s in range(20)} == {second}


# ---- what no token can be chosen from


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_and_infinity_are_an_error_of_their_rows(value: float, temperature: float) -> None:
    logits = random_logits(12, 3, 10)
    rows = [row(seed=i, temperature=temperature) for i in range(3)]
    expected = sample(logits, rows)
    logits[1, 4] = value
    sampled = run(logits, rows)
    assert isinstance(sampled.error, NotFiniteLogits)
    assert "1 of 3 rows" in str(sampled.error)
    assert sampled.token_ids == [expected[0], UNKNOWN, expected[2]]


def test_a_row_of_minus_infinity_is_an_error() -> None:
    logits = random_logits(13, 2, 10)
    logits[0] = -torch.inf
    sampled = run(logits, [row(temperature=0), row(temperature=0)])
    assert isinstance(sampled.error, NotFiniteLogits)
    assert sampled.token_ids == [UNKNOWN, int(logits[1].argmax())]


def test_a_row_whose_tokens_are_all_banned_is_an_error() -> None:
    sampled = run(random_logits(14, 2, 3), [row(banned=(0, 1, 2)), row()])
    assert isinstance(sampled.error, NotFiniteLogits)
    assert sampled.token_ids[0] == UNKNOWN


def test_single_tokens_of_minus_infinity_are_never_drawn() -> None:
    logits = torch.zeros(500, 4)
    logits[:, 2] = -torch.inf
    assert set(sample(logits, [row(seed=i, top_p=0.99) for i in range(500)])) == {0, 1, 3}


def test_log_probabilities_of_rows_beside_a_broken_one_are_right() -> None:
    logits = random_logits(15, 3, 10)
    rows = [row(seed=i, logprobs=3) for i in range(3)]
    expected = run(logits, rows)
    logits[1] = torch.nan
    sampled = run(logits, rows)
    assert isinstance(sampled.error, NotFiniteLogits)
    assert sampled.logprobs is not None
    assert expected.logprobs is not None
    assert sampled.logprobs[::2] == expected.logprobs[::2]


# ---- log probabilities


def entries_of(logits: Tensor, one: SamplingRow) -> dict[int, tuple[float, int | None]]:
    """{token: (log probability, rank)} of a single row."""
    result = run(logits, [one])
    assert result.logprobs is not None
    assert result.logprobs[0] is not None
    return {token: (entry.logprob, entry.rank) for token, entry in result.logprobs[0].items()}


def test_logprobs_are_the_models_own_before_temperature_filters_and_bans() -> None:
    logits = random_logits(14, 1, 30)
    expected = logits[0].double().log_softmax(-1)
    entries = entries_of(logits, row(banned=(int(logits.argmax()),), logprobs=5, temperature=3.0, top_k=2))
    assert set(expected.topk(5).indices.tolist()) <= entries.keys()  # the banned one too
    for token, (logprob, _) in entries.items():
        assert logprob == pytest.approx(expected[token].item(), abs=1e-5)


def test_logprobs_of_the_whole_vocabulary_sum_to_one_and_are_ranked() -> None:
    logits = random_logits(15, 1, 30)
    entries = entries_of(logits, row(logprobs=30))
    assert entries.keys() == set(range(30))
    assert math.fsum(math.exp(logprob) for logprob, _ in entries.values()) == pytest.approx(1.0, abs=1e-5)
    order = logits[0].argsort(descending=True).tolist()
    assert [entries[token][1] for token in order] == list(range(1, 31))


def test_top_logprobs_are_the_likeliest_and_the_chosen_one() -> None:
    logits = random_logits(16, 60, 30)
    result = run(logits, [row(seed=i, temperature=9.0, logprobs=3) for i in range(60)])
    assert result.logprobs is not None
    for values, token, entries in zip(logits, result.token_ids, result.logprobs, strict=True):
        assert entries is not None
        assert entries.keys() == {*values.topk(3).indices.tolist(), token}
        assert entries[token].rank == 1 + sum(other > values[token] for other in values)
    assert any(len(entries or ()) == 4 for entries in result.logprobs)  # chosen outside of the top


def test_every_row_gets_as_many_as_it_asks_for() -> None:
    logits, asked = random_logits(17, 6, 30), [None, 0, 4, None, 1, 30]
    rows = [row(temperature=0, logprobs=count) for count in asked]
    result = run(logits, rows)
    assert result.logprobs is not None
    for values, count, entries in zip(logits, asked, result.logprobs, strict=True):
        if count is None:
            assert entries is None
            continue
        assert entries is not None
        assert list(entries) == values.topk(max(count, 1)).indices.tolist()  # a greedy choice is the first of the top
        expected = values.log_softmax(-1)
        assert [entry.logprob for entry in entries.values()] == pytest.approx(expected[list(entries)].tolist())
        assert [entry.rank for entry in entries.values()] == list(range(1, len(entries) + 1))


def test_logprobs_0_reports_the_chosen_token_alone() -> None:
    logits = random_logits(17, 1, 30)
    result = run(logits, [row(logprobs=0)])
    assert list(entries_of(logits, row(logprobs=0))) == result.token_ids


def test_rows_that_ask_for_no_logprobs_get_none() -> None:
    result = run(random_logits(18, 3, 30), [row(), row(logprobs=2), row()])
    assert result.logprobs is not None
    assert [entries is None for entries in result.logprobs] == [True, False, True]
    assert run(random_logits(18, 3, 30), [row(), row(), row()]).logprobs is None


def test_asking_for_logprobs_changes_no_draw() -> None:
    logits = random_logits(19, 50, 30)
    plain = sample(logits, [row(seed=i, temperature=2.0) for i in range(50)])
    assert sample(logits, [row(seed=i, temperature=2.0, logprobs=2) for i in range(50)]) == plain


def test_more_logprobs_than_tokens_gives_all_of_them() -> None:
    assert len(entries_of(random_logits(20, 1, 5), row(logprobs=100))) == 5


# ---- reading what was sampled


def test_tokens_of_padding_are_not_read() -> None:
    """A recorded step samples for nobody too, and from what nobody wrote."""
    sampled = read_samples(torch.tensor([5, 8, -1, 3]), None, [row(), row()])
    assert sampled == SampledBatch([5, 8])


def test_broken_rows_are_counted() -> None:
    sampled = read_samples(torch.tensor([5, -1, 4, -1]), None, [row()] * 4)
    assert sampled.token_ids == [5, UNKNOWN, 4, UNKNOWN]
    with pytest.raises(NotFiniteLogits, match="2 of 4 rows"):
        raise sampled.error or AssertionError
