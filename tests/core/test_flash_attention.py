"""The backend over flash-attn 2, with a stand-in for the package, keeps the contract of backends; and where it runs."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from nanoengine.core.attention import AttentionSpec
from nanoengine.core.flash_attention import FlashAttention
from tests.attention.contract import check_step
from tests.attention.every_backend import Kind
from tests.attention.paged import Heads, Pool, Sequences
from tests.attention.stand_ins import installed
from tests.core.paged_attention import in_contract

CPU = torch.device("cpu")
BACKEND = in_contract(FlashAttention)
KIND = Kind("flash_attn_2", (256,), (8, 16, 32), 560, 120_000, frozenset(), False)


def test_any_step_is_attention_by_its_definition() -> None:
    with installed("flash_attn_2", exact=True):
        for seed in range(40):
            check_step(KIND, BACKEND, seed)


def test_where_keys_start_is_worked_out_once() -> None:
    with installed("flash_attn_2", exact=True):
        pool = Pool(Sequences(Heads(2, 2, 8), 256, [3, 5, 300]), BACKEND(256))
        metadata, chunks = pool.metadata(0, range(3), [0, 0, 0], [3, 5, 300]), []
        q = pool.write_span(range(3), [0, 0, 0], [3, 5, 300])
        for _ in range(2):
            pool.backend.attend(q, pool.kv, metadata, AttentionSpec(0.3))
            assert metadata.chunks is not None
            chunks.append(metadata.chunks.plan)
    assert chunks[0].tolist() == [0, 3, 8, 308]
    assert chunks[0] is chunks[1]


def reason(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, block_size: int = 256) -> str:
    """Why it cannot run; empty if it can."""
    return FlashAttention.unsupported_reason(CPU, dtype, head_dim, block_size) or ""


@pytest.mark.parametrize(
    ("capability", "asked", "said"),
    [
        ("right", {}, ""),
        ("right", {"dtype": torch.float16, "head_dim": 128, "block_size": 512}, ""),
        ("right", {"dtype": torch.float32}, "it computes in float16 or bfloat16, and dtype is float32"),
        ("right", {"head_dim": 4}, "head_dim 4 is no multiple of 8 up to 256"),
        ("right", {"head_dim": 512}, "head_dim 512 is no multiple of 8 up to 256"),
        ("right", {"block_size": 128}, "multiple of 256 tokens, and block_size is 128: set block_size=256"),
        (None, {}, "the device is cpu"),
        ((7, 5), {}, "it takes compute capability 8.0"),
    ],
    ids=str,
)
def test_where_it_runs(capability: Any, asked: dict[str, Any], said: str) -> None:
    with installed("flash_attn_2", capability=capability):
        assert said in reason(**asked) if said else not reason(**asked)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert reason().startswith("the package flash-attn is not installed")
