"""Workloads: prompts as random token ids, how much to generate for each, and when each arrives; and the table of those that are
measured, here and in other engines. It imports nothing but Python's own, so that any engine's environment can use it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import NamedTuple

Range = tuple[int, int]


class Scenario(NamedTuple):
    """Requests that are all there at the start: how many, tokens in and out (from, to), and which figure counts."""

    num_seqs: int
    input_len: Range
    output_len: Range
    figure: str
    num_shared: int = 0  # tokens that all prompts begin with, and that are in the cache

    @property
    def longest(self) -> int:
        return self.num_shared + self.input_len[1] + self.output_len[1]

    def workload(self, vocab_size: int, seed: int) -> Workload:
        found = random_workload(self.num_seqs, self.input_len, self.output_len, vocab_size, seed)
        shared = random_tokens(random.Random(seed), self.num_shared, vocab_size)
        return replace(found, prompts=[shared + own for own in found.prompts])

    def prefix(self, workload: Workload) -> Workload | None:
        """What is run before, so that the shared tokens are in the cache."""
        return Workload([workload.prompts[0][: self.num_shared]], [1]) if self.num_shared else None


NANO_VLLM = (256, (100, 1024), (100, 1024))
"""The published workload of nano-vllm (its bench.py): with seed 0, 142,827 prompt tokens and 133,966 output tokens."""

SCENARIOS = {
    "one stream": Scenario(1, (128, 128), (128, 128), "tpot_ms"),
    "one stream, 1,024": Scenario(1, (1024, 1024), (128, 128), "tpot_ms"),
    "streams": Scenario(16, (64, 64), (64, 64), "decode_tok_s"),
    "prompt of 512": Scenario(1, (512, 512), (1, 1), "prefill_tok_s"),
    "long prompt": Scenario(1, (2048, 2048), (1, 1), "prefill_tok_s"),
    "shared prefix": Scenario(16, (32, 32), (16, 16), "seconds", num_shared=512),
    "offline": Scenario(32, (16, 256), (16, 128), "output_tok_s"),
    "nano-vllm": Scenario(*NANO_VLLM, "output_tok_s"),
}

HIGHEST_TOKEN_ID = 10000  # as nano-vllm draws them; wrapped where the vocabulary is smaller


@dataclass(frozen=True)
class Workload:
    """Request i: `prompts[i]`, then `output_lens[i]` generated tokens; it arrives `arrivals[i]` seconds after the start."""

    prompts: list[list[int]]
    output_lens: list[int]
    arrivals: list[float] = field(default_factory=list)  # empty: all at once

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)

    def cut(self, max_output_len: int) -> Workload:
        """The same prompts with short outputs: a warm-up."""
        return replace(self, output_lens=[min(n, max_output_len) for n in self.output_lens])


def random_workload(num_seqs: int, input_len: Range, output_len: Range, vocab_size: int, seed: int) -> Workload:
    """Lengths drawn uniformly, bounds included. The order of the draws is nano-vllm's: equal seeds give its workload."""
    rng = random.Random(seed)
    prompts = [random_tokens(rng, rng.randint(*input_len), vocab_size) for _ in range(num_seqs)]
    return Workload(prompts, [rng.randint(*output_len) for _ in range(num_seqs)])


def random_tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randint(0, HIGHEST_TOKEN_ID) % vocab_size for _ in range(count)]


def lens_of_workload(num_running: int, scale: int = 1) -> list[int]:
    """Tokens of the sequences that still run, all at once, in nano-vllm's workload when only so many are left.

    Args:
        scale: divides all lengths, for devices that are not up to it.
    """
    work = random_workload(*NANO_VLLM, vocab_size=1 << 16, seed=0)
    step = sorted(work.output_lens, reverse=True)[num_running - 1] - 1
    left = [len(prompt) + step for prompt, count in zip(work.prompts, work.output_lens, strict=True) if count > step]
    return [max(1, n // scale) for n in left[:num_running]]
