"""Paged attention by torch itself: `torch.nn.attention.varlen`, which is FlashAttention-2 (Dao, 2023) compiled into torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanoengine.attention.backend import AttentionSpec, Runs
from nanoengine.attention.nhd_layout import (
    NHDLayout,
    key_starts,
    nhd_unsupported_reason,
    pages_unsupported_reason,
    same_lengths,
)
from nanoengine.model_config import ModelConfig

SINCE = (2, 12)
"""The first torch whose varlen_attn has block_table."""

SPLITS = (2, 13)
"""Since this torch varlen_attn splits long sequences, those of packed queries too, of which it then writes the first sequence's
rows alone, unless it is told not to. Before, it did not split them, and refused to be told."""

ALL = (-1, -1)
"""A window to the left and right of the diagonal, which ends in the bottom right corner; -1 is without end."""


class TorchVarlenAttention(NHDLayout):
    """Prefill packs the queries of all sequences; decode does the same, and may do more with one query for each."""

    name = "torch_varlen"
    description = "torch.nn.attention.varlen over paged K/V"
    features = frozenset({"window"})

    def __init__(self, block_size: int):
        super().__init__(block_size)
        from torch.nn.attention.varlen import varlen_attn

        self._attend: Callable[..., Any] = varlen_attn
        self._unsplit = {"num_splits": 1} if torch_release() >= SPLITS else {}

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, model: ModelConfig, block_size: int) -> str | None:
        release = torch_release()
        if release < SINCE:
            has, takes = (".".join(map(str, version)) for version in (release, SINCE))
            return f"torch {has} has no block_table in varlen_attn: it takes {takes}"
        from torch.nn.attention import current_flash_attention_impl

        if current_flash_attention_impl() is not None:
            return f"flash attention in torch was replaced by {current_flash_attention_impl()}: restore torch's own"
        reason = nhd_unsupported_reason(device, dtype, model)
        return reason if reason is not None else pages_unsupported_reason("torch's varlen_attn", block_size)

    def prefill(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        runs: Runs,
        spec: AttentionSpec,
        sinks: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        return self._attend(
            q,
            k_cache,
            v_cache,
            runs.query_start_loc,
            key_starts(runs),
            runs.longest,
            max(runs.seq_lens_list),
            scale=spec.scale,
            window_size=_up_to_itself(spec),
            enable_gqa=True,
            seqused_k=runs.seq_lens,
            block_table=runs.block_tables,
            **self._unsplit,
        )

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        runs: Runs,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """One query sees all of its sequence, or the end of it; several are a chunk.

        Without a window, the query heads that share a K/V head stand where one query stands, and sequences are split rightly.
        """
        if same_lengths(q, runs) != 1:
            return self.prefill(q, k_cache, v_cache, runs, spec, sinks)
        grouped = spec.window is None and q.shape[1] > k_cache.shape[2]
        return self._attend(
            q,
            k_cache,
            v_cache,
            runs.query_start_loc,
            key_starts(runs),
            1,
            runs.block_tables.shape[1] * self.block_size,  # what a captured graph may meet, not what it met
            scale=spec.scale,
            window_size=ALL if spec.window is None else _up_to_itself(spec),
            enable_gqa=True,
            seqused_k=runs.seq_lens,
            block_table=runs.block_tables,
            **({} if grouped else self._unsplit),
        )


def _up_to_itself(spec: AttentionSpec) -> tuple[int, int]:
    """What a query sees to the left and right of itself: as many tokens before it as the layer's window has beside it."""
    return (-1 if spec.window is None else spec.window - 1, 0)


def torch_release() -> tuple[int, int]:
    """Major and minor version of torch."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    assert found is not None
    return int(found[1]), int(found[2])
