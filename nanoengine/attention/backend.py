"""What attention backends offer beyond the core's, and how one is chosen."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from nanoengine.core.attention import AttentionSpec, CoreAttentionBackend, KVLayer
from nanoengine.core.model_config import DenseConfig
from nanoengine.errors import InvalidConfig, shown

Changes = tuple[Tensor | None, Tensor | None, float, Tensor | None, Tensor | None]
"""What happens to the heads of q and k: (q_weight, k_weight, eps, cos, sin). The weights of the norms are [head_dim] float32, cos
and sin [num_tokens, 1, head_dim / 2] float32; None for both of a pair leaves the norm, or the rotation, out."""

RotateAndWrite = Callable[[Tensor, Changes, KVLayer, Tensor], Tensor]
"""(qkv, changes, kv, slot_mapping) -> q [num_tokens, num_heads, head_dim]: RMSNorm and rotation (half-split layout) of all heads
of q and k, and the write of k and v, in one go. qkv is [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: all heads of q,
then of k, then of v."""


class AttentionBackend(CoreAttentionBackend):
    """A backend that may keep K/V as int8, be recorded, and read what sequences share once."""

    features: frozenset[str] = frozenset()
    """Fields of `AttentionSpec`, beside the scale, that it heeds."""
    rotate_and_write: RotateAndWrite | None = None
    """What it offers in place of norms, rotations and `write_kv` one after the other."""
    block_major = False
    """Whether the K/V of all layers of a block lie side by side: a block is then copied, and first touched, in one piece."""
    capturable = False
    """Whether a CUDA graph can record a batch of decodes: it never waits for the device, and launches the same whatever it
    holds."""
    captures_prompts = False
    """Whether it can record chunks, too: of their lengths, it looks at those on the device, and at bounds that the host gives."""
    reads_shared_once = False
    """Whether it heeds `Runs.num_shared`, so that a step in which sequences share blocks is better not recorded."""
    quantizes = False
    """Whether it can keep K/V as int8 (`kernels/kv_int8.py`): then everything here takes caches of that dtype, too."""

    @staticmethod
    @abstractmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        """The reason that this backend cannot run here; None if it can."""

    @abstractmethod
    def kv_shape(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, *, quantized: bool = False
    ) -> tuple[int, ...]:
        """Shape of the K cache (and of the V cache) of one layer; its first dimension is blocks.

        Args:
            quantized: of a cache of dtype int8, which has room for the scales in each block.
        """


def window_of(spec: AttentionSpec) -> int:
    """As kernels are told: 0 if there is none, and less than 0 if it stands still."""
    return -(spec.window or 0) if spec.chunked else spec.window or 0


def choose_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    model: DenseConfig,
    block_size: int | None,
    specs: Sequence[AttentionSpec] = (),
    *,
    quantized: bool = False,
) -> tuple[AttentionBackend, str]:
    """The backend of that name, or for "auto" the first that can run here; and why those before it cannot. On a GPU our own
    kernels come first: they alone have been measured there (benchmarks/gpu.md), and record prompts and drafts, too.

    Args:
        block_size: None: as the backend likes it.
        specs: what the layers of the model ask for; none of them asks for more than a scale if nothing is said.
        quantized: whether K/V are to be kept as int8.

    Raises:
        InvalidConfig: no such backend, or it cannot run here, or not for these layers; the message says why.
    """
    from nanoengine.attention.flash_attn import FlashAttention
    from nanoengine.attention.native import NativeAttention
    from nanoengine.attention.torch_reference import TorchAttention
    from nanoengine.attention.triton import TritonAttention

    on_cuda: tuple[type[AttentionBackend], ...] = (TritonAttention, FlashAttention, TorchAttention)
    on_cpu: tuple[type[AttentionBackend], ...] = (NativeAttention, TorchAttention)
    backends = {backend.name: backend for backend in (*on_cuda, *on_cpu)}
    if name != "auto" and name not in backends:
        raise InvalidConfig(f"attention_backend is {shown(name)}: it must be one of auto, {', '.join(backends)}")
    reasons: dict[str, str] = {}
    in_order = on_cuda if device.type == "cuda" else on_cpu
    for backend in in_order if name == "auto" else (backends[name],):
        size = block_size or backend.default_block_size
        reason = backend.unsupported_reason(device, dtype, model.head_dim, size) or _missing_feature(backend, specs)
        if reason is None and quantized and not backend.quantizes:
            reason = "it has no int8 cache, and kv_cache_dtype is 'int8': choose 'auto'"
        if reason is None:
            return backend(size), _list(reasons)
        reasons[backend.name] = reason
    raise InvalidConfig(f"no attention backend can run: {_list(reasons)}")


def _missing_feature(backend: type[AttentionBackend], specs: Sequence[AttentionSpec]) -> str | None:
    """What a layer asks for and a backend does not compute."""
    for spec in specs:
        for field in fields(spec):
            value = getattr(spec, field.name)
            if field.name not in ("scale", *backend.features) and value != field.default:
                return f"it has no {field.name}, and a layer of the model asks for {field.name}={value}"
    return None


def _list(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
