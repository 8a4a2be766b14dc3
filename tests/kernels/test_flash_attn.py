"""What the package's backend over flash-attn adds to the core's. What it computes is tested together with the other backends."""

from __future__ import annotations

import pytest
from torch import Tensor

from nanoengine.core.attention import AttentionSpec
from nanoengine.kernels import flash_attn
from nanoengine.kernels.flash_attn import FlashAttention
from tests.kernels.attention.paged import Heads, Pool, Sequences
from tests.kernels.attention.stand_ins import installed


def test_a_window_is_counted_without_the_own_token() -> None:
    with installed("flash_attn"):
        backend = FlashAttention(256)
    for asked, window in ((None, (-1, -1)), (1, (0, 0)), (40, (39, 0))):
        options = backend.options(AttentionSpec(0.1, window=asked))
        assert options == {"softmax_scale": 0.1, "causal": True, "window_size": window}


def test_kv_are_written_by_the_kernel_where_triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is made for Linux on x86-64 alone")
    written = []

    def rotate_and_write(qkv: Tensor, *arguments: object) -> Tensor:
        written.append(arguments)
        return qkv

    monkeypatch.setattr(flash_attn, "triton_unsupported_reason", lambda _: None)
    monkeypatch.setattr("nanoengine.kernels.triton.attention.rotate_and_write.rotate_and_write", rotate_and_write)
    sequences = Sequences(Heads(1, 1, 8), 256, [3])
    with installed("flash_attn"):
        pool = Pool(sequences, FlashAttention(256))
    pool.fill([3])
    (((q_weight, k_weight, eps, cos, sin), kv, slots),) = written
    assert (q_weight, k_weight, eps) == (pool.norms[0].weight, pool.norms[1].weight, pool.norms[0].eps)
    assert cos.shape == sin.shape == (3, 1, 4)
    assert slots.tolist() == sequences.slots(0, 0, 3)
    assert kv == pool.kv
