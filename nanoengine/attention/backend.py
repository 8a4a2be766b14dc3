"""The attention protocol: what a layer asks for, what a step tells a backend, what a backend can do, and how one is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoengine.errors import InvalidConfig
from nanoengine.model_config import ModelConfig

KVLayer = tuple[Tensor, Tensor]
"""K and V of one layer, each of the shape that the backend asked for."""


@dataclass(frozen=True)
class AttentionSpec:
    """The attention that a layer computes, over the tokens up to each query. It is stated once, when the layer is built."""

    scale: float  # factor of the scores, before the softmax
    window: int | None = None  # tokens that a query sees, its own included; None: all up to it
    sinks: bool = (
        False  # whether every query head has a score of its own, which takes weight from the tokens and adds no value
    )
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)


@dataclass
class Runs:
    """Runs of new tokens that are computed together: those of one sequence after those of another.

    Everything is computed from (tokens in the cache, new tokens) of this step alone. The lists repeat what the tensors say,
    so that no backend must read a tensor back from the device to know a shape.
    """

    query_start_loc: Tensor  # [num_seqs + 1] int32: the new tokens of sequence i are [start[i], start[i + 1])
    seq_lens: Tensor  # [num_seqs] int32: tokens that attention sees, the new ones included; 0 in a padding row
    block_tables: (
        Tensor  # [num_seqs, max_blocks] int32; behind the blocks of seq_len tokens, and before those seen, any
    )
    query_lens_list: list[int]
    seq_lens_list: list[int]
    num_shared: int = 0  # leading tokens, in whole blocks, that all sequences have in the very same blocks
    plan: Any = None  # what a backend works out in the first layer and needs again in every other

    @cached_property
    def longest(self) -> int:
        """Most new tokens of a run: every layer asks for it."""
        return max(self.query_lens_list)


@dataclass
class AttentionMetadata:
    """Where the K/V of one step are written, and what each of its runs reads, in the layers of one KV group.

    The leading runs are decodes: one new token each, or a few, where drafts are verified with it. The rest are chunks of any
    length. Most fields are those of `Runs`, for all runs of the step; `decodes` and `chunks` are its parts, cut once per step.
    """

    kv_cache: list[KVLayer]
    slot_mapping: Tensor  # [num_tokens] int64: block id * block_size + offset of each new token; -1 is not written
    num_decodes: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    query_lens_list: list[int]
    seq_lens_list: list[int]
    num_shared: int = 0  # of the decodes: see `Runs`

    @cached_property
    def decodes(self) -> Runs | None:
        """The leading runs, of a few new tokens each; None if there are none."""
        runs = self._runs(0, self.num_decodes)
        if runs is not None:
            runs.num_shared = self.num_shared
        return runs

    @cached_property
    def num_decode_tokens(self) -> int:
        """New tokens of the decodes; those of the chunks stand behind them."""
        return sum(self.query_lens_list[: self.num_decodes])

    @cached_property
    def chunks(self) -> Runs | None:
        """The runs behind the decodes, whose first token is token 0 here; None if there are none."""
        return self._runs(self.num_decodes, len(self.query_lens_list))

    def _runs(self, first: int, last: int) -> Runs | None:
        """Runs [first, last): all the decodes, or all the chunks."""
        if first == last:
            return None
        starts, tables, lens = self.query_start_loc, self.block_tables, self.seq_lens
        if last - first == len(self.query_lens_list):
            return Runs(starts, lens, tables, self.query_lens_list, self.seq_lens_list)
        starts = starts[first : last + 1]
        return Runs(
            query_start_loc=starts - self.num_decode_tokens if first else starts,
            seq_lens=lens[first:last],
            block_tables=tables[first:last],
            query_lens_list=self.query_lens_list[first:last],
            seq_lens_list=self.seq_lens_list[first:last],
        )


class RotateAndWrite(Protocol):
    """Norms and rotations of q and k, and the write of K and V, in one go."""

    def __call__(
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
        """Norm (RMSNorm) and rotate (half-split layout) every head of q and k, write k and v, and return q.

        Args:
            qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: all heads of q, then of k, then of v.
            q_weight, k_weight: [head_dim], of the norms; if both are None, nothing is normed.
            eps: of both norms.
            cos, sin: [num_tokens, 1, head_dim / 2] float32; if both are None, nothing is rotated.
            k_cache, v_cache: the cache of the layer, of the shape that the backend asked for.
            slot_mapping: [num_tokens] int64; -1 is not written.

        Returns:
            [num_tokens, num_heads, head_dim].
        """
        ...


class AttentionBackend(Protocol):
    """One way to compute paged attention.

    K and V of the whole batch are written before any attention of the same layer: sequences of one step may read each other's
    blocks.
    """

    name: str
    description: str
    features: frozenset[str]
    """Fields of `AttentionSpec`, beside the scale, that it heeds."""
    block_major: bool
    """Whether the K/V of all layers of a block lie side by side: a block is then copied, and first touched, in one piece."""
    capturable: bool
    """Whether a CUDA graph can record a batch of decodes: it never waits for the device, and launches the same whatever it
    holds."""
    reads_shared_once: bool
    """Whether it heeds `Runs.num_shared`, so that a step in which sequences share blocks is better not recorded."""
    captures_prompts: bool
    """Whether it can record chunks, too: of their lengths, it looks at those on the device, and at bounds that the host gives."""
    quantizes: bool
    """Whether it can keep K/V as int8 (`kernels/kv_int8.py`): then everything here takes caches of that dtype, too."""

    def __init__(self, block_size: int) -> None: ...

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, model: ModelConfig, block_size: int) -> str | None:
        """The reason that this backend cannot run here; None if it can."""
        ...

    def kv_shape(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, *, quantized: bool = False
    ) -> tuple[int, ...]:
        """Shape of the K cache (and of the V cache) of one layer; its first dimension is blocks.

        Args:
            quantized: of a cache of dtype int8, which has room for the scales in each block.
        """
        ...

    @property
    def rotate_and_write(self) -> RotateAndWrite | None:
        """What it offers in place of norms, rotations and `write_kv` one after the other; None if nothing."""
        ...

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write K and V of new tokens, each [num_tokens, num_kv_heads, head_dim], into the slots of `slot_mapping`.

        Between two tokens of k or v there may be a gap. An int8 cache takes them as they would be in another one, quantized.
        """
        ...

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """What each new token sees: q and the result are [num_tokens, num_heads, head_dim]; a padding row may get anything.

        Args:
            sinks: [num_heads] float32, the scores of `spec.sinks`. The scale and the soft cap do not touch them.
        """
        ...


def choose_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    model: ModelConfig,
    block_size: int,
    specs: Sequence[AttentionSpec] = (),
    *,
    quantized: bool = False,
) -> tuple[AttentionBackend, str]:
    """The backend of that name, or for "auto" the fastest that can run here; and why faster ones cannot.

    Args:
        specs: what the layers of the model ask for; none of them asks for more than a scale if nothing is said.
        quantized: whether K/V are to be kept as int8.

    Raises:
        InvalidConfig: no such backend, or it cannot run here, or not for these layers; the message says why.
    """
    from nanoengine.attention.flash_attn import FlashAttention
    from nanoengine.attention.native import NativeAttention
    from nanoengine.attention.torch_reference import TorchAttention
    from nanoengine.attention.triton import TritonAttention

    on_cuda: tuple[type[AttentionBackend], ...] = (
        FlashAttention,
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
        reason = backend.unsupported_reason(device, dtype, model, block_size) or _missing_feature(backend, specs)
        if reason is None and quantized and not backend.quantizes:
            reason = "it has no int8 cache, and kv_cache_dtype is 'int8': choose 'auto'"
        if reason is None:
            return backend(block_size), _list(reasons)
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
