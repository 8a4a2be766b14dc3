"""What attention backends offer beyond the core's."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.core.attention import AttentionSpec, CoreAttentionBackend, KVLayer
from nanoengine.kernels.operations import Changes

RotateAndWrite = Callable[[Tensor, Changes, KVLayer, Tensor], Tensor]
"""(qkv, changes, kv, slot_mapping) -> q [num_tokens, num_heads, head_dim]: RMSNorm and rotation (half-split layout) of all heads
of q and k, and the write of k and v, in one go. qkv is [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: all heads of q,
then of k, then of v."""


class AttentionBackend(CoreAttentionBackend):
    """A backend that may store K/V as int8, be recorded, and read what sequences share once."""

    features: frozenset[str] = frozenset()
    """Fields of `AttentionSpec`, beside the scale, that it heeds."""
    rotate_and_write: RotateAndWrite | None = None
    """The fused form of norms, rotations and `write_kv`."""
    row_dimensions = 1
    """Of the shape of a cache, those that stay where a layer has less of each token: blocks, or blocks and their tokens."""
    block_major = False
    """Whether the K/V of all layers of a block lie side by side: a block is then copied, and first touched, in one piece."""
    capturable = False
    """Whether a CUDA graph can record a batch of decodes: it never waits for the device, and launches the same whatever it
    holds."""
    captures_prompts = False
    """Whether it can record chunks, too: of their lengths, it looks at those on the device, and at bounds that the host gives."""
    knows_whole_prompts = False
    """Whether it computes a prompt without history in another way (`Runs.whole`), so that such prompts are recorded apart."""
    reads_shared_once = False
    """Whether it heeds `Runs.num_shared`, so that a step in which sequences share blocks is better not recorded."""
    quantizes = False
    """Whether it can keep K/V as int8 (`kernels/reference/kv_int8.py`): then everything here takes caches of that dtype, too."""
    quantized = False
    """Whether it does: then `kv_shape` has room for the scales in each block."""

    def of_layer(self, kv: KVLayer, num_kv_heads: int, head_dim: int) -> KVLayer:
        """K and V of a layer with these heads, in the memory of a layer that has as much of each token, or more."""
        shape, rows = self.kv_shape(len(kv[0]), num_kv_heads, head_dim), self.row_dimensions
        if shape == kv[0].shape:
            return kv
        k, v = (x.flatten(rows)[..., : math.prod(shape[rows:])].unflatten(rows, shape[rows:]) for x in kv)
        return k, v

    @staticmethod
    @abstractmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        """The reason that this backend cannot run here; None if it can."""


@dataclass(frozen=True)
class WriteInOneGo:
    """`rotate_and_write` of a backend that offers it, but for qkv, with which it is called."""

    backend: AttentionBackend
    changes: Changes
    kv: KVLayer
    slot_mapping: Tensor

    def __call__(self, qkv: Tensor) -> Tensor:
        assert self.backend.rotate_and_write is not None
        return self.backend.rotate_and_write(qkv, self.changes, self.kv, self.slot_mapping)


def window_of(spec: AttentionSpec) -> int:
    """The argument of kernels: 0 if there is none, and less than 0 if it stands still."""
    return -(spec.window or 0) if spec.chunked else spec.window or 0
