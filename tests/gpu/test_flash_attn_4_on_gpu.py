"""flash-attn 4 on an NVIDIA GPU: prompts against the definition in float64, whatever shared memory holds before them."""

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
        (Heads(1, 8, 64), {"sinks": True}),
        (Heads(2, 1, 96), {"soft_cap": 3.0}),
        (Heads(1, 2, 256), {}),
    ],
    ids=str,
)
def test_long_prompts_are_attention_by_its_definition(heads: Heads, asked: dict[str, object], start: int) -> None:
    if reason := flash_attn_4.unsupported_reason(DEVICE, torch.bfloat16, heads.dim):
        pytest.skip(reason)
    with DEVICE, torch.inference_mode():
        backend, end = TritonAttention(16), start + 555
        backend.flash_prompt = flash_attn_4.LEAST_TOKENS
        spec = AttentionSpec(heads.dim**-0.5, **asked)  # type: ignore[arg-type]
        starts, ends = [start, 0, 0], [end, 7, 300]
        pool = Pool(Sequences(heads, 16, ends, torch.bfloat16), backend, norms=False, rotated=False, spec=spec)
        pool.fill(starts)
        q = pool.write_span(range(3), starts, ends)
        nan = torch.full((4096, 4096), torch.nan, dtype=torch.bfloat16)
        nan @ nan  # leaves NaN in the shared memory of all multiprocessors
        out = pool.attend(0, q, range(3), starts, ends)
        assert_attended(out, pool.exact(starts, ends), LOOSER)
