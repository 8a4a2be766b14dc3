"""Kernels with specialized warps at full size, beside torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nanoengine.kernels.triton.attention.whole_prompt import whole_prompt
from nanoengine.kernels.triton.products.gated_product import gated_product
from tests.gpu.marks import needs_gpu

pytestmark = needs_gpu


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("num_tokens", [1, 130, 1024, 3001])
def test_a_prompt(num_tokens: int, tile: int) -> None:
    qkv = torch.randn(num_tokens, 32, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.split((16, 8, 8), dim=1)
    found = whole_prompt(q, k, v, 0.1, tile)
    wide_q, wide_k, wide_v = (part.transpose(0, 1)[None].float() for part in (q, k, v))
    exact = F.scaled_dot_product_attention(wide_q, wide_k, wide_v, is_causal=True, enable_gqa=True, scale=0.1)
    torch.testing.assert_close(found.float(), exact[0].transpose(0, 1), rtol=0.02, atol=0.02)
    assert all(torch.equal(whole_prompt(q, k, v, 0.1, tile), found) for _ in range(20))


@pytest.mark.parametrize("rows", [65, 257, 2049])
def test_gates(rows: int) -> None:
    x, weight = (torch.randn(n, 1024, device="cuda", dtype=torch.bfloat16) for n in (rows, 6144))
    found = gated_product(x, weight / 32, "silu")
    gate, up = (x.float() @ (weight / 32).float().T).chunk(2, dim=1)
    torch.testing.assert_close(found.float(), F.silu(gate) * up, rtol=0.02, atol=0.02)
    assert all(torch.equal(gated_product(x, weight / 32, "silu"), found) for _ in range(20))
