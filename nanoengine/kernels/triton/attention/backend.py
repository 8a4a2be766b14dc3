"""Paged attention in Triton kernels, for NVIDIA GPUs; with TRITON_INTERPRET=1 they run on the CPU, slowly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanoengine.core.attention import AttentionSpec, KVLayer, Runs
from nanoengine.kernels import flash_attn_4
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.kernels.operations import Changes
from nanoengine.kernels.reference.kv_int8 import SCALE_BYTES
from nanoengine.kernels.triton.launch import unsupported_reason
from nanoengine.kernels.triton.tuning import Tuning, load_tuning

if TYPE_CHECKING:
    from nanoengine.kernels.triton.attention.paged_cache import PagedCache

BLOCK_SIZES = tuple(1 << i for i in range(4, 9))
HEAD_DIMS = range(16, 257, 16)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

SHORTEST_WHOLE = 128
"""Tokens of a step from which on K and V stay beside the queries, for a prompt that is computed from them."""

CAPABILITY = (8, 0)
"""The least compute capability: earlier ones do not copy asynchronously, nor multiply bfloat16."""


class TritonAttention(AttentionBackend):
    """K/V are read once, from their blocks, for all query heads that share them; sums are float32.

    In a block, all tokens of a head lie together: a head is read in pieces as large as they can be. Scales follow numbers.

    Args:
        tuning: how its kernels are launched; what was chosen for this GPU if nothing is said.
    """

    name = "triton"
    features = frozenset({"window", "chunked", "sinks", "soft_cap"})
    capturable = True
    captures_prompts = True
    quantizes = True

    def __init__(self, block_size: int, tuning: Tuning | None = None):
        # Triton is not installed everywhere, and unsupported_reason must not need it.
        from nanoengine.kernels.triton.attention.kv_int8 import views
        from nanoengine.kernels.triton.attention.paged_cache import PagedCache
        from nanoengine.kernels.triton.attention.paged_decode import paged_decode
        from nanoengine.kernels.triton.attention.paged_prefill import paged_prefill
        from nanoengine.kernels.triton.attention.rotate_and_write import rotate_and_write, write_kv
        from nanoengine.kernels.triton.attention.whole_prompt import can_attend, keys_and_values, whole_prompt
        from nanoengine.kernels.triton.workspace import Workspace

        self.block_size = block_size
        self.tuning = tuning or load_tuning()
        self._rotate_and_write, self._write = rotate_and_write, write_kv
        self._prefill, self._decode = paged_prefill, paged_decode
        self._new_cache, self._int8_views = PagedCache, views
        self._can_attend, self._keys_and_values, self._whole_prompt = can_attend, keys_and_values, whole_prompt
        self._workspace = Workspace()
        self._fused_qkv = 0  # address of the last projection in which K and V stay behind the queries
        self.flash_prompt = 0
        """New tokens of the longest run from which on flash-attn 4 computes a step's prompts; 0: never. It must be prepared."""

    @property
    def knows_whole_prompts(self) -> bool:  # type: ignore[override]
        return bool(self.tuning.whole_prompt_tile)

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        if block_size not in BLOCK_SIZES:
            return f"block_size {block_size} is not a power of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}"
        if head_dim not in HEAD_DIMS:
            return f"head_dim {head_dim} is not a multiple of {HEAD_DIMS.step} up to {HEAD_DIMS[-1]}"
        if dtype not in DTYPES:
            return f"it computes in bfloat16, float16 and float32, not in {str(dtype).removeprefix('torch.')}"
        if reason := unsupported_reason(device):
            return reason
        if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < CAPABILITY:
            has, needs = (".".join(map(str, version)) for version in (capability, CAPABILITY))
            return f"the GPU has compute capability {has}, and {needs} is the least"
        return None

    def kv_shape(self, num_blocks: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        if self.quantized:
            return (num_blocks, num_kv_heads, self.block_size * (head_dim + SCALE_BYTES))
        return (num_blocks, num_kv_heads, self.block_size, head_dim)

    def rotate_and_write(self, qkv: Tensor, changes: Changes, kv: KVLayer, slot_mapping: Tensor) -> Tensor:
        in_place = bool(self.tuning.whole_prompt_tile) and len(qkv) >= SHORTEST_WHOLE
        self._fused_qkv = qkv.untyped_storage().data_ptr() if in_place else 0
        launch = self.tuning.launch(len(qkv))
        return self._rotate_and_write(qkv, changes, self.cache(kv), slot_mapping, launch, in_place=in_place)

    def write_kv(self, k: Tensor, v: Tensor, kv: KVLayer, slot_mapping: Tensor) -> None:
        self._write(k, v, self.cache(kv), slot_mapping)

    def decode(self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        return self._decode(q, self.cache(kv), runs, spec, sinks, self.tuning, self._workspace)

    def prefill(self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        cache, longest = self.cache(kv), runs.longest
        if (
            (tile := self.tuning.whole_prompt_tile)
            and runs.whole
            and longest == len(q)
            and spec == AttentionSpec(spec.scale)
        ):
            new = self._keys_and_values(q, cache.k.shape[2])
            is_fused = q.untyped_storage().data_ptr() == self._fused_qkv
            if new is not None and is_fused and cache.k_scales is None and self._can_attend(q):
                return self._whole_prompt(q, *new, spec.scale, tile)
        is_long = longest >= max(self.flash_prompt, flash_attn_4.LEAST_TOKENS)
        is_long &= len(runs.seq_lens) <= flash_attn_4.MOST_RUNS
        if self.flash_prompt and is_long and spec.window is None and cache.k_scales is None:
            return flash_attn_4.attend(q, cache[:2], runs, spec, sinks)
        return self._prefill(q, cache, runs, spec, sinks, self.tuning)

    def cache(self, kv: KVLayer) -> PagedCache:
        """K and V as kernels take them, and the scales of an int8 cache."""
        k, v = kv
        if k.dtype is not torch.int8:
            return self._new_cache(k.transpose(1, 2), v.transpose(1, 2))
        (k, k_scales), (v, v_scales) = (self._int8_views(part, self.block_size) for part in kv)
        return self._new_cache(k, v, k_scales, v_scales)
