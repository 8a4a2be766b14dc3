"""Which outputs of a matrix, and which heads, each rank computes. Plain numbers; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from nanoengine.core.errors import InvalidConfig

UNIT = 16
"""Outputs that stay together, where there are enough of them: kernels compute so many at once."""


def share(count: int, size: int, unit: int = 1) -> list[range]:
    """[0, count) as a range for each of `size` ranks, of about equal lengths, cut at multiples of the unit."""
    units = -(-count // unit)
    cuts = [min(count, units * rank // size * unit) for rank in range(size + 1)]
    return [range(first, last) for first, last in pairwise(cuts)]


def outputs(count: int, size: int) -> list[range]:
    """Outputs of each rank; every rank has all outputs, if there are fewer outputs than ranks."""
    if count < size:
        return [range(count)] * size
    return share(count, size, UNIT if count >= UNIT * size else 1)


@dataclass(frozen=True)
class Shares:
    """The shares of `size` ranks in a model.

    Args:
        heads_are: name of the heads in an error message.

    Raises:
        InvalidConfig: some rank would have no query head.
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
        """K/V heads of each rank. If there are more ranks than K/V heads, several ranks have the same head."""
        if self.size <= self.num_kv_heads:
            return share(self.num_kv_heads, self.size)
        return [range(own, own + 1) for own in self._kv_head_of_rank]

    @cached_property
    def heads(self) -> list[range]:
        """Query heads of each rank: all query heads of its K/V heads, or a share of them."""
        group = self.num_heads // self.num_kv_heads
        if self.size <= self.num_kv_heads:
            return [range(own.start * group, own.stop * group) for own in self.kv_heads]
        found = []
        for head in range(self.num_kv_heads):
            among = share(group, self._kv_head_of_rank.count(head))
            found += [range(head * group + own.start, head * group + own.stop) for own in among]
        return found

    def columns(self, heads: list[range]) -> list[range]:
        """Heads -> columns of a matrix that has all heads side by side."""
        return [range(own.start * self.head_dim, own.stop * self.head_dim) for own in heads]

    @cached_property
    def _kv_head_of_rank(self) -> list[int]:
        return [rank * self.num_kv_heads // self.size for rank in range(self.size)]
