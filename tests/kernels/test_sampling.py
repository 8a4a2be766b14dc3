"""Choosing tokens: greedy, temperature, filters and draws, of every row by its own settings, found in a table."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from nanoengine.core.messages import NONE_LEFT, UNKNOWN
from nanoengine.core.randomness import GOLDEN_GAMMA, MASK, sequence_seed
from nanoengine.core.sampling import SamplingTable, draw_tokens
from nanoengine.kernels import torch_kernels
from nanoengine.kernels.filters import keep_likeliest
from nanoengine.kernels.native_kernels import NativeKernels
from tests.kernels.draws import Draw, DrawingBy, every_draw, key_with_bits, keys_of, random_keys, unmix
from tests.kernels.marks import needs_kernels

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
FILTERS = {"top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}


def how(**settings: float) -> dict[str, float]:
    """How a row is sampled."""
    return OFF | settings


def columns(rows: list[dict[str, float]]) -> dict[str, Tensor]:
    """The table of these rows, but for the seeds."""
    dtypes = {"temperature": torch.float32} | FILTERS
    return {name: torch.tensor([row[name] for row in rows], dtype=dtype) for name, dtype in dtypes.items()}


def choose(
    logits: Tensor,
    rows: list[dict[str, float]],
    positions: list[int] | None = None,
    draw: Draw = draw_tokens,
    completion: int = 0,
) -> Tensor:
    """A token for each row of logits. Its settings stand anywhere in the table, between those of others."""
    count = len(rows)
    places = random.Random(count).sample(range(count + 3), count)
    table = [how(temperature=7.0, top_k=1, seed=99)] * (count + 3)
    for place, row in zip(places, rows, strict=True):
        table[place] = row
    seeds = keys_of([sequence_seed(int(row["seed"]), completion) for row in table])
    before = logits.clone()
    tokens = DrawingBy(draw).choose_tokens(
        logits,
        SamplingTable(**columns(table), seeds=seeds),
        rows=torch.tensor(places, dtype=torch.int32),
        positions=torch.tensor(positions or [7] * count),
    )
    assert tokens.dtype == torch.int64
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)  # they are not overwritten
    return tokens


def sample(logits: Tensor, rows: list[dict[str, float]], positions: list[int] | None = None) -> list[int]:
    return choose(logits, rows, positions).tolist()


def random_logits(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def survivors_of(logits: Tensor, rows: list[dict[str, float]]) -> list[set[int]]:
    filters = columns(rows)
    values, token_ids = keep_likeliest(logits.clone(), *(filters[name] for name in FILTERS), torch_kernels.log_sum_exp)
    finite = values.isfinite()
    assert torch.equal(values[finite], logits.gather(-1, token_ids)[finite])  # what stays keeps its logit
    return [set(ids[mask].tolist()) for ids, mask in zip(token_ids, finite, strict=True)]


# ---- the likeliest token


@every_draw
@pytest.mark.parametrize("vocab_size", [100, 40_000])
def test_of_equal_ones_the_lowest_id_is_the_likeliest(draw: Draw, vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    logits = torch.zeros(100, vocab_size)
    places = [sorted(rng.sample(range(vocab_size), 3)) for _ in range(100)]
    for row, of_row in zip(logits, places, strict=True):
        row[of_row] = 5.0
    assert draw(logits, random_keys(100), torch.zeros(100)).tolist() == [first for first, *_ in places]


@every_draw
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [100, 40_000])
def test_a_logit_that_is_not_finite_is_found_wherever_it_is(draw: Draw, vocab_size: int, temperature: float) -> None:
    rows = 30
    logits, expected = random_logits(1, rows, vocab_size), [UNKNOWN] * rows
    for row in range(rows):
        logits[row, row * (vocab_size - 1) // (rows - 1)] = torch.nan if row % 2 else torch.inf
    logits[-1], expected[-1] = -torch.inf, NONE_LEFT
    assert draw(logits, random_keys(rows), torch.full((rows,), temperature)).tolist() == expected


# ---- greedy


def test_greedy_rows_are_argmax_inside_a_mixed_batch() -> None:
    logits = random_logits(1, 40, 50)
    rows = [how(seed=i, temperature=0 if i % 3 == 0 else 50.0, top_k=i % 4) for i in range(40)]
    tokens = sample(logits, rows)
    best = logits.argmax(-1).tolist()
    assert tokens[::3] == best[::3]
    assert tokens != best  # the others do draw


@every_draw
@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e-50])
def test_a_tiny_temperature_takes_the_likeliest_token_and_does_not_overflow(draw: Draw, temperature: float) -> None:
    logits = random_logits(4, 50, 30) * 10
    rows = [how(seed=i, temperature=temperature, top_k=5 * (i % 2)) for i in range(50)]
    assert choose(logits, rows, draw=draw).tolist() == logits.argmax(-1).tolist()


# ---- filters, against a slow reference


def reference_filter(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Temperature, then top_k, then top_p of what is left, then min_p; in plain Python."""
    scaled = [value / temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    if top_k > 0:
        order = order[:top_k]
    highest = scaled[order[0]]
    weights = [math.exp(scaled[token] - highest) for token in order]
    total = math.fsum(weights)
    survivors, reached = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if reached >= top_p and top_p < 1:
            break
        reached += weight / total
        if weight >= min_p:  # the likeliest has weight 1
            survivors.append(token)
    return set(survivors)


def random_filters(rng: random.Random, vocab_size: int) -> dict[str, float]:
    """Some filters on, some off. The values are odd ones, so that no probability lies on a limit."""
    return {
        "top_k": rng.choice([0, -1, rng.randint(1, vocab_size + 3)]),
        "top_p": rng.choice([1.0, rng.uniform(0.01, 0.999)]),
        "min_p": rng.choice([0.0, rng.uniform(0.001, 0.9)]),
    }


def test_filters_agree_with_the_slow_reference_in_random_batches() -> None:
    rng = random.Random(0)
    for case in range(150):
        vocab_size = rng.choice([2, 3, 17, 64])
        count = rng.randint(1, 6)
        logits = random_logits(case, count, vocab_size)
        filters = [random_filters(rng, vocab_size) for _ in range(count)]
        found = survivors_of(logits, [how(**f) for f in filters])
        for i, (one, survivors) in enumerate(zip(filters, found, strict=True)):
            assert survivors == reference_filter(logits[i].tolist(), 1.0, **one), (case, i, one)  # type: ignore[arg-type]


def test_sampling_draws_exactly_the_tokens_that_the_reference_keeps() -> None:
    """Temperature and filters together: nothing else is drawn, and all of it is."""
    rng = random.Random(1)
    for case in range(15):
        logits = random_logits(100 + case, 8) / 2
        filters = random_filters(rng, 8)
        temperature = rng.uniform(0.5, 3.0)
        rows = [how(seed=i, temperature=temperature, **filters) for i in range(3000)]
        drawn = set(sample(logits.expand(3000, -1), rows))
        survivors = reference_filter(logits.tolist(), temperature, **filters)  # type: ignore[arg-type]
        assert drawn <= survivors
        chances = (logits / temperature).softmax(-1)
        assert {token for token in survivors if chances[token] > 0.01} <= drawn


def test_filters_that_are_off_change_no_draw() -> None:
    logits = random_logits(6, 300, 40)
    plain = [how(seed=i) for i in range(300)]
    off = [how(seed=i, top_k=40, top_p=1.0, min_p=0.0) for i in range(300)]
    assert sample(logits, plain) == sample(logits, off)
    assert sample(logits, plain) == sample(logits, [how(seed=i, top_k=-1) for i in range(300)])


# ---- randomness


def chi_square(tokens: list[int], probabilities: list[float]) -> float:
    counts = [tokens.count(token) for token in range(len(probabilities))]
    expected = [p * len(tokens) for p in probabilities]
    return sum((count - e) ** 2 / e for count, e in zip(counts, expected, strict=True) if e)


@every_draw
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_frequencies_are_those_of_the_softmax(vary: str, draw: Draw) -> None:
    probabilities = [0.02, 0.08, 0.1, 0.2, 0.25, 0.35]
    count = 20_000
    logits = torch.tensor(probabilities).log().expand(count, -1)
    rows = [how(seed=i if vary == "seed" else 5) for i in range(count)]
    positions = list(range(count)) if vary == "position" else [3] * count
    tokens = choose(logits, rows, positions, draw).tolist()
    assert chi_square(tokens, probabilities) < 20.5  # 5 degrees of freedom: one in a thousand


@pytest.mark.parametrize("what", ["seed", "position", "completion"])
def test_another_address_gives_another_draw(what: str) -> None:
    logits = torch.zeros(1, 1000)  # equal chances: two draws agree once in a thousand
    tokens = [
        int(
            choose(
                logits,
                [how(seed=i if what == "seed" else 9)],
                [i if what == "position" else 4],
                completion=i if what == "completion" else 0,
            )
        )
        for i in range(100)
    ]
    assert len(set(tokens)) > 85  # 95 expected


def test_both_ways_to_draw_choose_the_same() -> None:
    """A filter that keeps everything takes the other way."""
    logits = random_logits(12, 200, 300)
    plain = sample(logits, [how(seed=i, temperature=1.5) for i in range(200)])
    assert sample(logits, [how(seed=i, temperature=1.5, min_p=1e-30) for i in range(200)]) == plain


@pytest.mark.parametrize("bits", [0, MASK])
def test_the_only_token_left_is_drawn_whatever_the_random_bits(bits: int) -> None:
    position = 7
    seed = unmix(key_with_bits(bits, 3)) - (position + 1) * GOLDEN_GAMMA & MASK
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0, 3.0]])
    one = torch.tensor([0], dtype=torch.int32)
    table = SamplingTable(**columns([how(top_k=1)]), seeds=keys_of([seed]))
    tokens = torch_kernels.TorchKernels().choose_tokens(logits, table, one, torch.tensor([position]))
    assert tokens.tolist() == [3]


