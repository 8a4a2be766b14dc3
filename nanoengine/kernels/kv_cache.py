"""The KV pool of the faster backends: in huge pages, and with all layers of a block side by side where a backend wants
that, so that a block is first touched, copied and saved in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nanoengine.core.attention import KVLayer
from nanoengine.core.kv_cache import KVCache
from nanoengine.kernels.memory import zeros_in_huge_pages


class HugePageKVCache(KVCache):
    """A pool in huge pages on a CPU."""

    block_major = False

    def make(
        self, num_blocks: int, num_pool_layers: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> list[KVLayer]:
        whole = (
            (num_blocks, num_pool_layers, 2, *shape) if self.block_major else (num_pool_layers, 2, num_blocks, *shape)
        )
        on_cpu = device.type == "cpu"
        self.pool = pool = (
            zeros_in_huge_pages(whole, dtype) if on_cpu else torch.zeros(whole, dtype=dtype, device=device)
        )
        if self.block_major:
            return [(pool[:, i, 0], pool[:, i, 1]) for i in range(num_pool_layers)]
        return [(k, v) for k, v in pool]


class BlockMajorKVCache(HugePageKVCache):
    """All layers of a block lie side by side."""

    block_major = True
