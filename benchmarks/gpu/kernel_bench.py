"""What the benchmarks of single kernels share: a clock, what the device can do at best, and paged memory of the model's shape."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import Figures
from benchmarks.gpu.clock import Clock, Rates
from benchmarks.report import Report
from benchmarks.workload import NANO_VLLM, random_workload
from nanoengine.attention.backend import AttentionBackend
from nanoengine.core.attention import AttentionMetadata
from nanoengine.kernels.interface import Kernels
from nanoengine.models.model_config import ModelConfig


@dataclass
class Bench:
    """What all parts share."""

    args: argparse.Namespace
    report: Report
    device: torch.device
    dtype: torch.dtype
    model: ModelConfig
    kernels: Kernels
    clock: Clock
    rates: Rates

    def add(self, case: dict[str, Any], work: Callable[[], object], num_bytes: float, flop: float = 0.0) -> None:
        """Time one kernel alone, its data not in the cache."""
        self.report.add(case, self._figures(self.clock.seconds(work), num_bytes, flop))

    def add_small(
        self, case: dict[str, Any], works: Sequence[Callable[[], object]], num_bytes: float, flop: float = 0.0
    ) -> None:
        """Time one of many small ones in a row, where launching them is hidden; its data may be in the cache."""
        self.report.add(case, self._figures(self.clock.seconds_in_a_row(works), num_bytes, flop))

    def _figures(self, seconds: float, num_bytes: float, flop: float) -> Figures:
        """Compared with its bytes at the device's bandwidth and its operations at its rate."""
        figures = {
            "us": 1e6 * seconds,
            "gb_s": num_bytes / seconds / 1e9,
            "bandwidth_share": num_bytes / seconds / self.rates.bytes_s,
            "limit_share": max(num_bytes / self.rates.bytes_s, flop / self.rates.flop_s) / seconds,
        }
        return figures | ({"tflop_s": flop / seconds / 1e12} if flop else {})

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    @property
    def qkv_width(self) -> int:
        return (self.model.num_heads + 2 * self.model.num_kv_heads) * self.model.head_dim

    def decode_bytes(self, lens: Sequence[int]) -> int:
        """What decode attention must move: K and V of all tokens, the queries and the results."""
        model = self.model
        return 2 * (sum(lens) * model.num_kv_heads + len(lens) * model.num_heads) * model.head_dim * self.dtype.itemsize


def lens_of_workload(num_running: int, scale: int = 1) -> list[int]:
    """Tokens of the sequences that still run, all at once, in the workload of 256 requests when only so many are left.

    Args:
        scale: divides all lengths, for devices that are not up to it.
    """
    work = random_workload(*NANO_VLLM, vocab_size=1 << 16, seed=0)
    step = sorted(work.output_lens, reverse=True)[num_running - 1] - 1
    left = [len(prompt) + step for prompt, count in zip(work.prompts, work.output_lens, strict=True) if count > step]
    return [max(1, n // scale) for n in left[:num_running]]


@contextmanager
def memory_for(bench: Bench, num_tokens: int) -> Iterator[Tensor]:
    """Random K and V of so many tokens of one layer: [2, elements], in whatever order a backend wants them."""
    numbers = num_tokens * bench.model.num_kv_heads * bench.model.head_dim
    memory = torch.empty(2, numbers, dtype=bench.dtype, device=bench.device)
    for piece in memory.view(-1).split(1 << 28):
        piece.normal_()
    try:
        yield memory
    finally:
        del memory
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def caches(bench: Bench, backend: AttentionBackend, memory: Tensor) -> tuple[Tensor, Tensor]:
    """K and V in the backend's order."""
    heads, dim = bench.model.num_kv_heads, bench.model.head_dim
    shape = backend.kv_shape(memory.shape[1] // (bench.args.block_size * heads * dim), heads, dim)
    size = math.prod(shape)
    return memory[0, :size].view(shape), memory[1, :size].view(shape)


def step(bench: Bench, cache: tuple[Tensor, Tensor], query_lens: list[int], lens: list[int]) -> AttentionMetadata:
    """A step of decodes if every sequence has one new token, otherwise of chunks; their blocks lie anywhere in the cache."""
    counts = [-(-n // bench.args.block_size) for n in lens]
    blocks = torch.randperm(cache[0].shape[0])[: sum(counts)].to(torch.int32)
    tables = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    for table, count, own in zip(tables, counts, blocks.split(counts), strict=True):
        table[:count] = own
    starts = list(accumulate(query_lens, initial=0))
    return AttentionMetadata(
        kv_cache=[cache],
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64, device=bench.device),
        num_decodes=len(lens) if max(query_lens) == 1 else 0,
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=bench.device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=bench.device),
        block_tables=tables.to(bench.device),
        query_lens_list=query_lens,
        seq_lens_list=lens,
    )


def tokens_in_blocks(bench: Bench, lens: Sequence[int]) -> int:
    """Tokens that fit into the blocks of all sequences."""
    size = bench.args.block_size
    return sum(-(-n // size) * size for n in lens)
