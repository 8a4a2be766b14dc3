"""What backends share whose kernels come from a package and read K/V as [block, token, head, dimension], the NHD layout.

It knows how K/V are written and where such kernels run, but no kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoengine.attention.backend import RotateAndWrite, Runs
from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.attention.two_kernels import TwoKernels
from nanoengine.kernels.triton.launch import unsupported_reason as triton_unsupported_reason
from nanoengine.model_config import ModelConfig

MAX_HEAD_DIM = 256

PAGE = 256
"""FlashAttention-2 reads K/V in pages of a multiple of so many tokens."""

DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
"""What the tensor cores multiply that these kernels are written for."""


class NHDLayout(TwoKernels):
    """The cache of one layer as a tensor of the shape that indexing suggests, written by Triton's kernels where there are any."""

    block_major = False
    capturable = True
    captures_prompts = False
    quantizes = False

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.rotate_and_write: RotateAndWrite | None = None
        self._write = TorchAttention(block_size).write_kv
        if triton_unsupported_reason(torch.device("cuda")) is None:
            from nanoengine.kernels.triton.rotate_and_write import rotate_and_write
            from nanoengine.kernels.triton.write_kv import write_kv

            self.rotate_and_write, self._write = rotate_and_write, write_kv

    def kv_shape(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, *, quantized: bool = False
    ) -> tuple[int, ...]:
        assert not quantized
        return (num_blocks, self.block_size, num_kv_heads, head_dim)

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        self._write(k, v, k_cache, v_cache, slot_mapping)


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU; None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def nhd_unsupported_reason(device: torch.device, dtype: torch.dtype, model: ModelConfig) -> str | None:
    """The reason that no version of FlashAttention can run here; None if one may."""
    found = capability(device)
    if found is None:
        return f"it runs on NVIDIA GPUs, and the device is {device.type}"
    if found < (8, 0):
        return f"it takes compute capability 8.0, and this GPU has {found[0]}.{found[1]}"
    if dtype not in DTYPES:
        return f"it computes in float16 or bfloat16, and dtype is {str(dtype).removeprefix('torch.')}"
    dim = model.head_dim
    if dim % 8 or dim > MAX_HEAD_DIM:
        return f"head_dim {dim} is no multiple of 8 up to {MAX_HEAD_DIM}"
    if dim & (dim - 1):
        return f"head_dim {dim} is no power of two, which the kernel that writes K/V takes"
    return None


def pages_unsupported_reason(reader: str, block_size: int) -> str | None:
    """The reason that FlashAttention-2 cannot read blocks of this size; None if it can."""
    if block_size % PAGE == 0:
        return None
    return (
        f"{reader} reads K/V in pages of a multiple of {PAGE} tokens, and block_size is {block_size}: "
        f"set block_size={PAGE}, or use another backend"
    )


def same_lengths(q: Tensor, runs: Runs) -> int | None:
    """How many of the queries [num_tokens, num_heads, head_dim] every run has, if all have as many; None if they differ.

    The host may know no more than bounds, which no run exceeds. Where they add up to the number of tokens, each is met.
    """
    longest = runs.longest
    return longest if len(q) == longest * len(runs.query_lens_list) else None


def key_starts(runs: Runs) -> Tensor:
    """[num_seqs + 1] int32: where the keys of each sequence would start if all stood in one row. Worked out once per step."""
    if runs.plan is None:
        runs.plan = F.pad(runs.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    return runs.plan