# ---- what no token can be chosen from


@every_draw
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("settings", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}], ids=str)
def test_nan_and_infinity_give_no_token_and_leave_their_neighbours_alone(
    draw: Draw, value: float, settings: dict[str, float]
) -> None:
    logits = random_logits(12, 3, 10)
    rows = [how(seed=i, **settings) for i in range(3)]
    expected = choose(logits, rows, draw=draw).tolist()
    logits[1, 4] = value
    expected[1] = UNKNOWN
    assert choose(logits, rows, draw=draw).tolist() == expected


@needs_kernels
def test_every_implementation_for_the_cpu_chooses_the_same() -> None:
    """As the protocol has it."""
    logits, rng = random_logits(14, 60, 500), random.Random(4)
    rows = [how(temperature=rng.choice([0, 0.7, 3.0]), **random_filters(rng, 500)) for _ in range(60)]
    table = SamplingTable(**columns(rows), seeds=keys_of([rng.getrandbits(64) for _ in rows]))
    entries, positions = torch.arange(60, dtype=torch.int32), torch.arange(60)
    chosen = [
        kernels.choose_tokens(logits.clone(), table, entries, positions)
        for kernels in (torch_kernels.TorchKernels(), NativeKernels())
    ]
    assert torch.equal(*chosen)
