"""Options of tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.config import check_count

MOST_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """Options of tensor parallelism.

    Args:
        tensor_parallel_size: processes that share the weights and the KV cache: GPUs of this machine, or parts of its CPU cores.
            At most as many as the model has query heads.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        check_count("tensor_parallel_size", self.tensor_parallel_size, MOST_RANKS)
