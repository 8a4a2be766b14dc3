"""A step is cut into decodes and chunks once for all layers, and copied only where it has both.

That the parts are the right ones is shown by the contract of backends.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanoengine.core.attention import AttentionMetadata, AttentionSpec, CoreAttentionBackend

SAME: Any = SimpleNamespace(decode=lambda q, *_: q, prefill=lambda q, *_: q)
"""A backend whose results are its queries."""


def batch(num_decodes: int) -> AttentionMetadata:
    """Four runs of 1, 1, 3 and 2 new tokens; as decodes, of one each."""
    lens = [1] * 4 if num_decodes == 4 else [1, 1, 3, 2]
    return AttentionMetadata(
        kv_cache=[],
        slot_mapping=torch.arange(sum(lens)),
        num_decodes=num_decodes,
        query_start_loc=torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32),
        seq_lens=torch.tensor([9, 1, 3, 8], dtype=torch.int32),
        block_tables=torch.arange(12, dtype=torch.int32).view(4, 3),
        query_lens_list=lens,
        seq_lens_list=[9, 1, 3, 8],
    )


@pytest.mark.parametrize("num_decodes", [0, 4])
def test_where_all_runs_are_of_a_kind_nothing_is_copied(num_decodes: int) -> None:
    metadata, cache = batch(num_decodes), torch.zeros(1)
    q = torch.randn(len(metadata.slot_mapping), 2, 8)
    assert CoreAttentionBackend.attend(SAME, q, (cache, cache), metadata, AttentionSpec(1.0)) is q
    runs, other = (metadata.decodes, metadata.chunks)[:: 1 if num_decodes else -1]
    assert other is None
    for field in ("query_start_loc", "seq_lens", "block_tables"):
        part, whole = getattr(runs, field), getattr(metadata, field)
        assert (part.data_ptr(), part.shape) == (whole.data_ptr(), whole.shape)


def test_a_batch_is_cut_once_for_all_layers_into_tensors_as_kernels_take_them() -> None:
    metadata = batch(2)
    assert metadata.decodes is metadata.decodes is not None
    assert metadata.chunks is metadata.chunks is not None
    for part in (metadata.decodes, metadata.chunks):
        assert part.query_start_loc.dtype == part.seq_lens.dtype == torch.int32
        assert part.query_start_loc.is_contiguous()
