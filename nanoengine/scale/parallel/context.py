"""Decode context parallelism: each rank has the K/V of some tokens, for models with fewer K/V heads than ranks.

The tokens of a sequence are cut into parts, and rank r has every part i with i % ranks == r. Attention of one device adds up the
same parts (docs/determinism.md): a rank computes its parts as one device would, and the parts of all ranks are merged in the
order of one device, so the bits are equal. A block has block_size tokens; each rank stores the same number of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanoengine.core.attention import AttentionSpec, KVLayer, Runs
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.inputs import InputBatch, PackedStep
from nanoengine.core.model_runner import ModelRunner
from nanoengine.core.startup import Startup
from nanoengine.kernels.native.attention import NativeAttention, num_shared
from nanoengine.models.model_config import ModelConfig
from nanoengine.scale.parallel.communicator import SharedMemory
from nanoengine.scale.parallel.group import RankGroup

PART = 256
"""Tokens of a part, as in attention_parts.h."""

TOKENS_AT_ONCE = 16
"""New tokens of the longest sequence in one exchange of results among ranks."""


def check_context(startup: Startup, ranks: int) -> None:
    """Raise InvalidConfig for a model, an attention backend or a block size without context parallelism."""
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


def local_slots(slots: Tensor, block_size: int, ranks: int, rank: int) -> Tensor:
    """Slots of this rank for slots of one device, [n] int64 each; -1 for tokens of other ranks."""
    blocks, offsets = slots // block_size, slots % block_size
    is_local = (slots >= 0) & (offsets // PART % ranks == rank)
    local = blocks * (block_size // ranks) + offsets // (PART * ranks) * PART + offsets % PART
    return torch.where(is_local, local, -1)


def row_bytes(config: ModelConfig, max_len: int) -> int:
    """Upper bound of the bytes that a rank sends in one exchange."""
    return TOKENS_AT_ONCE * _token_bytes(max_len, config.num_heads, config.head_dim)


class ContextAttention(NativeAttention):
    """Attention of a rank with some tokens of all heads.

    Args:
        whole: the attention of one device.
        communicator: of the ranks, which exchange partial results in its memory.
    """

    def __init__(self, whole: NativeAttention, communicator: SharedMemory):
        ranks = communicator
        super().__init__(whole.block_size // ranks.size, c=whole.c)  # tokens of a block that this rank stores
        self.quantized = whole.quantized
        self._slot_bytes = ranks.slot_bytes
        self._seat = ranks.memory.data_ptr(), ranks.rank, ranks.size, ranks.slot_bytes, ranks.seconds

    def decode(self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        """Attention of new tokens, in decodes and in chunks of prompts: the same products in the same order."""
        at_once = self._slot_bytes // _token_bytes(max(runs.seq_lens_list), *q.shape[1:])
        if len(q) <= at_once:
            return self._decode(q, kv, runs, spec, sinks, num_shared(runs, spec))
        outs, start = [], 0
        for i, count in enumerate(runs.query_lens_list):
            for first in range(0, count, at_once):
                last = min(first + at_once, count)
                part = Runs(
                    query_start_loc=torch.tensor([0, last - first], dtype=torch.int32, device="cpu"),
                    seq_lens=(runs.seq_lens[i : i + 1] - (count - last)).clamp(min=0),
                    block_tables=runs.block_tables[i : i + 1],
                    query_lens_list=[last - first],
                    seq_lens_list=[runs.seq_lens_list[i] - (count - last)],
                )
                outs.append(self._decode(q[start + first : start + last], kv, part, spec, sinks, 0))
            start += count
        return torch.cat(outs)

    prefill = decode

    def _decode(
        self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None, shared: int
    ) -> Tensor:
        return self._attend(self.c.attention_decode, q, kv, runs, spec, sinks, shared, *self._seat)


class ContextRunner(ModelRunner):
    """Runner of a rank with some tokens of all heads: it does not write K/V of other tokens.

    Args:
        group: of the ranks.
        rest: arguments of `ModelRunner`.
    """

    def __init__(self, group: RankGroup, *rest: Any):
        super().__init__(*rest)
        self._group = group

    def batch(self, packed: PackedStep) -> InputBatch:
        batch, ranks = super().batch(packed), self._group.communicator
        for metadata in {id(each): each for each in batch.metadata}.values():  # layers of one KV group share it
            metadata.slot_mapping = local_slots(metadata.slot_mapping, self.block_size, ranks.size, ranks.rank)
        return batch


def _token_bytes(num_tokens: int, num_heads: int, head_dim: int) -> int:
    """Bytes of the partial results for one new token of a sequence: sums, a largest score and a total for each head and part."""
    return 4 * (head_dim + 2) * num_heads * -(-num_tokens // PART)
