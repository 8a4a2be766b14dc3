"""Partition of outputs and heads among ranks. Plain numbers; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from nanoengine.core.errors import InvalidConfig

UNIT = 16
"""Outputs that one rank computes in a group, where there are enough: kernels compute so many at once."""


def split_evenly(count: int, size: int, unit: int = 1) -> list[range]:
    """[0, count) as a range for each of `size` ranks, of about equal lengths, cut at multiples of the unit."""
    units = -(-count // unit)
    cuts = [min(count, units * rank // size * unit) for rank in range(size + 1)]
    return [range(first, last) for first, last in pairwise(cuts)]


def outputs(count: int, size: int) -> list[range]:
    """Outputs of each rank. With fewer outputs than ranks, every rank has all outputs."""
    if count < size:
        return [range(count)] * size
    return split_evenly(count, size, UNIT if count >= UNIT * size else 1)


@dataclass(frozen=True)
class Partition:
    """Outputs and heads of each of `size` ranks.

    Args:
        heads_are: name of the heads in an error message.

    Raises:
        InvalidConfig: more ranks than query heads.
    """

    size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    heads_are: str = "query heads"

    def __post_init__(self) -> None:
        if self.size > self.num_heads:
            raise InvalidConfig(
                f"tensor_parallel_size is {self.size}, but the model has {self.num_heads} {self.heads_are}: every rank needs "
                "one; lower it"
            )

    def outputs(self, count: int) -> list[range]:
        return outputs(count, self.size)

    @cached_property
    def kv_heads(self) -> list[range]:
        """K/V heads of each rank. With more ranks than K/V heads, several ranks have the same head."""
        if self.size <= self.num_kv_heads:
            return split_evenly(self.num_kv_heads, self.size)
        return [range(head, head + 1) for head in self._kv_head_of_rank]

    @cached_property
    def heads(self) -> list[range]:
        """Query heads of each rank: all query heads of its K/V heads, or some of them."""
        group = self.num_heads // self.num_kv_heads
        if self.size <= self.num_kv_heads:
            return [range(kv.start * group, kv.stop * group) for kv in self.kv_heads]
        heads = []
        for head in range(self.num_kv_heads):
            among = split_evenly(group, self._kv_head_of_rank.count(head))
            heads += [range(head * group + part.start, head * group + part.stop) for part in among]
        return heads

    def columns(self, heads: list[range]) -> list[range]:
        """Columns of heads in a matrix with all heads side by side."""
        return [range(part.start * self.head_dim, part.stop * self.head_dim) for part in heads]

    @cached_property
    def _kv_head_of_rank(self) -> list[int]:
        return [rank * self.num_kv_heads // self.size for rank in range(self.size)]
