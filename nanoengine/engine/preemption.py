"""Preemption: what to do with the blocks of a sequence that must give way.

Recompute drops them: what the prefix cache still has when the sequence resumes need not be computed, the rest is. Swap
copies them to host memory, from where they are copied back. Which is faster depends on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Preemption:
    """The choice, made anew for each victim.

    Args:
        mode: "recompute", "swap", or "auto": the one that is expected to take less time.
        copy_bytes_per_second: between the pool and host memory.
        block_bytes: K and V of one block.
        prefill_rate: tokens per second that the engine has prefilled so far; 0 before the first.
    """

    mode: str = "recompute"
    copy_bytes_per_second: float = 1.0
    block_bytes: int = 0
    prefill_rate: Callable[[], float] = lambda: 0.0
    num_swaps: int = 0
    num_recomputes: int = 0

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether a victim with so many computed tokens, and so many blocks, is to be copied; it is counted as such."""
        swap = self.mode == "swap" or (
            self.mode == "auto" and self._swap_seconds(num_blocks) < self._compute_seconds(num_tokens)
        )
        if swap:
            self.num_swaps += 1
        else:
            self.num_recomputes += 1
        return swap

    def _swap_seconds(self, num_blocks: int) -> float:
        """There and back."""
        return 2 * num_blocks * self.block_bytes / self.copy_bytes_per_second

    def _compute_seconds(self, num_tokens: int) -> float:
        rate = self.prefill_rate()
        return num_tokens / rate if rate else 0.0
