"""Paged attention by flash-attn 2 (Dao, "FlashAttention-2", 2023), on NVIDIA GPUs since Ampere: the package's, or torch's."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.core.attention import AttentionSpec, KVLayer, Runs
from nanoengine.core.torch_attention import CausalTorchAttention
from nanoengine.kernels import torch_flash
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.kernels.triton.launch import unsupported_reason as triton_unsupported_reason

PAGE = 256  # it reads K/V in pages of a multiple of so many tokens
DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


class FlashAttention(CausalTorchAttention, AttentionBackend):
    """Prefill packs the queries of all sequences; decode splits long sequences among the multiprocessors. K/V are stored as
    `CausalTorchAttention` does, and written by Triton's kernels where there are any.
    """

    name = "flash_attn"
    default_block_size = PAGE
    features = frozenset({"window"})
    capturable = True
    row_dimensions = 2

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        if block_size & (block_size - 1) and triton_unsupported_reason(device) is None:
            return f"Triton computes its slot mapping, and block_size {block_size} is no power of two"
        version = capability(device)
        if version is None:
            return f"it runs on NVIDIA GPUs, and the device is {device.type}"
        if isinstance(missing := find_functions(), str):
            return missing
        if version < (8, 0):
            return f"it takes compute capability 8.0, and this GPU has {version[0]}.{version[1]}"
        if dtype not in DTYPES:
            return f"it computes in float16 or bfloat16, and dtype is {str(dtype).removeprefix('torch.')}"
        if head_dim % 8 or head_dim > MAX_HEAD_DIM:
            return f"head_dim {head_dim} is no multiple of 8 up to {MAX_HEAD_DIM}"
        if block_size % PAGE:
            return f"it reads pages of a multiple of {PAGE} tokens, and block_size is {block_size}: leave it out"
        return None

    def __init__(self, block_size: int):
        super().__init__(block_size)
        self.functions: Any = find_functions()
        if triton_unsupported_reason(torch.device("cuda")) is None:
            from nanoengine.kernels.triton.attention.rotate_and_write import rotate_and_write, write_kv

            self.rotate_and_write, self.write_kv = rotate_and_write, write_kv  # type: ignore[method-assign]

    def prefill(self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        assert sinks is None
        if runs.plan is None:  # where the keys of each sequence would start if all stood in one row
            runs.plan = F.pad(runs.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return self.functions.flash_attn_varlen_func(
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
        attended = self.functions.flash_attn_with_kvcache(
            q.unflatten(0, (-1, runs.longest)),
            *kv,
            cache_seqlens=runs.seq_lens,
            block_table=runs.block_tables,
            **self.options(spec),
        )
        return attended.flatten(0, 1)

    def options(self, spec: AttentionSpec) -> dict[str, Any]:
        """The spec of a layer as keyword arguments of the package. Its windows do not count the query's token."""
        window = torch_flash.NO_WINDOW if spec.window is None else (spec.window - 1, 0)
        return {"softmax_scale": spec.scale, "causal": True, "window_size": window}


def find_functions() -> ModuleType | str:
    """The module that has them: the package, or torch's copy in its stead; or why there is none."""
    if not isinstance(missing := find_package(), str):
        return missing
    reason = torch_flash.unsupported_reason()
    return torch_flash if reason is None else f"{missing}, and {reason}"


def find_package() -> ModuleType | str:
    """The package, or why it is not there."""
    try:
        package = importlib.import_module("flash_attn")
    except (ImportError, OSError, RuntimeError) as error:  # as when it was built for another torch
        return f"the package flash-attn cannot be imported ({error})"
    has_both = hasattr(package, "flash_attn_varlen_func") and hasattr(package, "flash_attn_with_kvcache")
    return package if has_both else "the package flash-attn is not of version 2"  # others share its folder


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU; None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
