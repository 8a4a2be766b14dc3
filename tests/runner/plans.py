"""Plans for a runner, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from nanoengine import SamplingParams
from nanoengine.engine.messages import Chunk, Decodes, RowSampling, Started, StepPlan, StepResult
from nanoengine.outputs import TokenLogprobs
from nanoengine.runner.model_runner import ModelRunner

TABLES = {0: [1, 2], 2: [4, 3], 5: [5, 6]}
"""Rows of some sequences, and their blocks."""


def sampling(
    seed: int = 0,
    prompt: int = 1,
    *,
    stops: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> RowSampling:
    """Greedy, unless `params` say otherwise; `prompt` is how many tokens of the row are its prompt."""
    own = SamplingParams(**{"temperature": 0} | params)
    wanted = own.prompt_logprobs if prompt > 1 else None
    return RowSampling(own, seed, prompt, stop_token_ids=stops, bad_words=bad_words, prompt_logprobs=wanted)


def start(row: int, token_ids: Sequence[int], table: Sequence[int], **params: Any) -> Started:
    """A row whose tokens are all of its prompt; its seed is its number."""
    own = sampling(**{"seed": row, "prompt": len(token_ids)} | params)
    return Started(row, list(token_ids), (list(table),), own)


def prefill(num_tokens: int, *, computed: int = 0, sampled: bool = True, total: int | None = None) -> StepPlan:
    """Some tokens of row 0. The first ones start it, with `total` tokens, or no more than these."""
    count = computed + num_tokens if total is None else total
    fresh = [start(0, range(10, 10 + count), range(1, 2 + count // 16))] if not computed else []
    return StepPlan(started=fresh, chunks=[Chunk(0, computed, num_tokens, (0,) if sampled else ())])


def decodes(*runs: tuple[int, int]) -> Decodes:
    """Of each run its row, and the tokens before it."""
    columns = np.array(runs, dtype=np.int32).reshape(-1, 2)
    return Decodes(columns[:, 0].copy(), columns[:, 1].copy())


def chain(tables: dict[int, list[int]], num_steps: int, **params: Any) -> list[StepPlan]:
    """Decode steps of some rows, from the beginning; of each token but the first only the device knows."""
    plans = [StepPlan(decodes=decodes(*((row, step) for row in tables))) for step in range(num_steps)]
    plans[0].started = [start(row, [50 + row], table, **params) for row, table in tables.items()]
    return plans


def execute(runner: ModelRunner, plan: StepPlan) -> StepResult:
    return runner.launch(plan).result()


def fill_with_nan(runner: ModelRunner) -> ModelRunner:
    """Whoever reads a slot that nobody wrote, will show."""
    assert runner.kv_cache is not None
    runner.kv_cache.fill(torch.nan)
    return runner


def kv_of(runner: ModelRunner) -> torch.Tensor:
    """What K and V of all layers hold now: [2 * num_layers, num_blocks, ...]."""
    assert runner.kv_cache is not None
    return torch.stack([tensor for layer in runner.kv_cache.layers for tensor in layer])


def assert_same(found: StepResult, expected: StepResult, within: float = 1e-5) -> None:
    """Equal but for log probabilities: sums in another order are others in their last bits."""
    assert found.token_ids == expected.token_ids
    assert type(found.error) is type(expected.error)
    assert found.logprobs.keys() == expected.logprobs.keys()
    for number, entries in expected.logprobs.items():
        assert_close(found.logprobs[number], entries, within)
    assert [part[:2] for part in found.prompt_logprobs] == [part[:2] for part in expected.prompt_logprobs]
    for part, other in zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True):
        for entries, others in zip(part.entries, other.entries, strict=True):
            assert_close(entries, others, within)


def assert_close(found: TokenLogprobs, expected: TokenLogprobs, within: float = 1e-5) -> None:
    """The same tokens in the same order, of the same ranks."""
    assert [(token, entry.rank) for token, entry in found.items()] == [
        (token, entry.rank) for token, entry in expected.items()
    ]
    assert [entry.logprob for entry in found.values()] == pytest.approx(
        [entry.logprob for entry in expected.values()], abs=within
    )
