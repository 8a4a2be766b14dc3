"""Decode context parallelism: each rank has the K/V of some tokens, for models with fewer K/V heads than ranks.

The tokens of a sequence are cut into parts, and rank r has every part i with i % ranks == r. Attention of one device adds up the
same parts (docs/determinism.md): a rank computes its parts as one device would, and the parts of all ranks are merged in the
order of one device, so the bits are equal. A block has block_size tokens; each rank keeps its share of every block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanoengine.core.attention import AttentionSpec, KVLayer, Runs
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.kernels import CoreKernels, PlacedTokens
from nanoengine.core.startup import Startup
from nanoengine.kernels.native.attention import NativeAttention, num_shared
from nanoengine.models.model_config import ModelConfig
from nanoengine.scale.parallel.communicator import SharedMemory

PART = 256
"""Tokens that stay together, as attention_parts.h has it."""

TOKENS_AT_ONCE = 16
"""New tokens of the longest sequence for which the ranks exchange results at once."""


def check_context(startup: Startup, ranks: int) -> None:
    """Check that the model, the attention backend and the block size allow for it.

    Raises:
        InvalidConfig: one of them does not.
    """
    name, size = f"decode_context_parallel_size is {ranks}", startup.block_size
    windows = [window for window in startup.windows or () if window is not None]
    if windows:
        raise InvalidConfig(f"{name}, but layers of the model see windows or chunks of {windows[0]} tokens: use 1")
    if startup.backend.name != "native":
        raise InvalidConfig(f"{name}, which only the native attention backend computes, not {startup.backend.name}")
    if size % (ranks * PART):
        raise InvalidConfig(
            f"{name}, and block_size is {size}: it must be a multiple of {ranks * PART}, so that each rank has whole parts of "
            f"{PART} tokens"
        )


def local_slots(slots: Tensor, block_size: int, ranks: int, rank: int, interleave: int = PART) -> Tensor:
    """Slots of one device -> slots of this rank; -1 for tokens of other ranks."""
    blocks, offsets = slots // block_size, slots % block_size
    is_own = (slots >= 0) & (offsets // interleave % ranks == rank)
    own = blocks * (block_size // ranks) + offsets // (interleave * ranks) * interleave + offsets % interleave
    return torch.where(is_own, own, -1)


def row_bytes(config: ModelConfig, max_len: int) -> int:
    """Most bytes that a rank sends at once."""
    return TOKENS_AT_ONCE * _token_bytes(max_len, config.num_heads, config.head_dim)


class SharedContext:
    """Replaces methods of an attention backend and of kernels in a rank that has some tokens of all heads."""

    def __init__(self, backend: NativeAttention, kernels: CoreKernels, communicator: SharedMemory):
        own = communicator
        self._backend, self._communicator, self._block_size = backend, own, backend.block_size
        self._where = own.memory.data_ptr(), own.rank, own.size, own.slot_bytes, own.seconds
        self._place: Callable[..., PlacedTokens] = kernels.compute_slot_mapping
        backend.block_size //= own.size  # tokens of a block that this rank keeps
        backend.decode = backend.prefill = self.attend  # type: ignore[method-assign]
        kernels.compute_slot_mapping = self.compute_slot_mapping  # type: ignore[method-assign, assignment]

    def compute_slot_mapping(self, *given: Tensor | int) -> PlacedTokens:
        placed, own = self._place(*given), self._communicator
        slots = local_slots(placed.slot_mapping, self._block_size, own.size, own.rank)
        return placed._replace(slot_mapping=slots)

    def attend(self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        """Attention of new tokens, in decodes and in chunks of prompts: the same products in the same order."""
        at_once = self._communicator.slot_bytes // _token_bytes(max(runs.seq_lens_list), *q.shape[1:])
        if len(q) <= at_once:
            return self._decode(q, kv, runs, spec, sinks, num_shared(runs, spec))
        outs, start = [], 0
        for i, count in enumerate(runs.query_lens_list):
            for first in range(0, count, at_once):
                last = min(first + at_once, count)
                piece = Runs(
                    query_start_loc=torch.tensor([0, last - first], dtype=torch.int32, device="cpu"),
                    seq_lens=(runs.seq_lens[i : i + 1] - (count - last)).clamp(min=0),
                    block_tables=runs.block_tables[i : i + 1],
                    query_lens_list=[last - first],
                    seq_lens_list=[runs.seq_lens_list[i] - (count - last)],
                )
                outs.append(self._decode(q[start + first : start + last], kv, piece, spec, sinks, 0))
            start += count
        return torch.cat(outs)

    def _decode(
        self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None, shared: int
    ) -> Tensor:
        backend = self._backend
        return backend._attend(backend.c.attention_decode, q, kv, runs, spec, sinks, shared, *self._where)


def _token_bytes(num_tokens: int, num_heads: int, head_dim: int) -> int:
    """Bytes of the partial results for one new token of a sequence: sums, a largest score and a total for each head and part."""
    return 4 * (head_dim + 2) * num_heads * -(-num_tokens // PART)
