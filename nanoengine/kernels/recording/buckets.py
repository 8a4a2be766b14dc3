"""Buckets: the sizes of steps that are recorded. A step runs in the smallest bucket that holds it, filled up with padding.

Recorded are decodes, by how many sequences there are; decodes with drafts, by how many sequences and the most tokens of one; and
prompts that are computed alone, by how many tokens they have.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nanoengine.core.inputs import PackedStep, Rows
from nanoengine.core.messages import StepPlan

MOST_ON_CPU = 64
"""Sequences in a recorded step on a CPU, where every size is recorded: in larger steps, what is around the kernels is little."""

PROMPT_SIZES = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
DRAFTED_SEQS = (1, 2, 4, 8, 16)
DRAFTED_TOKENS = (4, 8, 16)
"""Numbers of sequences, and of tokens of each, that are recorded: more sequences seldom have drafts."""


@dataclass(frozen=True, order=True)
class Bucket:
    """Steps of up to `num_runs` runs of up to `num_tokens` tokens each. A bucket for a prompt has one run, and if it is `whole`,
    there are no tokens before those of the run.
    """

    is_prompt: bool
    num_runs: int
    num_tokens: int
    whole: bool = False

    def holds(self, size: Bucket) -> bool:
        is_plain = self.is_prompt == size.is_prompt and (self.num_tokens == 1) == (
            size.num_tokens == 1 and not size.is_prompt
        )
        is_plain &= size.whole or not self.whole
        return is_plain and self.num_runs >= size.num_runs and self.num_tokens >= size.num_tokens

    def shape(self, max_len: int) -> PackedStep:
        """Bounds for all steps of this bucket: sequences of any length. If runs have several tokens, one padding run is added.
        The numbers are not there yet.
        """
        total, num_padding = self.num_runs * self.num_tokens, int(self.num_tokens > 1)
        num_runs = self.num_runs + num_padding
        longest = self.num_tokens if self.whole else max(max_len, self.num_tokens + 1)
        return PackedStep(
            query_lens=[self.num_tokens] * num_runs,
            seq_lens=[longest] * num_runs,
            num_decodes=0 if self.is_prompt else num_runs,
            num_tokens=total,
            num_samples=1 if self.is_prompt else total,
            longest=total if num_padding else 1,
        )


def size_of(plan: StepPlan) -> Bucket | None:
    """The size of a step that may be recorded: decodes alone, with or without drafts, or one chunk of a prompt alone."""
    num_decodes, runs = len(plan.decode_rows), plan.runs
    if all(run.drafts for run in runs):
        return Bucket(False, num_decodes + len(runs), max((run.num_new for run in runs), default=1))
    if num_decodes == 0 and len(runs) == 1:
        return Bucket(True, 1, runs[0].num_new, runs[0].start == 0)
    return None


def decode_buckets(max_size: int) -> list[Bucket]:
    """Less than half of a recorded step is padding, and less than a third of one of more than 16 sequences."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 512, 32), *range(512, max_size, 128)]
    return [Bucket(False, size, 1) for size in (*(size for size in sizes if size < max_size), max_size)]


def prompt_buckets(max_tokens: int, max_len: int, *, whole: bool = False) -> list[Bucket]:
    """The host takes longer to launch such a step than the device to run it. Less than a third of one of more than 128 tokens is
    padding.

    Args:
        whole: whether those without tokens before them have separate recordings.
    """
    sizes = [size for before, size in pairwise((0, *PROMPT_SIZES)) if size <= max_tokens and before < max_len]
    return [Bucket(True, 1, size, kind) for size in sizes for kind in ((True, False) if whole else (False,))]


def drafted_buckets(max_seqs: int, num_drafts: int) -> list[Bucket]:
    """Ascending by all of their tokens."""
    longest = next((tokens for tokens in DRAFTED_TOKENS if tokens > num_drafts), DRAFTED_TOKENS[-1])
    pairs = [(n, tokens) for n in DRAFTED_SEQS for tokens in DRAFTED_TOKENS if n <= max_seqs and tokens <= longest]
    return [Bucket(False, *pair) for pair in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair))]


def pad(packed: PackedStep, shape: PackedStep, rows: Rows) -> PackedStep:
    """`shape` with the numbers of a step, filled up with runs of the padding row: their tokens are written nowhere."""
    count, sections = len(packed.query_lens), shape.allocate(rows.device)
    shape.numbers.zero_()
    row, _, starts, _, sampled_tokens, sampled_rows, _ = sections
    row[:] = sampled_rows[:] = rows.padding_row
    sampled_tokens[:] = np.arange(len(sampled_tokens))
    for to, section in zip(sections, packed.sections, strict=True):
        to[: section.stop - section.start] = packed.numbers.numpy()[section]
    starts[count + 1 :] = starts[count] + np.cumsum(shape.query_lens[count:])
    starts[-1] = shape.num_tokens
    shape.sampled = packed.sampled
    return shape
