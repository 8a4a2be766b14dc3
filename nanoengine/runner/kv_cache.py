"""KVCache: the tensors that hold K and V of every layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nanoengine.attention.backend import AttentionBackend
from nanoengine.core.attention import KVLayer
from nanoengine.engine.kv.groups import WINDOW, KVGroup, KVSpec
from nanoengine.kernels.memory import zeros_in_huge_pages
from nanoengine.models.model_config import ModelConfig


class KVCache:
    """K and V of every layer for `num_blocks` usable blocks and the null block.

    A block has room for one layer after the other of any one group. So the layers that come first in their groups share tensors,
    as do those that come second: what keeps them apart are the blocks.

    `layers[i]` is (K, V) of layer i, each of the backend's shape; `groups[i]` is the number of its group; `places` has the
    tensors one by one. They begin as zeros, since there are kernels that multiply what nobody wrote by 0; nothing else may read a
    slot before it was written.

    Args:
        dtype: of the cache: that of the model, or int8.
    """

    def __init__(
        self,
        num_blocks: int,
        model: ModelConfig,
        groups: Sequence[KVGroup],
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ):
        shape = _block_shape(model, backend, dtype)
        count = max(len(group.layers) for group in groups)
        if backend.block_major:
            pool = _new((num_blocks + 1, count, 2, *shape), dtype, device)
            self.places: list[KVLayer] = [(pool[:, i, 0], pool[:, i, 1]) for i in range(count)]
        else:
            pool = _new((count, 2, num_blocks + 1, *shape), dtype, device)
            self.places = [(pool[i, 0], pool[i, 1]) for i in range(count)]
        where = {layer: (i, place) for i, group in enumerate(groups) for place, layer in enumerate(group.layers)}
        self.groups = [where[layer][0] for layer in range(model.num_layers)]
        self.layers = [self.places[where[layer][1]] for layer in range(model.num_layers)]

    def fill(self, value: float) -> None:
        """Set every slot, the null block's too. Tests fill a pool with NaN to see that nobody reads what nobody wrote.

        Args:
            value: of an int8 cache, NaN or 0: it is then what all scales are.
        """
        for tensor in (tensor for place in self.places for tensor in place):
            is_nan = tensor.dtype is torch.int8 and math.isnan(value)
            tensor.fill_(-1 if is_nan else value)  # a float32 of such bytes is NaN


def bytes_of_layer(model: ModelConfig, backend: AttentionBackend, dtype: torch.dtype) -> int:
    """K and V of a block in one layer, with all that is stored beside them."""
    return 2 * math.prod(_block_shape(model, backend, dtype)) * dtype.itemsize


def _block_shape(model: ModelConfig, backend: AttentionBackend, dtype: torch.dtype) -> tuple[int, ...]:
    """Of K, or of V, in one layer."""
    quantized = dtype is torch.int8
    return backend.kv_shape(1, model.num_kv_heads, model.head_dim, quantized=quantized)[1:]


def kv_specs(model: ModelConfig) -> list[KVSpec]:
    """What each layer of a model remembers of a sequence."""
    windows = (model.layer(number).window for number in range(model.num_layers))
    return [KVSpec() if window is None else KVSpec(WINDOW, window) for window in windows]


def _new(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return zeros_in_huge_pages(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)  # FlashAttention-3 multiplies what nobody wrote by 0
