"""How long steps of a few tokens take: from that follows how many drafts are worth verifying."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nanoengine.core.messages import UNKNOWN, RowSampling, Run, Started, StepPlan
from nanoengine.core.sampling_params import CoreSamplingParams

if TYPE_CHECKING:
    from nanoengine.core.model_runner import ModelRunner
    from nanoengine.core.startup import Startup

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Tokens of the steps that are measured."""

MAX_NEW = 16
"""Tokens of a run: as many sequences share a step as that takes."""

HISTORY = 48
"""Tokens before them, which attention reads."""

REPEATS = 5
"""Steps of each size, of which the fastest counts: whatever else the machine does makes them slower. One before them warms up."""


class StepTiming(NamedTuple):
    """What was measured."""

    seconds: tuple[tuple[int, float], ...]  # (tokens, seconds) of steps that verify drafts
    guess_share: float  # what a guess of the draft model takes of the time of a step with one token


def time_steps(startup: Startup) -> StepTiming:
    """Time small steps, as they will be: recorded, if steps are. They write to the first blocks of the pool, which nobody uses
    yet. With windows it may be smaller than the longest sequence, whose blocks then come again.
    """
    runner, max_tokens = startup.runner, startup.config.max_num_batched_tokens
    most_new = min(MAX_NEW, startup.max_model_len, max_tokens)
    before = min(HISTORY, startup.max_model_len - most_new)
    num_table_blocks = -(-(before + most_new) // startup.block_size)
    tables = [[1 + i % startup.num_blocks for i in range(num_table_blocks)]] * len(startup.layouts)
    measured = []
    for size in SIZES:
        lengths = [min(most_new, size - first) for first in range(0, size, most_new)]
        if len(lengths) > startup.num_rows or size > max_tokens:
            break
        how = RowSampling(CoreSamplingParams(temperature=0), 0, num_prompt_tokens=before + 1)
        started = [Started(row, [0] * (before + 1), tables, how) for row in range(len(lengths))]
        step = _step(lengths, before, 0)
        runner.launch(StepPlan(started=started, **step))()
        measured.append((size, _seconds(runner, step)))
    guess_share = 0.0
    if startup.draft is not None and most_new > 1:
        said, unsaid = (_seconds(runner, _step([most_new], before, draft)) for draft in (0, UNKNOWN))
        guess_share = max(unsaid - said, 0.0) / (most_new - 1) / measured[0][1]
    runner.launch(StepPlan(ended=list(range(startup.num_rows))))()
    return StepTiming(tuple(measured), guess_share)


def _step(lengths: list[int], before: int, draft: int) -> dict[str, Any]:
    """The fields of a plan with a run of each length, all behind so many tokens."""
    singles = [row for row, length in enumerate(lengths) if length == 1]
    runs = [Run(row, before, length, True, (draft,) * (length - 1)) for row, length in enumerate(lengths) if length > 1]
    starts = np.full(len(singles), before, np.int32)
    return {"decode_rows": np.array(singles, np.int32), "decode_starts": starts, "runs": runs}


def _seconds(runner: ModelRunner, step: dict[str, Any]) -> float:
    times = []
    for _ in range(REPEATS):
        start = perf_counter()
        runner.launch(StepPlan(**step))()
        times.append(perf_counter() - start)
    return min(times)
