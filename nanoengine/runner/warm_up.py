"""The largest steps that a scheduler may ask for: run once before the KV pool is sized, they show the memory it must leave."""

from __future__ import annotations

import numpy as np

from nanoengine.engine.messages import Chunk, Decodes, Drafted, RowSampling, Started, StepPlan
from nanoengine.runner.step_timing import MOST_NEW, SIZES
from nanoengine.sampling_params import SamplingParams


def largest_plans(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_len: int,
    block_size: int,
    num_groups: int = 1,
    *,
    draft: int | None = None,
) -> list[StepPlan]:
    """Prefills of the whole token budget, by few long prompts and by as many as may run, and a decode of as many; with a `draft`,
    also a step that verifies it in as many places as are ever worth it.

    Rows are sampled the costly way: with filters, with penalties, which keep counts of tokens, and with log probabilities, which
    then take another copy of the logits; those of the prompt take some however few sequences may run. All sequences share one
    block table, in all groups: what they write does not matter.
    """
    seq_len = min(max_num_batched_tokens, max_len)
    tables = (list(range(1, -(-seq_len // block_size) + 1)),) * num_groups
    count = min(max_num_seqs, max_num_batched_tokens)
    most = min(max_num_batched_tokens, count * seq_len)
    long = [min(seq_len, most - start) for start in range(0, most, seq_len)]
    short = [most // count + (i < most % count) for i in range(count)]
    rows = np.arange(count, dtype=np.int32)
    decodes = Decodes(rows, np.full(count, seq_len - 1, np.int32))
    length = min(MOST_NEW, seq_len, max_num_batched_tokens)
    verifying = range(max(1, min(count, SIZES[-1] // length, max_num_batched_tokens // length)))
    drafted = [Drafted(row, seq_len - length, ((draft or 0),) * (length - 1)) for row in verifying]
    plans = [
        StepPlan(started=_started(long, tables), chunks=[Chunk(i, 0, length, (i,)) for i, length in enumerate(long)]),
        StepPlan(started=_started(short, tables), chunks=[Chunk(i, 0, length, (i,)) for i, length in enumerate(short)]),
        StepPlan(started=_started([seq_len] * count, tables), decodes=decodes),
        StepPlan(started=_started([seq_len - length + 1] * len(drafted), tables), drafted=drafted),
    ]
    return plans if draft is not None else plans[:-1]


def _started(lengths: list[int], tables: tuple[list[int], ...]) -> list[Started]:
    params = SamplingParams(top_k=10, top_p=0.9, frequency_penalty=1.0, logprobs=1)
    return [
        Started(row, [0] * length, tables, RowSampling(params, row, num_prompt_tokens=length, prompt_logprobs=1))
        for row, length in enumerate(lengths)
    ]
