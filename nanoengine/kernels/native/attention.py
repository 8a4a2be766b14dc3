"""Paged attention in native kernels; kv_tiles.h describes how they keep K and V."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nanoengine.core.attention import AttentionSpec, KVLayer, Runs
from nanoengine.kernels.attention import AttentionBackend, window_of
from nanoengine.kernels.native.addresses import DTYPES, address, rows, wrong
from nanoengine.kernels.native.c_functions import c_functions
from nanoengine.kernels.native.support import unsupported_reason
from nanoengine.kernels.operations import Changes
from nanoengine.kernels.reference.kv_int8 import SCALE_BYTES

TILE = 16
"""Tokens in a tile of K or V."""

COLUMNS = 32
"""Dimensions of a head in one vector."""

MAX_HEAD_DIM = 512

ALONE = None, 0, 1, 0, 0.0
"""Arguments of attention_decode about ranks that divide a context: there are none."""

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

    def kv_shape(self, num_blocks: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks, self.block_size // TILE, num_kv_heads, TILE * (head_dim + SCALE_BYTES * self.quantized))

    def rotate_and_write(self, qkv: Tensor, changes: Changes, kv: KVLayer, slot_mapping: Tensor) -> Tensor:
        (q_weight, k_weight, eps, cos, sin), (k_cache, _) = changes, kv
        qkv, dim, kv_heads = qkv.contiguous(), head_dim_of(k_cache), k_cache.shape[2]
        norms = address(q_weight, torch.float32, dim), address(k_weight, torch.float32, dim)
        tokens, width = qkv.shape
        if width % dim:
            raise wrong(qkv, f"heads of {dim} numbers")
        if cos is not None and sin is not None and (cos.stride(-1) != 1 or cos.stride() != sin.stride()):
            cos, sin = cos.contiguous(), sin.contiguous()
        (cos_at, _), angles = (rows(table, torch.float32, tokens, 1, dim // 2) for table in (cos, sin))
        q = qkv.new_empty(tokens, width // dim - 2 * kv_heads, dim)
        q_at, head_bytes = qkv.data_ptr(), dim * qkv.itemsize
        k_at = q_at + q.shape[1] * head_bytes
        projected = q_at, width, k_at, width, k_at + kv_heads * head_bytes, width
        self._write(qkv, (*projected, *norms, eps, cos_at, *angles), slot_mapping, q, kv)
        return q

    def write_kv(self, k: Tensor, v: Tensor, kv: KVLayer, slot_mapping: Tensor) -> None:
        k, v, shape = _heads_in_one_piece(k), _heads_in_one_piece(v), (len(k), kv[0].shape[2], head_dim_of(kv[0]))
        projected = None, 0, *rows(k, k.dtype, *shape), *rows(v, k.dtype, *shape)
        unchanged = None, None, 0.0, None, None, 0
        self._write(k, (*projected, *unchanged), slot_mapping, None, kv)

    def _write(self, new: Tensor, inputs: Sequence[Any], slots: Tensor, q: Tensor | None, kv: KVLayer) -> None:
        slots, q_heads = slots.contiguous(), 0 if q is None else q.shape[1]
        outputs = address(slots, torch.int64, len(new)), address(q, new.dtype), *_caches(kv, new.dtype)
        dtypes = DTYPES[new.dtype], CACHE_DTYPES[kv[0].dtype]
        self.c.rotate_and_write(*dtypes, *inputs, *outputs, len(slots), q_heads, *self._sizes(kv[0]))

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
        q, tables, count = q.contiguous(), runs.block_tables.contiguous(), len(runs.seq_lens)
        starts, lens = runs.query_start_loc.contiguous(), runs.seq_lens.contiguous()
        out, heads, width = q.new_empty(q.shape), q.shape[1], tables.shape[1]
        size = len(q) * heads * head_dim_of(kv[0])
        inputs = address(q, q.dtype, size), *_caches(kv, q.dtype), address(tables, torch.int32, count * width), width
        lengths = address(starts, torch.int32, count + 1), address(lens, torch.int32), *more
        options = spec.scale, spec.soft_cap or 0.0, window_of(spec), address(sinks, torch.float32, heads)
        dtypes, sizes = (DTYPES[q.dtype], CACHE_DTYPES[kv[0].dtype]), (count, heads, *self._sizes(kv[0]))
        function(*dtypes, *inputs, *lengths, out.data_ptr(), *sizes, *options)
        return out

    def _sizes(self, cache: Tensor) -> tuple[int, ...]:
        """K/V heads, head_dim, tokens in a block, and elements between two blocks."""
        return cache.shape[2], head_dim_of(cache), self.block_size, cache.stride(0)


def head_dim_of(cache: Tensor) -> int:
    """Of K or V as these kernels keep it."""
    return cache.shape[3] // TILE - SCALE_BYTES * (cache.dtype is torch.int8)


def _caches(kv: KVLayer, dtype: torch.dtype) -> tuple[int, int]:
    """Addresses of K and V of one layer, each block of which is in one piece, of a dtype or int8."""
    k, v = kv
    _, _, heads, size = k.shape
    is_like_k = v.dtype is k.dtype and v.shape == k.shape and v.stride() == k.stride() and v.is_cpu
    if k.dtype not in (dtype, torch.int8) or not is_like_k or not k.is_cpu or k.stride()[1:] != (heads * size, size, 1):
        raise wrong(k, f"{dtype} or int8 on cpu with blocks in one piece, of k as of v {v.dtype} {list(v.shape)}")
    return k.data_ptr(), v.data_ptr()


def num_shared(runs: Runs, spec: AttentionSpec) -> int:
    """Leading tokens that decodes read once for all; none where they are out of sight sooner or later."""
    return runs.num_shared if spec.window is None else 0


def _heads_in_one_piece(x: Tensor) -> Tensor:
    """[tokens, heads, head_dim] as it is, or if the heads of a token have gaps between them, a copy without."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
