"""flash-attn 2 beyond the core: windows, and K/V that Triton writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanoengine.core.attention import AttentionSpec, KVLayer
from nanoengine.core.flash_attention import CausalFlashAttention
from nanoengine.core.torch_flash import NO_WINDOW
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.kernels.triton.launch import unsupported_reason as triton_unsupported_reason


class FlashAttention(CausalFlashAttention, AttentionBackend):
    """K/V are written by Triton's kernels where there are any."""

    features = frozenset({"window"})
    capturable = True

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        if block_size & (block_size - 1) and triton_unsupported_reason(device) is None:
            return f"Triton places its tokens, and block_size {block_size} is no power of two"
        return CausalFlashAttention.unsupported_reason(device, dtype, head_dim, block_size)

    def __init__(self, block_size: int):
        super().__init__(block_size)
        self._write: Callable[..., None] | None = None
        if triton_unsupported_reason(torch.device("cuda")) is None:
            from nanoengine.kernels.triton.attention.rotate_and_write import rotate_and_write, write_kv

            self.rotate_and_write, self._write = rotate_and_write, write_kv

    def kv_shape(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, *, quantized: bool = False
    ) -> tuple[int, ...]:
        assert not quantized
        return super().kv_shape(num_blocks, num_kv_heads, head_dim)

    def write_kv(self, k: Tensor, v: Tensor, kv: KVLayer, slot_mapping: Tensor) -> None:
        if self._write is None:
            super().write_kv(k, v, kv, slot_mapping)
        else:
            self._write(k, v, kv, slot_mapping)

    def options(self, spec: AttentionSpec) -> dict[str, Any]:
        """A window of the package is counted without the query's own token."""
        return {**super().options(spec), "window_size": NO_WINDOW if spec.window is None else (spec.window - 1, 0)}
