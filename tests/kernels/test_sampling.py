"""Choosing tokens: greedy, temperature, filters and draws, of every row by its own settings, found in a table."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from nanoengine.core.messages import NONE_LEFT, UNKNOWN
from nanoengine.core.randomness import sequence_seed
from nanoengine.core.sampling import SamplingTable, draw_tokens
from nanoengine.kernels.native.operations import NativeKernels
from nanoengine.kernels.reference import operations as torch_kernels
from tests.kernels.draws import Draw, DrawingBy, every_draw, keys_of, random_keys
from tests.kernels.marks import needs_kernels
from tests.kernels.reference.test_filters import sorted_reference

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


def random_filters(rng: random.Random, vocab_size: int) -> dict[str, float]:
    """Some filters on, some off. The values are odd ones, so that no probability lies on a limit."""
    return {
        "top_k": rng.choice([0, -1, rng.randint(1, vocab_size + 3)]),
        "top_p": rng.choice([1.0, rng.uniform(0.01, 0.999)]),
        "min_p": rng.choice([0.0, rng.uniform(0.001, 0.9)]),
    }


def random_logits(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


# ---- the likeliest token


@every_draw
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [100, 40_000])
def test_of_equal_ones_the_lowest_id_is_the_likeliest(draw: Draw, vocab_size: int, temperature: float) -> None:
    """The noise is lost in logits as large as these."""
    rng = random.Random(vocab_size)
    logits = torch.zeros(100, vocab_size)
    places = [sorted(rng.sample(range(vocab_size), 3)) for _ in range(100)]
    for row, of_row in zip(logits, places, strict=True):
        row[of_row] = 1e30
    assert draw(logits, random_keys(100), torch.full((100,), temperature)).tolist() == [first for first, *_ in places]


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


# ---- filters


def test_exactly_what_the_filters_keep_is_drawn() -> None:
    """Temperature and filters together: nothing else is drawn, and all of it is."""
    rng = random.Random(1)
    for case in range(10):
        logits, temperature = random_logits(100 + case, 8) / 2, rng.uniform(0.5, 3.0)
        filters = random_filters(rng, 8)
        rows = [how(seed=i, temperature=temperature, **filters) for i in range(3000)]
        drawn = set(sample(logits.expand(3000, -1), rows))
        kept = sorted_reference(logits / temperature, **filters)  # type: ignore[arg-type]
        chances = (logits / temperature).softmax(-1)
        assert {token for token in kept if chances[token] > 0.01} <= drawn <= set(kept)


@pytest.mark.parametrize("off", [{"top_k": 300}, {"top_k": -1}, {"min_p": 1e-30}], ids=str)
def test_filters_that_keep_everything_change_no_draw(off: dict[str, float]) -> None:
    logits = random_logits(12, 200, 300)
    plain = sample(logits, [how(seed=i, temperature=1.5) for i in range(200)])
    assert sample(logits, [how(seed=i, temperature=1.5, **off) for i in range(200)]) == plain


# ---- randomness


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
