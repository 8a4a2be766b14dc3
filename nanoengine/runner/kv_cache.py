"""KVCache: the tensors that hold K and V of every layer."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.attention.backend import AttentionBackend, KVLayer
from nanoengine.kernels.memory import zeros_in_huge_pages
from nanoengine.model_config import ModelConfig


class KVCache:
    """K and V of every layer for `num_blocks` usable blocks and the null block.

    `layers[i]` is (K, V) of layer i, each of the backend's shape. They begin as zeros, since there are kernels that multiply
    what nobody wrote by 0; nothing else may read a slot before it was written.
    """

    def __init__(
        self, num_blocks: int, model: ModelConfig, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
    ):
        _, *shape = backend.kv_shape(num_blocks + 1, model.num_kv_heads, model.head_dim)
        if backend.block_major:
            pool = _new((num_blocks + 1, model.num_layers, 2, *shape), dtype, device)
            self.layers: list[KVLayer] = [(pool[:, i, 0], pool[:, i, 1]) for i in range(model.num_layers)]
        else:
            pool = _new((model.num_layers, 2, num_blocks + 1, *shape), dtype, device)
            self.layers = [(pool[i, 0], pool[i, 1]) for i in range(model.num_layers)]

    def fill(self, value: float) -> None:
        """Set every slot, the null block's too. Tests fill a pool with NaN to see that nobody reads what nobody wrote."""
        for k, v in self.layers:
            k.fill_(value)
            v.fill_(value)


def _new(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return zeros_in_huge_pages(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)  # FlashAttention-3 multiplies what nobody wrote by 0
