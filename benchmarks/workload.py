"""Workloads: prompts as random token ids, how much to generate for each, and when each arrives."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

Range = tuple[int, int]


class Preset(NamedTuple):
    num_seqs: int
    input_len: Range
    output_len: Range


NANO_VLLM = Preset(256, (100, 1024), (100, 1024))
"""The published workload of nano-vllm (its bench.py): with seed 0, 142,827 prompt tokens and 133,966 output tokens."""
CPU = Preset(32, (16, 256), (16, 128))
PRESETS = {"nano-vllm": NANO_VLLM, "cpu": CPU}

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

    def arriving(self, arrivals: list[float]) -> Workload:
        assert len(arrivals) == len(self)
        return replace(self, arrivals=arrivals)

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


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Arrival times of a Poisson process of `rate` requests per second; the first arrives at 0."""
    rng = random.Random(seed)
    gaps: Sequence[float] = [0.0] + [rng.expovariate(rate) for _ in range(count - 1)]
    return list(accumulate(gaps))


def constant_arrivals(rate: float, count: int) -> list[float]:
    return [i / rate for i in range(count)]
