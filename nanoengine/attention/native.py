"""Paged attention in native kernels; kv_tiles.h describes how they keep K and V."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.attention.backend import AttentionBackend
from nanoengine.core.attention import AttentionSpec, Runs
from nanoengine.kernels.kv_int8 import SCALE_BYTES
from nanoengine.kernels.native_operations import operation, unsupported_reason

TILE = 16
"""Tokens in a tile of K or V."""

COLUMNS = 32
"""Dimensions of a head that are computed together."""

MAX_HEAD_DIM = 256


class NativeAttention(AttentionBackend):
    """K/V are read once, from their blocks, for all query heads that share them; sums are float32."""

    name = "native"
    description = "paged decode and prefill kernels"
    capturable = True
    reads_shared_once = True
    features = frozenset({"window", "sinks", "soft_cap"})
    block_major = True
    quantizes = True

    def __init__(self, block_size: int):
        self.block_size = block_size
        names = ("rotate_and_write", "write", "prefill", "decode")
        self._rotate_and_write, self._write, self._prefill, self._decode = (
            operation(f"attention_{name}") for name in names
        )

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        if block_size % TILE:
            return f"block_size {block_size} is no multiple of {TILE}"
        if head_dim % COLUMNS or head_dim > MAX_HEAD_DIM:
            return f"head_dim {head_dim} is no multiple of {COLUMNS} up to {MAX_HEAD_DIM}"
        return unsupported_reason(device, dtype)

    def kv_shape(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, *, quantized: bool = False
    ) -> tuple[int, ...]:
        return (num_blocks, self.block_size // TILE, num_kv_heads, TILE * (head_dim + SCALE_BYTES * quantized))

    def rotate_and_write(
        self,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        cos: Tensor | None,
        sin: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        changes, where = (q_weight, k_weight, eps, cos, sin), (k_cache, v_cache, slot_mapping)
        return self._rotate_and_write(qkv, *changes, *where, k_cache.shape[2], head_dim_of(k_cache), self.block_size)

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        self._write(k, v, k_cache, v_cache, slot_mapping, self.block_size)

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        runs: Runs,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        tables, starts, lens = runs.block_tables, runs.query_start_loc, runs.seq_lens
        asked = spec.scale, spec.soft_cap, spec.window, sinks
        sizes = k_cache.shape[2], self.block_size
        return self._decode(q, k_cache, v_cache, tables, starts, lens, num_shared(runs, spec), *sizes, *asked)

    def prefill(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        runs: Runs,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        tables, starts, lens = runs.block_tables, runs.query_start_loc, runs.seq_lens
        asked = spec.scale, spec.soft_cap, spec.window, sinks
        return self._prefill(q, k_cache, v_cache, tables, starts, lens, k_cache.shape[2], self.block_size, *asked)


def head_dim_of(cache: Tensor) -> int:
    """Of K or V as these kernels keep it."""
    return cache.shape[3] // TILE - SCALE_BYTES * (cache.dtype is torch.int8)


def num_shared(runs: Runs, spec: AttentionSpec) -> int:
    """Leading tokens that decodes read once for all; none where they are out of sight sooner or later."""
    return runs.num_shared if spec.window is None else 0
