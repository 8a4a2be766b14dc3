"""Options of tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.errors import InvalidConfig
from nanoengine.core.options import check, option

MOST_RANKS = 64

MOST_SECONDS = 2e6
"""Limit of the timeouts of poll(2), which counts milliseconds in 31 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """Options of tensor parallelism.

    Args:
        tensor_parallel_size: processes among which weights and KV cache are divided: GPUs of this machine, or parts of its cores.
            At most as many as the model has query heads.
        decode_context_parallel_size: 1: each process has the K/V of some heads. As many as tensor_parallel_size: each has some
            tokens of all heads, which takes less memory where a model has fewer K/V heads than there are processes. It needs a
            block_size of 256 tokens for each process, or a multiple.
        worker_step_seconds: when the step of a process takes longer, all processes of the model are ended. Above 0.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    tensor_parallel_size: int = option(1, high=MOST_RANKS)
    decode_context_parallel_size: int = option(1, high=MOST_RANKS)
    worker_step_seconds: float = option(300.0, 0, MOST_SECONDS, above=True)

    def __post_init__(self) -> None:
        check(self)
        if self.decode_context_parallel_size not in (1, self.tensor_parallel_size):
            raise InvalidConfig(
                f"decode_context_parallel_size is {self.decode_context_parallel_size}: it must be 1, or as much as "
                f"tensor_parallel_size, {self.tensor_parallel_size}"
            )

    @property
    def splits_context(self) -> bool:
        """Whether each rank has some tokens of all heads, and not all tokens of some."""
        return self.decode_context_parallel_size > 1
