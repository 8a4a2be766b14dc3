"""The Triton backend against the torch backend, given the same tokens; and where it can run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux on x86-64 alone")

from nanoengine.attention import triton as module
from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.attention.triton import TritonAttention
from nanoengine.core.attention import AttentionSpec
from nanoengine.kernels.triton.tuning import DEFAULTS
from tests.attention.every_backend import write_in_torch
from tests.attention.paged import PLAIN, Heads, Pool, Sequences, assert_attended, exact_pool
from tests.attention.test_flash_attn_results import each_alone

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEAR = {torch.float32: 1e-5, torch.float16: 2.0**-7, torch.bfloat16: 2.0**-5}
"""Largest difference between two backends that both round, relative to a value of size 1 or more."""


@pytest.fixture(autouse=True)
def everything_is_on_the_device() -> Iterator[None]:
    with DEVICE:
        yield


def sequences_of(heads: Heads, block_size: int, lens: list[int], dtype: torch.dtype = torch.float32) -> Sequences:
    with torch.device("cpu"):  # where the random numbers come from
        sequences = Sequences(heads, block_size, lens, dtype)
    sequences.qkv = [x.to(DEVICE) for x in sequences.qkv]
    sequences.norms = [x.to(DEVICE) for x in sequences.norms]
    sequences.sinks = sequences.sinks.to(DEVICE)
    return sequences


def triton_pool(sequences: Sequences, spec: AttentionSpec = PLAIN) -> Pool:
    return Pool(sequences, TritonAttention(sequences.block_size), spec=spec)


def assert_near(out: Tensor, expected: Tensor) -> None:
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=NEAR[out.dtype], atol=NEAR[out.dtype])


@pytest.mark.parametrize("dtype", NEAR, ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("heads", [Heads(2, 2, 32), Heads(1, 3, 16)])
def test_it_is_near_the_torch_backend(heads: Heads, dtype: torch.dtype) -> None:
    """From chunk to chunk, and then token by token."""
    sequences = sequences_of(heads, 16, [18, 35, 51], dtype)
    pools = triton_pool(sequences), Pool(sequences, TorchAttention(16))
    for starts, ends in (([0, 0, 0], [1, 16, 30]), ([1, 16, 30], [16, 33, 49])):
        assert_near(*(pool.prefill(starts, ends) for pool in pools))
    for step in range(2):
        assert_near(*(pool.decode([17 + step, 34 + step, 50 + step]) for pool in pools))


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("decoding", [False, True])
def test_it_is_exact_in_float32(decoding: bool, block_size: int) -> None:
    lens = [1, 16, 17, 65]
    sequences = sequences_of(Heads(1, 2, 32), block_size, lens)
    pools = triton_pool(sequences), exact_pool(sequences)
    if not decoding:
        starts = [0] * len(lens)
        results = [pool.prefill(starts, lens) for pool in pools]
    else:
        starts = [n - 1 for n in lens]
        for pool in pools:
            pool.fill()
        results = [pool.decode(lens) for pool in pools]
    assert_attended(*results, starts, lens)


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(1.0, window=20),
        AttentionSpec(1.0, sinks=True),
        AttentionSpec(1.0, soft_cap=2.0),
        AttentionSpec(1.0, window=40, sinks=True, soft_cap=5.0),
    ],
    ids=str,
)
def test_every_feature_is_passed_on(spec: AttentionSpec) -> None:
    """In a step of decodes and chunks."""
    lens, starts = [17, 66, 40, 60], [16, 65, 0, 35]
    sequences = sequences_of(Heads(1, 2, 32), 16, lens)
    pools = triton_pool(sequences, spec), exact_pool(sequences, spec=spec)
    for pool in pools:
        pool.fill(starts)
    assert_attended(*(pool.mixed(2, starts, lens) for pool in pools), starts, lens, spec)


@pytest.mark.parametrize("spec", [PLAIN, AttentionSpec(1.0, window=20, sinks=True)], ids=str)
@pytest.mark.parametrize("num_decodes", [3, 4])
def test_several_tokens_are_decoded_as_each_alone(
    num_decodes: int, spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step of decodes and a chunk, and of decodes alone."""
    lens, starts = [5, 66, 33, 60], [2, 65, 31, 55]
    sequences = sequences_of(Heads(1, 2, 32), 16, lens)
    pool, exact = Pool(sequences, TritonAttention(16), one_go=False, spec=spec), exact_pool(sequences, spec=spec)
    monkeypatch.setattr(pool.backend, "write_kv", write_in_torch)  # the interpreter takes its time for every token
    pool.fill(starts)
    assert_attended(pool.mixed(num_decodes, starts, lens), each_alone(exact, starts, lens), starts, lens, spec)


def test_each_token_is_written_into_its_slot_and_nothing_else_is() -> None:
    pool = triton_pool(sequences_of(Heads(2, 2, 32), 16, [21]))
    pool.fill([21])
    for cache in (pool.k_cache, pool.v_cache):
        assert cache.isfinite().sum() == 21 * 2 * 32


def test_the_shape_of_its_cache_has_blocks_first_and_heads_before_tokens() -> None:
    assert TritonAttention(32).kv_shape(7, 3, 64) == (7, 3, 32, 64)


def test_it_is_tuned_as_it_is_told_or_as_this_gpu_was(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, told = replace(DEFAULTS, decode_stages=5), replace(DEFAULTS, decode_stages=9)
    monkeypatch.setattr(module, "load_tuning", lambda: chosen)
    assert TritonAttention(16).tuning is chosen
    assert TritonAttention(16, told).tuning is told


def test_engines_do_not_count_together() -> None:
    """Their launches may run at the same time."""
    first, second = TritonAttention(16), TritonAttention(16)
    assert first._workspace.counters(1, DEVICE).data_ptr() != second._workspace.counters(1, DEVICE).data_ptr()


# ---- where it can run


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", NEAR)
def test_it_runs_where_triton_does(dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    assert TritonAttention.unsupported_reason(DEVICE, dtype, head_dim, block_size) is None


@pytest.mark.parametrize("block_size", [1, 8, 24, 48, 512])
def test_unsupported_reason_with_other_blocks(block_size: int) -> None:
    reason = TritonAttention.unsupported_reason(DEVICE, torch.bfloat16, 64, block_size)
    assert reason == f"block_size {block_size} is not a power of two from 16 to 256"


@pytest.mark.parametrize("head_dim", [8, 80, 96, 512])
def test_unsupported_reason_with_other_heads(head_dim: int) -> None:
    reason = TritonAttention.unsupported_reason(DEVICE, torch.bfloat16, head_dim, 16)
    assert reason == f"head_dim {head_dim} is not a power of two from 16 to 256"


def test_unsupported_reason_in_other_dtypes() -> None:
    reason = TritonAttention.unsupported_reason(DEVICE, torch.float64, 64, 16)
    assert reason is not None
    assert "float64" in reason


def test_unsupported_reason_where_triton_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "unsupported_reason", lambda device: f"nothing runs on {device.type}")
    reason = TritonAttention.unsupported_reason(DEVICE, torch.bfloat16, 64, 16)
    assert reason == f"nothing runs on {DEVICE.type}"


@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((10, 0), True)])
def test_unsupported_reason_on_older_gpus(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], runs: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    reason = TritonAttention.unsupported_reason(torch.device("cuda"), torch.bfloat16, 64, 16)
    assert reason == (None if runs else "the GPU has compute capability 7.5, and 8.0 is the least")
