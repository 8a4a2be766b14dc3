"""How a step is cut into decodes and chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanoengine.core.attention import AttentionBackend, AttentionMetadata, AttentionSpec, Runs


class Recorder(AttentionBackend):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__(4)
        self.calls: list[tuple[str, Tensor, Runs]] = []
        self.results: list[Tensor] = []

    def kv_shape(self, *_: int) -> tuple[int, ...]:
        raise NotImplementedError

    def write_kv(self, *_: Tensor) -> None:
        raise NotImplementedError

    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, runs: Runs, *_: object) -> Tensor:
        return self._note("decode", q, runs, q + 1)

    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, runs: Runs, *_: object) -> Tensor:
        return self._note("prefill", q, runs, q + 2)

    def _note(self, kernel: str, q: Tensor, runs: Runs, result: Tensor) -> Tensor:
        self.calls.append((kernel, q, runs))
        self.results.append(result)
        return result


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


@pytest.mark.parametrize(("num_decodes", "kernel"), [(0, "prefill"), (4, "decode")])
def test_where_all_runs_are_of_a_kind_nothing_is_copied(num_decodes: int, kernel: str) -> None:
    backend, metadata, cache = Recorder(), batch(num_decodes), torch.zeros(1)
    q = torch.randn(len(metadata.slot_mapping), 2, 8)
    out = backend.attend(q, cache, cache, metadata, AttentionSpec(1.0))
    ((called, given_q, runs),) = backend.calls
    assert called == kernel
    assert given_q is q
    assert out is backend.results[0]
    for field in ("query_start_loc", "seq_lens", "block_tables"):
        part, whole = getattr(runs, field), getattr(metadata, field)
        assert (part.data_ptr(), part.shape) == (whole.data_ptr(), whole.shape)


def test_a_batch_is_cut_once_for_all_layers() -> None:
    """Into a part for each kernel, with tensors as it takes them. That it is the right one is shown by the contract."""
    backend, metadata, cache = Recorder(), batch(2), torch.zeros(1)
    for _ in range(2):
        backend.attend(torch.randn(7, 2, 8), cache, cache, metadata, AttentionSpec(1.0))
    assert [call[0] for call in backend.calls] == ["decode", "prefill"] * 2
    for kind in (0, 1):
        part = backend.calls[kind][2]
        assert part is backend.calls[kind + 2][2]
        assert part.query_start_loc.dtype == part.seq_lens.dtype == torch.int32
        assert part.query_start_loc.is_contiguous()
