"""Tokens chosen on the device: the filters against a sort in float64, the draws against the kernels in torch."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanoengine import SamplingParams
from nanoengine.engine.randomness import sequence_seed
from nanoengine.kernels.gumbel import gumbel_noise
from nanoengine.kernels.sampling import NONE_LEFT, NOT_FINITE, SamplingTable
from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.kernels.triton import sampling
from nanoengine.kernels.triton.filters import find_thresholds
from nanoengine.kernels.triton.sampling import TILE, choose_tokens, size_of_parts
from tests.kernels.formulas import position_key

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REFERENCE = TorchKernels()
VOCAB_SIZES = [2, 3, 17, 1000, TILE, TILE + 1, 5003, 9001]
GREEDY = {"temperature": 0.0}


def signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


class Rows:
    """How rows are sampled, as `SamplingParams` and as tables on the device, where their entries are shuffled."""

    def __init__(self, params: Sequence[dict[str, float]], seed: int = 0):
        rng = random.Random(seed)
        self.params = [SamplingParams(**p) for p in params]  # type: ignore[arg-type]
        self.seeds = [sequence_seed(seed, i) for i in range(len(params))]
        self.positions = [rng.randint(0, 40_000) for _ in params]
        self.entries = rng.sample(range(len(params) + 3), len(params))

    def table(self) -> SamplingTable:
        return SamplingTable(
            self._table([p.temperature for p in self.params], torch.float32),
            self._table([p.top_k for p in self.params], torch.int32),
            self._table([p.top_p for p in self.params], torch.float32),
            self._table([p.min_p for p in self.params], torch.float32),
            self._table([signed(seed) for seed in self.seeds], torch.int64),
        )

    def choose(self, logits: Tensor) -> list[int]:
        return choose_tokens(logits, *self._arguments()).tolist()

    def expected(self, logits: Tensor) -> list[int]:
        """What the kernels in torch choose."""
        return REFERENCE.choose_tokens(logits.clone(), *self._arguments()).tolist()

    def kept(self, logits: Tensor) -> Tensor:
        """Whether the thresholds keep each token."""
        lowest, last_ids = find_thresholds(logits, self.table(), self._rows())
        ids = torch.arange(logits.shape[1], device=DEVICE)
        return (logits > lowest[:, None]) | ((logits == lowest[:, None]) & (ids <= last_ids[:, None]))

    def _arguments(self) -> tuple[SamplingTable, Tensor, Tensor]:
        return self.table(), self._rows(), torch.tensor(self.positions, dtype=torch.int64, device=DEVICE)

    def _rows(self) -> Tensor:
        return torch.tensor(self.entries, dtype=torch.int32, device=DEVICE)

    def _table(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        table = torch.full((len(values) + 3,), 99, dtype=dtype)
        table[self.entries] = torch.tensor(values, dtype=dtype)
        return table.to(DEVICE)


def random_logits(kind: str, n: int, vocab_size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, vocab_size, generator=generator)
    if kind == "flat":
        logits = torch.full_like(logits, 1.25)
    elif kind == "ties":
        logits = (logits * 2).round()
    elif kind == "peaked":
        logits[:, seed % vocab_size] += 30
    elif kind == "wide":
        logits = logits.sign() * (logits * 20).clamp(max=80).exp()  # a row whose highest logit is infinite keeps all
    elif kind == "banned":
        logits[torch.rand(n, vocab_size, generator=generator) < 0.5] = -torch.inf
        logits[:, seed % vocab_size] = 0.5
    return logits.to(DEVICE)


def random_params(rng: random.Random, vocab_size: int) -> dict[str, float]:
    return {
        "temperature": rng.choice([0.0, 1.0, rng.uniform(0.01, 5.0), 1e-20]),
        "top_k": rng.choice([0, -1, 1, 2, 20, rng.randint(1, vocab_size), vocab_size, vocab_size + 3]),
        "top_p": rng.choice([1.0, 1e-6, rng.uniform(0.01, 0.999), 0.999_99]),
        "min_p": rng.choice([0.0, 0.0, rng.uniform(0.001, 0.9), 1.0]),
    }


KINDS = ["random", "flat", "ties", "peaked", "wide", "banned"]


def kept_exactly(row: Tensor, params: SamplingParams) -> tuple[set[int], set[int]]:
    """Tokens that are kept, by a sort in float64; and tokens that are so close to a limit that rounding decides."""
    x = row.double().cpu()
    order = sorted(range(len(x)), key=lambda token: (-float(x[token]), token))
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = ((x[order] - x[order[0]]) / max(params.temperature, 1e-5)).exp()
    before = (weights.cumsum(0) - weights) / weights.sum()
    kept = weights >= params.min_p
    close = (weights - params.min_p).abs() <= 1e-4 * params.min_p
    if params.top_p < 1:
        kept &= before < params.top_p
        close |= (before - params.top_p).abs() <= 1e-5
    kept[0] = True
    return {t for t, k in zip(order, kept, strict=True) if k}, {t for t, c in zip(order, close, strict=True) if c}


# ---- filters


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    n=st.integers(1, 4),
    vocab_size=st.sampled_from(VOCAB_SIZES),
    seed=st.integers(0, 10_000),
)
@example(kind="banned", n=3, vocab_size=17, seed=7391)  # top_k above the number of tokens that are not banned
def test_what_is_kept_is_what_a_sort_keeps(kind: str, n: int, vocab_size: int, seed: int) -> None:
    rng, logits = random.Random(seed), random_logits(kind, n, vocab_size, seed)
    rows = Rows([random_params(rng, vocab_size) for _ in range(n)], seed)
    for row, params, mask in zip(logits, rows.params, rows.kept(logits), strict=True):
        found = set(mask.nonzero()[:, 0].tolist())
        if params.temperature == 0:
            assert len(found) == vocab_size  # nothing to look for
            continue
        exact, close = kept_exactly(row, params)
        finite = set(row.isfinite().nonzero()[:, 0].tolist())
        assert (found ^ exact) & finite <= close, (kind, params)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [1, 2, 700, 4999, 5002])
def test_top_k_keeps_exactly_k(kind: str, top_k: int) -> None:
    logits = random_logits(kind, 1, 5003, top_k)
    mask = Rows([{"top_k": top_k}]).kept(logits)[0]
    order = logits[0].sort(descending=True, stable=True).indices[:top_k]
    finite = logits[0].isfinite()
    assert set(mask.logical_and(finite).nonzero()[:, 0].tolist()) == {t for t in order.tolist() if finite[t]}


@pytest.mark.parametrize(("top_p", "expected"), [(1e-6, 1), (0.0499, 50), (0.4999, 500), (0.9999, 1000), (1.0, 1000)])
def test_top_p_of_equal_logits_keeps_the_first(top_p: float, expected: int) -> None:
    mask = Rows([{"top_p": top_p}]).kept(torch.zeros(1, 1000, device=DEVICE))[0]
    assert int(mask.sum()) == expected
    assert mask[:expected].all()


def test_values_of_all_sizes_end_the_search() -> None:
    logits = torch.tensor([[3e38, 1e38, 1.0, 1e-45, 0.0, -0.0, -1e-45, -1e-30, -1.0, -3e38, -torch.inf]], device=DEVICE)
    for top_k in range(1, 12):
        mask = Rows([{"top_k": top_k}]).kept(logits)[0]
        assert int(mask[:10].sum()) == min(top_k, 10), top_k
        assert mask[: min(top_k, 10)].all()


def test_a_last_token_that_many_share() -> None:
    logits = torch.zeros(3, 9001, device=DEVICE)
    logits[:, 7000:] = 1.0
    found = Rows([{"top_k": k} for k in (2, 1500, 2500)]).kept(logits)
    assert found.sum(-1).tolist() == [2, 1500, 2500]
    assert found[0, 7000:7002].all()
    assert found[1, 7000:8500].all()
    assert found[2, 7000:].all()
    assert found[2, :499].all()


def test_min_p_may_end_above_a_limit_that_many_share() -> None:
    logits = torch.zeros(1, 40, device=DEVICE)
    logits[0, [5, 9]] = 1.0
    mask = Rows([{"top_k": 3, "min_p": 1.0}]).kept(logits)[0]
    assert mask.nonzero()[:, 0].tolist() == [5, 9]


# ---- draws


@triton.jit
def _noise_kernel(out, key, first, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offset = tl.arange(0, BLOCK)
    key_bits = tl.load(key).to(tl.uint64)
    tl.store(out + offset, sampling._gumbel_noise(key_bits, first + offset))


@pytest.mark.parametrize("key", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0x123456789ABCDEF0])
def test_the_noise_is_that_of_the_reference(key: int) -> None:
    block, count = 1 << 14, 1 << 18
    keys = torch.tensor([signed(key)], device=DEVICE)
    out = torch.empty(count, device=DEVICE)
    for first in range(0, count, block):
        _noise_kernel[(1,)](out[first:], keys, first, BLOCK=block)
    expected = gumbel_noise(keys.cpu(), torch.arange(count)[None])[0]
    torch.testing.assert_close(out.cpu(), expected, rtol=5e-7, atol=5e-7)
    assert expected.max() > 10  # u below 1e-4, where 1 - u is rounded


def test_tokens_are_those_of_the_reference() -> None:
    rng, chosen, different = random.Random(0), 0, []
    for case in range(60):
        vocab_size, n, kind = rng.choice(VOCAB_SIZES), rng.randint(1, 5), rng.choice(KINDS)
        rows = Rows([random_params(rng, vocab_size) for _ in range(n)], case)
        logits = random_logits(kind, n, vocab_size, case)
        for i, (mine, other) in enumerate(zip(rows.choose(logits), rows.expected(logits), strict=True)):
            chosen += 1
            if mine != other:
                different.append((logits[i], rows, i, mine, other))
    for row, rows, i, mine, other in different:
        assert is_close_call(row, rows, i, mine, other), (rows.params[i], mine, other)
    assert len(different) <= 0.03 * chosen


def is_close_call(row: Tensor, rows: Rows, i: int, mine: int, other: int) -> bool:
    """Whether rounding decides between two tokens: at a limit of the filters, or because their scores are equal but for it."""
    params = rows.params[i]
    _, close = kept_exactly(row, params)
    if close & {mine, other}:
        return True
    key = torch.tensor([signed(position_key(rows.seeds[i], rows.positions[i]))])
    tokens = torch.tensor([[mine, other]])
    scores = row.cpu()[tokens[0]] / max(params.temperature, 1e-5) + gumbel_noise(key, tokens)[0]
    return bool((scores[0] - scores[1]).abs() <= 2e-6 * scores.abs().max().clamp(min=1))


def test_greedy_takes_the_lowest_id_of_the_highest() -> None:
    logits = random_logits("ties", 6, 3000, 0)
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert Rows([GREEDY] * 6).choose(logits) == expected
    assert Rows([{"top_k": 1, "temperature": 5.0}] * 6).choose(logits) == expected


def test_draws_follow_the_distribution() -> None:
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], device=DEVICE)
    rows = Rows([{}] * 700)
    counts = torch.bincount(torch.tensor(rows.choose(chances.log().expand(700, 5).contiguous())), minlength=5)
    torch.testing.assert_close(counts / 700, chances.cpu(), rtol=0, atol=0.06)
    assert counts[4] == 0


@pytest.mark.parametrize("params", [GREEDY, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_rows_without_a_finite_highest_logit(params: dict[str, float]) -> None:
    nan, inf = torch.nan, torch.inf
    heads = [[0.0, 0.0], [nan, 0.0], [inf, 0.0], [-inf, 0.0], [nan, inf]]
    logits = torch.full((7, 1030), -1.0, device=DEVICE)
    for i, head in enumerate(heads):
        logits[i, 1026:1028] = torch.tensor(head)
    logits[5], logits[6] = -inf, nan
    chosen = Rows([params] * 7).choose(logits)
    none = [NOT_FINITE, NOT_FINITE, None, NOT_FINITE, NONE_LEFT, NOT_FINITE]
    assert [token if token < 0 else None for token in chosen] == [None, *none]
    assert chosen[3] != 1026


@settings(deadline=None, max_examples=8)
@given(n=st.integers(2, 5), vocab_size=st.sampled_from([17, 5003]), seed=st.integers(0, 1000))
def test_a_row_does_not_depend_on_the_others(n: int, vocab_size: int, seed: int) -> None:
    rng, logits = random.Random(seed), random_logits("random", n, vocab_size, seed)
    rows = Rows([random_params(rng, vocab_size) for _ in range(n)], seed)
    together = rows.choose(logits)
    for i in range(n):
        alone = Rows([{}])
        alone.params, alone.seeds, alone.positions = [rows.params[i]], [rows.seeds[i]], [rows.positions[i]]
        assert alone.choose(logits[i : i + 1]) == together[i : i + 1]


def test_rows_with_gaps() -> None:
    wide = random_logits("random", 3, 2007, 0)
    rows = Rows([{}, {"top_p": 0.9}, GREEDY])
    logits = wide[:, :2000].clone()
    wide[:, 2000:] = torch.nan
    assert rows.choose(wide[:, :2000]) == rows.choose(logits)


def test_no_rows() -> None:
    assert Rows([]).choose(torch.empty(0, 50, device=DEVICE)) == []


@given(n=st.integers(1, 5000), vocab_size=st.integers(1, 200_000), num_sms=st.integers(1, 200))
def test_parts_cover_the_vocabulary(n: int, vocab_size: int, num_sms: int) -> None:
    size = size_of_parts(n, vocab_size, num_sms)
    assert size % TILE == 0
    parts = -(-vocab_size // size)
    assert parts * size >= vocab_size > (parts - 1) * size
    assert n * parts <= sampling.PROGRAMS_PER_SM * num_sms + n
