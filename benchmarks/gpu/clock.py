"""How long work takes a device, without the time that the host takes to ask for it; and what the device can do at best."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from time import perf_counter
from typing import Any

import torch
import transformers

from benchmarks.limit import Ceiling

FLUSH_BYTES = {"cuda": 2 << 30, "cpu": 1 << 20}
"""On a GPU many times its L2, and reading it takes long enough for the host to launch all that is timed in the meantime."""

SIZES = {"cuda": (4 << 30, 8192), "cpu": (16 << 20, 256)}
"""Bytes that are read and copied, and rows and columns of the matrices, for the best that a device can do."""


@dataclass
class Clock:
    """Median seconds of some work on a device, which finds nothing of its data in the device's cache.

    Args:
        device: where the work is done.
        repeats: how often it is timed.
        warm_ups: how often it is done before: kernels are compiled then.
    """

    device: torch.device
    repeats: int = 30
    warm_ups: int = 3

    def __post_init__(self) -> None:
        # Read, not written: what was written would be on its way to memory while the work is timed.
        self._flush = torch.zeros(FLUSH_BYTES[self.device.type] // 4, dtype=torch.int32, device=self.device)

    @torch.inference_mode()
    def seconds(self, work: Callable[[], object]) -> float:
        for _ in range(self.warm_ups):
            work()
        if self.device.type != "cuda":
            return statistics.median(self._on_host(work) for _ in range(self.repeats))
        torch.cuda.synchronize(self.device)
        pairs = [self._on_device(work) for _ in range(self.repeats)]
        torch.cuda.synchronize(self.device)
        return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1000

    def _on_host(self, work: Callable[[], object]) -> float:
        self._flush.max()
        start = perf_counter()
        work()
        return perf_counter() - start

    def _on_device(self, work: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.max()
        start.record()
        work()
        end.record()
        return start, end


@dataclass(frozen=True)
class Rates:
    """The best that a device was seen to do: bytes per second of a read, of a copy (read and written), and multiplications."""

    read_bytes_s: float
    copy_bytes_s: float
    flop_s: float

    @property
    def bytes_s(self) -> float:
        """Bytes moved per second, whichever way is the faster."""
        return max(self.read_bytes_s, self.copy_bytes_s)

    @property
    def ceiling(self) -> Ceiling:
        return Ceiling(self.bytes_s, self.flop_s)

    @property
    def figures(self) -> dict[str, float]:
        return {
            "read_gb_s": self.read_bytes_s / 1e9,
            "copy_gb_s": self.copy_bytes_s / 1e9,
            "matmul_tflop_s": self.flop_s / 1e12,
        }


def measure_rates(clock: Clock, dtype: torch.dtype) -> Rates:
    """A large read, a large copy, and a large product of random matrices (of zeros it would be faster than of anything else)."""
    num_bytes, side = SIZES[clock.device.type]
    source = torch.randint(0, 1000, (num_bytes // 4,), dtype=torch.int32, device=clock.device)
    target = torch.empty_like(source)
    read = num_bytes / clock.seconds(source.max)
    copy = 2 * num_bytes / clock.seconds(lambda: target.copy_(source))
    left, right = (torch.randn(side, side, device=clock.device).to(dtype) for _ in range(2))
    return Rates(read, copy, 2 * side**3 / clock.seconds(lambda: left @ right.T))


def device_facts(device: torch.device) -> dict[str, Any]:
    """What figures depend on. The package need not be installed for it: on a lent machine it is run from its sources."""
    facts = {"date": date.today().isoformat(), "device": str(device), "cores": len(os.sched_getaffinity(0))}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if device.type == "cuda":
        import triton

        versions |= {"triton": triton.__version__, "cuda": str(torch.version.cuda)}
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts | {"versions": versions}
