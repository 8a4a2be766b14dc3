"""The attention protocol: what a step tells a backend, what a backend can do, and how one is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoengine.config import ModelConfig
from nanoengine.engine.messages import Phase
from nanoengine.errors import InvalidConfig
from nanoengine.layers.norm import RMSNorm
from nanoengine.layers.rotary import Angles

KVLayer = tuple[Tensor, Tensor]
"""K and V of one layer, each of the shape that the backend asked for."""


@dataclass
class AttentionMetadata:
    """Where the K/V of one step are written, and what each of its sequences reads.

    Everything is computed from (tokens in the cache, new tokens) of this step alone. The lists repeat what the tensors say,
    so that no backend must read a tensor back from the device to know a shape.
    """

    phase: Phase
    kv_cache: list[KVLayer]
    query_start_loc: Tensor  # [num_seqs + 1] int32: the new tokens of sequence i are [start[i], start[i + 1])
    seq_lens: Tensor  # [num_seqs] int32: tokens that attention sees, the new ones included
    block_tables: Tensor  # [num_seqs, max_blocks] int32; behind the blocks of seq_len tokens, any blocks of the pool
    slot_mapping: Tensor  # [num_tokens] int64: block id * block_size + offset of each new token; -1 is not written
    query_lens_list: list[int]
    seq_lens_list: list[int]
    plan: Any = None  # what a backend works out in the first layer and needs again in every other


class AttentionBackend(Protocol):
    """One way to compute paged attention.

    `rotate_and_write` is called with the whole batch before any attention of the same layer: sequences of one step may read
    each other's blocks. Queries and results are [num_tokens, num_heads, head_dim].
    """

    name: str
    description: str
    block_major: bool
    """Whether the K/V of all layers of a block lie side by side: a block is then copied, and first touched, in one piece."""
    capturable: bool
    """Whether a CUDA graph can record `decode`: it never waits for the device, and launches the same whatever it holds."""

    def __init__(self, block_size: int) -> None: ...

    @staticmethod
    def why_not(device: torch.device, dtype: torch.dtype, model: ModelConfig, block_size: int) -> str | None:
        """The reason that this backend cannot run here; None if it can."""
        ...

    def kv_shape(self, num_blocks: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of the K cache (and of the V cache) of one layer; its first dimension is blocks."""
        ...

    def rotate_and_write(
        self,
        qkv: Tensor,
        q_norm: RMSNorm,
        k_norm: RMSNorm,
        angles: Angles,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Norm and rotate q and k by head, write k and v into the cache, and return q.

        qkv is [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: all heads of q, then of k, then of v.
        """
        ...

    def prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor: ...

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor: ...


def choose_backend(
    name: str, device: torch.device, dtype: torch.dtype, model: ModelConfig, block_size: int
) -> tuple[AttentionBackend, str]:
    """The backend of that name, or for "auto" the fastest that can run here; and why faster ones cannot.

    Raises:
        InvalidConfig: no such backend, or it cannot run here; the message says why.
    """
    from nanoengine.attention.flash_attn import FlashAttention
    from nanoengine.attention.native import NativeAttention
    from nanoengine.attention.torch_reference import TorchAttention
    from nanoengine.attention.torch_varlen import TorchVarlenAttention
    from nanoengine.attention.triton import TritonAttention

    on_cuda: tuple[type[AttentionBackend], ...] = (
        FlashAttention,
        TorchVarlenAttention,
        TritonAttention,
        TorchAttention,
    )
    on_cpu: tuple[type[AttentionBackend], ...] = (NativeAttention, TorchAttention)
    backends = {backend.name: backend for backend in (*on_cuda, *on_cpu)}
    if name != "auto" and name not in backends:
        raise InvalidConfig(f"attention_backend is {name!r}: it must be one of auto, {', '.join(backends)}")
    best_first = on_cuda if device.type == "cuda" else on_cpu
    reasons: dict[str, str] = {}
    for backend in best_first if name == "auto" else [backends[name]]:
        reason = backend.why_not(device, dtype, model, block_size)
        if reason is None:
            return backend(block_size), _list(reasons)
        reasons[backend.name] = reason
    raise InvalidConfig(f"no attention backend can run: {_list(reasons)}")


def _list(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
