"""Paged attention by the package flash-attn, version 2 (Dao, "FlashAttention-2", 2023), on NVIDIA GPUs since Ampere."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.core.attention import AttentionSpec, KVLayer, Runs
from nanoengine.core.torch_attention import TorchAttention

PAGE = 256  # version 2 reads K/V in pages of a multiple of so many tokens
DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


class FlashAttention(TorchAttention):
    """Prefill packs the queries of all sequences; decode splits long sequences among the multiprocessors. K/V are kept and
    written as `TorchAttention` does.
    """

    name = "flash_attn"
    module, table = "flash_attn", "block_table"
    """The module of the package, and what it calls a block table."""

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        """The reason that this backend cannot run here; None if it can."""
        try:
            importlib.import_module("flash_attn")
        except (ImportError, OSError, RuntimeError) as error:
            return f"the package flash-attn is not installed, or for another torch ({error})"
        return gpu_unsupported_reason(device, dtype, head_dim) or page_unsupported_reason(block_size)

    def prefill(self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        assert sinks is None
        if runs.plan is None:  # where the keys of each sequence would start if all stood in one row
            runs.plan = F.pad(runs.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return importlib.import_module(self.module).flash_attn_varlen_func(
            q,
            *kv,
            cu_seqlens_q=runs.query_start_loc,
            cu_seqlens_k=runs.plan,
            max_seqlen_q=runs.longest,
            max_seqlen_k=max(runs.seq_lens_list),
            block_table=runs.block_tables,
            **self.options(spec),
        )

    def decode(self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        if len(q) != runs.longest * len(runs.query_lens_list):  # of several lengths
            return self.prefill(q, kv, runs, spec, sinks)
        attended = importlib.import_module(self.module).flash_attn_with_kvcache(
            q.unflatten(0, (-1, runs.longest)),
            *kv,
            cache_seqlens=runs.seq_lens,
            **{self.table: runs.block_tables},
            **self.options(spec),
        )
        return attended.flatten(0, 1)

    def options(self, spec: AttentionSpec) -> dict[str, Any]:
        """What a layer asks for, in the words of the package."""
        return {"softmax_scale": spec.scale, "causal": True}


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU; None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def gpu_unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason that no version of the package can run here; None if one may."""
    found = capability(device)
    if found is None:
        return f"it runs on NVIDIA GPUs, and the device is {device.type}"
    if found < (8, 0):
        return f"it takes compute capability 8.0, and this GPU has {found[0]}.{found[1]}"
    if dtype not in DTYPES:
        return f"it computes in float16 or bfloat16, and dtype is {str(dtype).removeprefix('torch.')}"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim} is no multiple of 8 up to {MAX_HEAD_DIM}"
    return None


def page_unsupported_reason(block_size: int) -> str | None:
    """The reason that version 2 cannot read blocks of this size; None if it can."""
    asks = f"flash-attn 2 reads K/V in pages of a multiple of {PAGE} tokens, and block_size is {block_size}"
    return f"{asks}: set block_size={PAGE}, or use another backend" if block_size % PAGE else None
