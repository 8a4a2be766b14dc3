"""The largest steps that a scheduler may ask for: run once before the KV pool is sized, they show the memory it must leave."""

from __future__ import annotations

from nanoengine.engine.messages import Phase, SamplingRow, ScheduledBatch
from nanoengine.sampling_params import SamplingParams


def largest_batches(
    max_num_seqs: int, max_num_batched_tokens: int, max_len: int, block_size: int
) -> list[ScheduledBatch]:
    """Prefills of the whole token budget, by few long prompts and by as many as may run, and a decode of as many.

    Rows are sampled the costly way: with filters, and with log probabilities, which take another copy of the logits. All
    sequences share one block table: what they write does not matter.
    """
    seq_len = min(max_num_batched_tokens, max_len)
    table = list(range(1, -(-seq_len // block_size) + 1))
    count = min(max_num_seqs, max_num_batched_tokens)
    most = min(max_num_batched_tokens, count * seq_len)
    long = [min(seq_len, most - start) for start in range(0, most, seq_len)]
    short = [most // count + (i < most % count) for i in range(count)]
    return [
        _batch(Phase.PREFILL, [0] * len(long), long, table),
        _batch(Phase.PREFILL, [0] * count, short, table),
        _batch(Phase.DECODE, [seq_len - 1] * count, [1] * count, table),
    ]


def _batch(phase: Phase, computed: list[int], new: list[int], table: list[int]) -> ScheduledBatch:
    rows = list(range(len(new)))
    params = SamplingParams(top_k=10, top_p=0.9, logprobs=1)
    return ScheduledBatch(
        phase,
        seq_ids=rows,
        rows=rows,
        token_ids=[0] * sum(new),
        num_computed_tokens=computed,
        num_new_tokens=new,
        block_tables=[table] * len(new),
        sampled_rows=rows,
        sampled_into=rows,
        sampling=[SamplingRow(params, row, ()) for row in rows],
    )
