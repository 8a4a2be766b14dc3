"""How long steps of a few tokens take: from that follows how many drafts are worth verifying."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from nanoengine.core.messages import UNKNOWN, RowSampling, Run, Started, StepPlan
from nanoengine.core.sampling_params import SamplingParams

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Tokens of the steps that are measured."""

MAX_NEW = 16
"""Tokens of a run: as many sequences share a step as that takes."""

HISTORY = 48
"""Tokens before them, which attention reads."""

REPEATS = 5
"""Steps of each size, of which the fastest counts: whatever else the machine does makes them slower. One before them warms up."""

Execute = Callable[[StepPlan], object]
"""Carries a plan out, and waits for its end."""


class StepTiming(NamedTuple):
    """What was measured."""

    seconds: tuple[tuple[int, float], ...]  # (tokens, seconds) of steps that verify drafts
    guess_share: float  # what a guess of the draft model takes of the time of a step with one token


def time_steps(
    execute: Execute,
    *,
    num_rows: int,
    max_tokens: int,
    max_len: int,
    num_blocks: int,
    block_size: int,
    num_groups: int,
    guesses: bool = False,
) -> StepTiming:
    """Time small steps, as far as so many sequences of this length go, and so many tokens a step.

    Args:
        execute: the plans write to the first blocks of the pool, which nobody uses yet.
        num_blocks: of the pool; with windows it may be smaller than the longest sequence, whose blocks then come again.
        guesses: whether there is a draft model, which guesses drafts that a plan leaves open.
    """
    most_new = min(MAX_NEW, max_len, max_tokens)
    before = min(HISTORY, max_len - most_new)
    table = [1 + i % num_blocks for i in range(-(-(before + most_new) // block_size))]
    measured = []
    for size in SIZES:
        lengths = [min(most_new, size - first) for first in range(0, size, most_new)]
        if len(lengths) > num_rows or size > max_tokens:
            break
        started = [_started(row, before + 1, [table] * num_groups) for row in range(len(lengths))]
        step = _step(lengths, before, 0)
        execute(StepPlan(started=started, **step))
        measured.append((size, _seconds(execute, step)))
    guess_share = 0.0
    if guesses and most_new > 1:
        said, unsaid = (_seconds(execute, _step([most_new], before, draft)) for draft in (0, UNKNOWN))
        guess_share = max(unsaid - said, 0.0) / (most_new - 1) / measured[0][1]
    execute(StepPlan(ended=list(range(num_rows))))
    return StepTiming(tuple(measured), guess_share)


def _started(row: int, length: int, tables: list[list[int]]) -> Started:
    return Started(row, [0] * length, tables, RowSampling(SamplingParams(temperature=0), row, num_prompt_tokens=length))


def _step(lengths: list[int], before: int, draft: int) -> dict[str, Any]:
    """The fields of a plan with a run of each length, all behind so many tokens."""
    singles = [row for row, length in enumerate(lengths) if length == 1]
    runs = [Run(row, before, length, True, (draft,) * (length - 1)) for row, length in enumerate(lengths) if length > 1]
    starts = np.full(len(singles), before, np.int32)
    return {"decode_rows": np.array(singles, np.int32), "decode_starts": starts, "runs": runs}


def _seconds(execute: Execute, step: dict[str, Any]) -> float:
    times = []
    for _ in range(REPEATS):
        start = perf_counter()
        execute(StepPlan(**step))
        times.append(perf_counter() - start)
    return min(times)
