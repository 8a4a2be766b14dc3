"""Paged attention in native kernels; kv_tiles.h describes how they keep K and V."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nanoengine.attention.backend import AttentionBackend, Changes, window_of
from nanoengine.core.attention import AttentionSpec, KVLayer, Runs
from nanoengine.kernels.addresses import DTYPES, address, address_of_floats
from nanoengine.kernels.c_functions import c_functions
from nanoengine.kernels.kv_int8 import SCALE_BYTES
from nanoengine.kernels.native_operations import unsupported_reason

TILE = 16
"""Tokens in a tile of K or V."""

COLUMNS = 32
"""Dimensions of a head that are computed together."""

MAX_HEAD_DIM = 256

ALONE = None, 0, 1, 0, 0.0
"""What attention_decode is told of ranks that share a context: there are none."""

CACHE_DTYPES = {**DTYPES, torch.int8: 2}
"""Those of K/V caches, as kv_int8.h numbers them."""


class NativeAttention(AttentionBackend):
    """K/V are read once, from their blocks, for all query heads that share them; sums are float32.

    Args:
        block_size: tokens in a block.
        c: functions of a library that was compiled in another way than for this CPU; None: that for this CPU.
    """

    name = "native"
    capturable = True
    captures_prompts = False
    reads_shared_once = True
    features = frozenset({"window", "chunked", "sinks", "soft_cap"})
    block_major = True
    quantizes = True

    def __init__(self, block_size: int, *, c: SimpleNamespace | None = None):
        self.block_size = block_size
        self.c = c_functions() if c is None else c

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

    def rotate_and_write(self, qkv: Tensor, changes: Changes, kv: KVLayer, slot_mapping: Tensor) -> Tensor:
        (q_weight, k_weight, eps, cos, sin), (k_cache, _) = changes, kv
        qkv, dim, kv_heads = qkv.contiguous(), head_dim_of(k_cache), k_cache.shape[2]
        norms = address_of_floats(q_weight), address_of_floats(k_weight)
        angles: tuple[int | None, int | None, int] = (None, None, 0)
        if cos is not None and sin is not None:
            if cos.stride(-1) != 1 or cos.stride() != sin.stride():
                cos, sin = cos.contiguous(), sin.contiguous()
            angles = cos.data_ptr(), sin.data_ptr(), cos.stride(0)
        tokens, width = qkv.shape
        q = torch.empty(tokens, width // dim - 2 * kv_heads, dim, dtype=qkv.dtype)
        q_at, head_bytes = qkv.data_ptr(), dim * qkv.itemsize
        k_at = q_at + q.shape[1] * head_bytes
        projected = q_at, width, k_at, width, k_at + kv_heads * head_bytes, width
        self._write(qkv.dtype, (*projected, *norms, eps, *angles), slot_mapping, q, kv)
        return q

    def write_kv(self, k: Tensor, v: Tensor, kv: KVLayer, slot_mapping: Tensor) -> None:
        k, v = _heads_in_one_piece(k), _heads_in_one_piece(v)
        projected = None, 0, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)
        unchanged = None, None, 0.0, None, None, 0
        self._write(k.dtype, (*projected, *unchanged), slot_mapping, None, kv)

    def _write(self, dtype: torch.dtype, inputs: Sequence[Any], slots: Tensor, q: Tensor | None, kv: KVLayer) -> None:
        k_cache, v_cache = kv
        slots, q_heads = slots.contiguous(), 0 if q is None else q.shape[1]
        outputs = slots.data_ptr(), address(q), k_cache.data_ptr(), v_cache.data_ptr()
        dtypes = DTYPES[dtype], CACHE_DTYPES[k_cache.dtype]
        self.c.attention_write(*dtypes, *inputs, *outputs, len(slots), q_heads, *self._sizes(k_cache))

    def decode(self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        return self._attend(self.c.attention_decode, q, kv, runs, spec, sinks, num_shared(runs, spec), *ALONE)

    def prefill(self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        return self._attend(self.c.attention_prefill, q, kv, runs, spec, sinks)

    def _attend(
        self,
        function: Callable[..., None],
        q: Tensor,
        kv: KVLayer,
        runs: Runs,
        spec: AttentionSpec,
        sinks: Tensor | None,
        *more: float | None,
    ) -> Tensor:
        k_cache, v_cache = kv
        q, tables = q.contiguous(), runs.block_tables.contiguous()
        starts, lens = runs.query_start_loc.contiguous(), runs.seq_lens.contiguous()
        out = torch.empty_like(q)
        inputs = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), tables.data_ptr(), tables.shape[1]
        lengths = starts.data_ptr(), lens.data_ptr(), *more
        asked = spec.scale, spec.soft_cap or 0.0, window_of(spec), address_of_floats(sinks)
        dtypes, sizes = (DTYPES[q.dtype], CACHE_DTYPES[k_cache.dtype]), (len(lens), q.shape[1], *self._sizes(k_cache))
        function(*dtypes, *inputs, *lengths, out.data_ptr(), *sizes, *asked)
        return out

    def _sizes(self, cache: Tensor) -> tuple[int, ...]:
        """K/V heads, head_dim, tokens in a block, and elements between two blocks."""
        return cache.shape[2], head_dim_of(cache), self.block_size, cache.stride(0)


def head_dim_of(cache: Tensor) -> int:
    """Of K or V as these kernels keep it."""
    return cache.shape[3] // TILE - SCALE_BYTES * (cache.dtype is torch.int8)


def num_shared(runs: Runs, spec: AttentionSpec) -> int:
    """Leading tokens that decodes read once for all; none where they are out of sight sooner or later."""
    return runs.num_shared if spec.window is None else 0


def _heads_in_one_piece(x: Tensor) -> Tensor:
    """[tokens, heads, head_dim] as it is, or if the heads of a token have gaps between them, a copy without."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
