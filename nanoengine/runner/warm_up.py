"""The largest steps that a scheduler may ask for: run once before the KV pool is sized, they show the memory it must leave."""

from __future__ import annotations

from nanoengine.engine.messages import Phase, SamplingRow, ScheduledBatch
from nanoengine.sampling_params import SamplingParams


def largest_batches(
    max_num_seqs: int, max_num_batched_tokens: int, max_len: int, block_size: int
) -> list[ScheduledBatch]:
    """A prefill of the whole token budget, and a decode of as many sequences as may run, each sampled the costly way.

    All sequences share one block table: what they write does not matter.
    """
    seq_len = min(max_num_batched_tokens, max_len)
    table = list(range(1, -(-seq_len // block_size) + 1))
    most = min(max_num_batched_tokens, max_num_seqs * seq_len)
    prompts = [min(seq_len, most - start) for start in range(0, most, seq_len)]
    prefill = ScheduledBatch(
        Phase.PREFILL,
        seq_ids=list(range(len(prompts))),
        rows=list(range(len(prompts))),
        token_ids=[0] * most,
        num_computed_tokens=[0] * len(prompts),
        num_new_tokens=prompts,
        block_tables=[table] * len(prompts),
    )
    count = min(max_num_seqs, max_num_batched_tokens)
    params = SamplingParams(top_k=10, top_p=0.9)
    decode = ScheduledBatch(
        Phase.DECODE,
        seq_ids=list(range(count)),
        rows=list(range(count)),
        token_ids=[0] * count,
        num_computed_tokens=[seq_len - 1] * count,
        num_new_tokens=[1] * count,
        block_tables=[table] * count,
        sampled_rows=list(range(count)),
        sampled_into=list(range(count)),
        sampling=[SamplingRow(params, row, ()) for row in range(count)],
    )
    return [prefill, decode]
