"""Attention over a paged K/V cache: the spec of a layer, the metadata of a step, and the interface of a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

KVLayer = tuple[Tensor, Tensor]
"""K and V of one layer, each of the shape `kv_shape`."""


@dataclass(frozen=True)
class AttentionSpec:
    """Causal attention of a layer. A backend names the fields that it supports."""

    scale: float  # factor of the scores, before the softmax
    window: int | None = None  # tokens visible to a query, itself included; None: all up to it
    chunked: bool = False  # whether windows are chunks, which begin at multiples of their size
    sinks: bool = False  # whether every query head has an attention sink: a score without a value
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)


@dataclass
class Runs:
    """A batch of runs of new tokens. The lists are host copies of the tensors; in a recorded step, upper bounds."""

    query_start_loc: Tensor  # [num_seqs + 1] int32: the new tokens of sequence i are [start[i], start[i + 1])
    seq_lens: Tensor  # [num_seqs] int32: visible tokens, the new ones included; 0 in a padding row
    block_tables: Tensor  # [num_seqs, max_blocks] int32; entries of blocks outside all windows may be anything
    query_lens_list: list[int]
    seq_lens_list: list[int]
    num_shared: int = 0  # leading tokens of a common prefix, whose blocks are the same in all decodes
    plan: Any = None  # of a backend, computed in the first layer and reused in the others

    @cached_property
    def longest(self) -> int:
        """Longest run, in new tokens."""
        return max(self.query_lens_list)

    @cached_property
    def whole(self) -> bool:
        """Whether no run has tokens before the new ones."""
        return self.seq_lens_list == self.query_lens_list


@dataclass(kw_only=True)
class AttentionMetadata(Runs):
    """All runs of one step in the layers of a KV group, and the slots of their K/V.

    The leading runs are decodes: one new token each, or a few, where drafts are verified with it. The rest are chunks of any
    length. Both are cut out once per step.
    """

    kv_cache: list[KVLayer]
    slot_mapping: Tensor  # [num_tokens] int64: block id * block_size + offset of each new token; -1 is not written
    num_decodes: int
    rows: Tensor | None = None  # [num_seqs] int32: row of each sequence in the runner

    @cached_property
    def decodes(self) -> Runs | None:
        """The leading runs; None if there are none."""
        return self._runs(0, self.num_decodes, self.num_shared)

    @cached_property
    def chunks(self) -> Runs | None:
        """The runs behind the decodes, whose first token is token 0 here; None if there are none."""
        return self._runs(self.num_decodes, len(self.query_lens_list), 0)

    @cached_property
    def num_decode_tokens(self) -> int:
        """New tokens of the decodes, which precede the tokens of the chunks."""
        return sum(self.query_lens_list[: self.num_decodes])

    def _runs(self, first: int, last: int, num_shared: int) -> Runs | None:
        if first == last:
            return None
        starts, part = self.query_start_loc[first : last + 1], slice(first, last)
        return Runs(
            query_start_loc=starts - self.num_decode_tokens if first else starts,
            seq_lens=self.seq_lens[part],
            block_tables=self.block_tables[part],
            query_lens_list=self.query_lens_list[part],
            seq_lens_list=self.seq_lens_list[part],
            num_shared=num_shared,
        )


class CoreAttentionBackend(ABC):
    """An implementation of paged attention.

    K and V of the whole batch are written before any attention of the same layer: sequences of one step may read each other's
    blocks. No result depends on a slot without a token: it may hold anything, NaN included.
    """

    name: str
    default_block_size = 16  # tokens

    def __init__(self, block_size: int):
        self.block_size = block_size

    @abstractmethod
    def kv_shape(self, num_blocks: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of the K cache (and of the V cache) of one layer; its first dimension is blocks."""

    @abstractmethod
    def write_kv(self, k: Tensor, v: Tensor, kv: KVLayer, slot_mapping: Tensor) -> None:
        """Write K and V of new tokens, each [num_tokens, num_kv_heads, head_dim], perhaps strided views."""

    @abstractmethod
    def decode(self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        """Attention of runs of a few tokens each, most often one. A padding row may get anything."""

    @abstractmethod
    def prefill(self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        """Attention of runs of any length."""

    def attend(
        self, q: Tensor, kv: KVLayer, metadata: AttentionMetadata, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of all new tokens: q and the result are [num_tokens, num_heads, head_dim].

        Args:
            sinks: [num_heads] float32, the scores of `spec.sinks`. The scale and the soft cap do not touch them.
        """
        decodes, chunks = metadata.decodes, metadata.chunks
        if decodes is None:
            assert chunks is not None, "a step without tokens"
            return self.prefill(q, kv, chunks, spec, sinks)
        if chunks is None:
            return self.decode(q, kv, decodes, spec, sinks)
        count = metadata.num_decode_tokens
        decoded = self.decode(q[:count], kv, decodes, spec, sinks)
        return torch.cat((decoded, self.prefill(q[count:], kv, chunks, spec, sinks)))
