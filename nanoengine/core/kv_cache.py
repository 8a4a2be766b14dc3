"""KVCache: the tensors of K and V of every layer, and the size of the pool."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from nanoengine.core.attention import KVLayer
from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidConfig, KVCacheTooSmall


class KVCache:
    """K and V of every layer for `num_blocks` usable blocks and the null block.

    The i-th layers of all KV groups use the same tensor. They never collide, since a block belongs to one group at a time. Slots
    begin as zeros, since some kernels multiply unwritten slots by 0.

    Args:
        groups: the layers of each KV group.
        shape: of K, or V, of one layer of a block.
    """

    def __init__(
        self, num_blocks: int, groups: Seq[Seq[int]], shape: Seq[int], dtype: torch.dtype, device: torch.device
    ):
        self.pool_layers = self.make(num_blocks + 1, max(map(len, groups)), shape, dtype, device)
        indices = {layer: (i, j) for i, group in enumerate(groups) for j, layer in enumerate(group)}  # group, tensor
        self.groups = [indices[layer][0] for layer in range(len(indices))]  # of each layer
        self.layers = [self.pool_layers[indices[layer][1]] for layer in range(len(indices))]

    def make(
        self, num_blocks: int, num_pool_layers: int, shape: Seq[int], dtype: torch.dtype, device: torch.device
    ) -> list[KVLayer]:
        """K and V of each layer of the largest group."""
        pool = torch.zeros((num_pool_layers, 2, num_blocks, *shape), dtype=dtype, device=device)
        return [(k, v) for k, v in pool]

    def zero(self, blocks: list[int]) -> None:
        """Overwrite blocks that may hold NaN."""
        for layer in self.pool_layers:
            for tensor in layer:
                tensor[blocks] = 0


def size_pool(
    config: EngineConfig, model_len: int, blocks_needed: Callable[[int], int], block_bytes: int, free_bytes: int
) -> tuple[int, int]:
    """(blocks of the KV pool, longest sequence in tokens). The pool holds at least one sequence of that length, so the first of
    the running sequences can always go on.

    Args:
        model_len: longest sequence of the model.
        blocks_needed: number of tokens of a sequence -> blocks that it has at once.
        block_bytes: K and V of a block.
        free_bytes: of the device, for the pool.

    Raises:
        InvalidConfig: `max_model_len` is too small, or more than the model can.
        KVCacheTooSmall: the pool cannot hold a sequence of `max_model_len`, or not even one of two tokens.
    """
    wanted = config.max_model_len or model_len
    if not 2 <= wanted <= model_len:
        raise InvalidConfig(
            f"max_model_len is {wanted}: it must be from 2, a prompt token and a new one, to {model_len}, the model's own limit, "
            "which rope_scaling may raise"
        )
    num_blocks = config.num_kv_blocks or max(0, (config.kv_cache_memory or free_bytes) // block_bytes - 1)
    if config.num_kv_blocks is None and config.kv_cache_memory is None:
        num_blocks = min(num_blocks, config.max_num_seqs * blocks_needed(wanted))  # more could never be in use at once
    longest = bisect(range(1, wanted + 1), num_blocks, key=blocks_needed)
    if longest < (2 if config.max_model_len is None else wanted):
        raise KVCacheTooSmall(
            f"the KV pool has {num_blocks} blocks of {block_bytes / 1024:g} KiB, and a sequence of max_model_len {wanted} takes "
            f"{blocks_needed(wanted)}: lower max_model_len, or raise num_kv_blocks, kv_cache_memory or gpu_memory_utilization"
        )
    return num_blocks, longest
