"""An int8 cache beside one that is not quantized and holds what is read from the first: every backend says the same of both."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.attention.backend import AttentionBackend
from nanoengine.core.attention import AttentionSpec
from nanoengine.kernels.kv_int8 import dequantize, quantize
from tests.attention.paged import PLAIN, Pool, Sequences


def both_pools(backend: AttentionBackend, sequences: Sequences, spec: AttentionSpec = PLAIN) -> tuple[Pool, Pool]:
    """The int8 cache comes first. Nothing is normed or rotated: what is written is known to the bit."""
    quantized = Pool(sequences, backend, norms=False, rotated=False, spec=spec, quantized=True)
    return quantized, Pool(_rounded(sequences), backend, norms=False, rotated=False, spec=spec)


def assert_same(out: Tensor, expected: Tensor, *, rounded_alike: bool = True) -> None:
    """Bit by bit, if what is dequantized is rounded as torch rounds it: Triton's interpreter cuts bfloat16 off."""
    assert out.isfinite().all()
    if rounded_alike or out.dtype is torch.float32:
        assert torch.equal(out, expected), f"{(out.double() - expected.double()).abs().max()} apart"
    else:
        torch.testing.assert_close(out, expected, rtol=2.0**-5, atol=2.0**-5 * float(expected.abs().max()))


def _rounded(sequences: Sequences) -> Sequences:
    """The same with what an int8 cache makes of K and V."""
    heads = sequences.heads
    after = Sequences(heads, sequences.block_size, sequences.lens, sequences.dtype)
    after.tables, after.num_blocks, after.sinks = sequences.tables, sequences.num_blocks, sequences.sinks
    num_q = heads.num * heads.group * heads.dim
    for qkv, copy in zip(sequences.qkv, after.qkv, strict=True):
        kv = dequantize(*quantize(qkv[:, num_q:].unflatten(1, (-1, heads.dim))), qkv.dtype)
        copy.copy_(torch.cat((qkv[:, :num_q], kv.flatten(1)), 1))
    return after
