"""flash-attn 4 on an NVIDIA GPU: long runs against the definition in float64, in whatever shared memory holds before them."""

from __future__ import annotations

import pytest
import torch

from nanoengine.core.attention import AttentionSpec
from nanoengine.kernels import flash_attn_4
from nanoengine.kernels.triton.attention.backend import TritonAttention
from tests.gpu.marks import needs_gpu
from tests.kernels.attention.paged import Heads, Pool, Sequences, assert_attended
from tests.kernels.formulas import DEVICE

pytestmark = needs_gpu

LOOSER = 4
"""Times the error of one rounding: weights are rounded before they are multiplied by values."""


@pytest.mark.parametrize("start", [0, 500])
@pytest.mark.parametrize(
    ("heads", "asked"),
    [
        (Heads(2, 2, 128), {}),
        (Heads(2, 2, 128), {"window": 300}),
        (Heads(1, 8, 64), {"sinks": True}),
        (Heads(2, 1, 96), {"soft_cap": 3.0}),
        (Heads(1, 2, 256), {"window": 1}),
    ],
    ids=str,
)
def test_a_long_run_alone_is_attention_by_its_definition(heads: Heads, asked: dict[str, object], start: int) -> None:
    if reason := flash_attn_4.unsupported_reason(DEVICE, torch.bfloat16, heads.dim):
        pytest.skip(reason)
    with DEVICE, torch.inference_mode():
        backend, end = TritonAttention(16), start + 555
        backend.flash_prompt = flash_attn_4.LEAST_TOKENS
        spec = AttentionSpec(heads.dim**-0.5, **asked)  # type: ignore[arg-type]
        sequences = Sequences(heads, 16, [end], torch.bfloat16)
        pool = Pool(sequences, backend, norms=False, rotated=False, spec=spec)
        pool.fill([start])
        q = pool.write_span([0], [start], [end])
        pool.forget([0], [start])
        nan = torch.full((4096, 4096), torch.nan, dtype=torch.bfloat16)
        nan @ nan  # leaves NaN in the shared memory of all multiprocessors
        out = pool.attend(0, q, [0], [start], [end])
        assert_attended(out, pool.exact([start], [end]), LOOSER)
