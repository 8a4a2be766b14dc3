"""Sampling of a full batch over a real vocabulary, with all filters and ties, keeps the contract."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux on x86-64 alone")

from nanoengine.kernels.triton.operations import TritonKernels
from tests.gpu.marks import needs_gpu
from tests.kernels.sampled_rows import Rows, check_tokens, random_logits

FULL = [pytest.param(256, 151_936, kind, marks=needs_gpu) for kind in ("random", "ties", "peaked", "banned")]


@pytest.mark.parametrize(("count", "vocab_size", "kind"), [(6, 1500, "ties"), *FULL])
def test_a_full_batch(count: int, vocab_size: int, kind: str) -> None:
    temperatures, top_ps, min_ps = (0.6, 1.0, 0.0, 1.5), (1.0, 0.95, 0.5, 0.999), (0.0, 0.0, 0.02)
    top_ks = (0, 20, 1, 1000, vocab_size // 3)
    params: list[dict[str, float]] = [
        {
            "temperature": temperatures[i % 4],
            "top_k": top_ks[i % 5],
            "top_p": top_ps[i // 4 % 4],
            "min_p": min_ps[i % 3],
        }
        for i in range(count)
    ]
    check_tokens(TritonKernels(), Rows(params, seed=1), random_logits(kind, count, vocab_size, seed=3))
