"""K/V of which each rank has some tokens ("decode context parallelism"), for models with fewer K/V heads than ranks.

The tokens of a sequence are cut into parts, and rank r has every part i with i % ranks == r. The parts are those in which
attention adds up (docs/determinism.md), so a rank makes of its own what one device would, and merging all of them in order gives
its bits. A block has as many tokens as the user says; each rank keeps its share of every block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanoengine.attention.native import NativeAttention, num_shared
from nanoengine.core.attention import AttentionSpec, KVLayer, Runs
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.kernels import CoreKernels, PlacedTokens
from nanoengine.core.startup import Startup
from nanoengine.models.model_config import ModelConfig
from nanoengine.parallel.communicator import SharedMemory

PART = 256
"""Tokens that stay together, as attention_parts.h has it."""

TOKENS_AT_ONCE = 16
"""Of the longest sequence, which the ranks have room for in what they exchange."""


def check_context(startup: Startup, ranks: int) -> None:
    """
    Raises:
        InvalidConfig: the model, the backend or the blocks do not allow for it.
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
    """Where this rank keeps tokens whose slots are those of one device; -1 for tokens of other ranks."""
    blocks, offsets = slots // block_size, slots % block_size
    is_own = (slots >= 0) & (offsets // interleave % ranks == rank)
    own = blocks * (block_size // ranks) + offsets // (interleave * ranks) * interleave + offsets % interleave
    return torch.where(is_own, own, -1)


def row_bytes(config: ModelConfig, max_len: int) -> int:
    """What ranks exchange at once, at most."""
    return TOKENS_AT_ONCE * _token_bytes(max_len, config.num_heads, config.head_dim)


class SharedContext:
    """What a rank does otherwise than the backend that it computes with, if it has some tokens of all heads."""

    def __init__(self, backend: NativeAttention, kernels: CoreKernels, communicator: SharedMemory):
        own = communicator
        self._backend, self._communicator, self._block_size = backend, own, backend.block_size
        self._where = own.memory.data_ptr(), own.rank, own.size, own.slot_bytes, own.seconds
        self._place: Callable[..., PlacedTokens] = kernels.compute_slot_mapping
        backend.block_size //= own.size  # of what is kept here
        backend.decode = backend.prefill = self.attend  # type: ignore[method-assign]
        kernels.compute_slot_mapping = self.compute_slot_mapping  # type: ignore[method-assign, assignment]

    def compute_slot_mapping(self, *given: Tensor | int) -> PlacedTokens:
        placed, own = self._place(*given), self._communicator
        slots = local_slots(placed.slot_mapping, self._block_size, own.size, own.rank)
        return placed._replace(slot_mapping=slots)

    def attend(self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        """Of new tokens in decodes and in chunks: the same products in the same order."""
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
    """Of what ranks make of the parts of a sequence for one of its tokens: sums, a largest score and a total for each head."""
    return 4 * (head_dim + 2) * num_heads * -(-num_tokens // PART)
