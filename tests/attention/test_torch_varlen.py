"""Where the backend over torch's varlen_attn runs, what it asks of which torch, and whether the stand-in is like the real one.

What it computes is tested together with the other backends of its layout.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoengine.attention import torch_varlen
from nanoengine.attention.backend import AttentionMetadata, AttentionSpec
from nanoengine.attention.torch_varlen import SINCE, TorchVarlenAttention, torch_release
from tests.attention import stand_ins
from tests.attention.stand_ins import installed, pretend_gpu
from tests.support import TOY

CPU = torch.device("cpu")


def unsupported_reason(dtype: torch.dtype = torch.bfloat16, block_size: int = 256, head_dim: int = 64) -> str | None:
    return TorchVarlenAttention.unsupported_reason(CPU, dtype, replace(TOY, head_dim=head_dim), block_size)


# ---- where it runs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [256, 512])
def test_it_runs_in_half_precision(dtype: torch.dtype, block_size: int) -> None:
    with installed("torch_varlen"):
        assert unsupported_reason(dtype, block_size) is None


@pytest.mark.parametrize("release", [(2, 11), (1, 99)])
def test_with_an_older_torch(release: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    with installed("torch_varlen"):
        monkeypatch.setattr(torch_varlen, "torch_release", lambda: release)
        assert (
            unsupported_reason() == f"torch {release[0]}.{release[1]} has no block_table in varlen_attn: it takes 2.12"
        )


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.13.0+cpu", (2, 13)), ("2.9.1", (2, 9)), ("3.0.0a0+git12", (3, 0)), ("2.12.dev2", (2, 12))],
)
def test_the_release_of_torch(version: str, release: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert torch_release() == release


@pytest.mark.parametrize(
    ("capability", "reason"),
    [(None, "the device is cpu"), ((7, 0), "it takes compute capability 8.0, and this GPU has 7.0")],
)
def test_on_other_devices(capability: tuple[int, int] | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with installed("torch_varlen"):
        pretend_gpu(monkeypatch, capability)
        assert reason in (unsupported_reason() or "")


def test_in_float32() -> None:
    with installed("torch_varlen"):
        assert unsupported_reason(torch.float32) == "it computes in float16 or bfloat16, and dtype is float32"


@pytest.mark.parametrize(("dim", "reason"), [(4, "multiple of 8"), (512, "up to 256"), (96, "power of two")])
def test_with_other_heads(dim: int, reason: str) -> None:
    with installed("torch_varlen"):
        found = unsupported_reason(head_dim=dim) or ""
    assert f"head_dim {dim}" in found
    assert reason in found


@pytest.mark.parametrize("block_size", [16, 128, 300])
def test_with_other_blocks(block_size: int) -> None:
    with installed("torch_varlen"):
        assert unsupported_reason(block_size=block_size) == (
            f"torch's varlen_attn reads K/V in pages of a multiple of 256 tokens, and block_size is {block_size}: "
            "set block_size=256, or use another backend"
        )


def test_where_another_implementation_took_the_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed("torch_varlen"):
        monkeypatch.setattr("torch.nn.attention.current_flash_attention_impl", lambda: "FA3")
        assert unsupported_reason() == "flash attention in torch was replaced by FA3: restore torch's own"


# ---- what it asks for


@pytest.mark.parametrize(
    ("release", "decoding", "num_heads", "window", "expected"),
    [
        ((2, 12), False, 4, None, None),
        ((2, 12), True, 2, None, None),
        ((2, 12), True, 4, 128, None),
        ((2, 13), False, 4, None, 1),
        ((2, 13), False, 4, 128, 1),
        ((2, 13), True, 2, None, 1),
        ((2, 13), True, 4, None, None),
        ((2, 13), True, 4, 128, 1),
        ((2, 14), False, 2, None, 1),
    ],
)
def test_sequences_are_split_only_where_torch_does_it_rightly(
    release: tuple[int, int],
    decoding: bool,
    num_heads: int,
    window: int | None,
    expected: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []

    def varlen_attn(q: Tensor, *_: object, **options: Any) -> Tensor:
        asked.append(options)
        return q

    with installed("torch_varlen"):
        monkeypatch.setattr(torch_varlen, "torch_release", lambda: release)
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
        backend = TorchVarlenAttention(256)
    q, cache = torch.zeros(1, num_heads, 16), torch.zeros(2, 256, 2, 16)
    one = torch.ones(1, dtype=torch.int32)
    metadata = AttentionMetadata([], one, int(decoding), torch.tensor([0, 1]), one, one[None], [1], [1])
    backend.attend(q, cache, cache, metadata, AttentionSpec(0.1, window))
    assert asked[0].get("num_splits") == expected
    assert ("num_splits" in asked[0]) == (expected is not None), "torch 2.12 refuses the option itself"
    without = (-1, -1) if decoding else (-1, 0)
    assert asked[0]["window_size"] == (without if window is None else (window - 1, 0)), "its own token is not counted"


def test_several_queries_see_what_is_before_them_and_are_not_split() -> None:
    asked: list[tuple[int, dict[str, Any]]] = []
    with installed("torch_varlen"):
        backend = TorchVarlenAttention(256)
    backend._attend = lambda q, _k, _v, _starts, _keys, max_q, _max_k, **options: asked.append((max_q, options)) or q
    starts, lens = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 4], [9, 9]))
    metadata = AttentionMetadata([], lens, 2, starts, lens, lens[:, None], [1, 3], [9, 9])
    backend.attend(torch.zeros(4, 4, 16), *torch.zeros(2, 2, 256, 2, 16), metadata, AttentionSpec(0.1))
    ((longest, options),) = asked
    assert (longest, options["window_size"], options["num_splits"]) == (3, (-1, 0), 1)


def test_a_captured_decode_is_prepared_for_the_longest_sequence_that_its_tables_hold() -> None:
    longest = []
    with installed("torch_varlen"):
        backend = TorchVarlenAttention(256)
    backend._attend = lambda q, _k, _v, _starts, _keys, _max_q, max_k, **_: longest.append(max_k) or q
    one = torch.ones(1, dtype=torch.int32)
    tables = torch.ones(1, 7, dtype=torch.int32)
    metadata = AttentionMetadata([], one, 1, torch.tensor([0, 1]), one, tables, [1], [0])
    backend.attend(torch.zeros(1, 2, 16), *torch.zeros(2, 2, 256, 2, 16), metadata, AttentionSpec(0.1))
    assert longest == [7 * 256]


# ---- the stand-in


@pytest.mark.skipif(torch_release() < SINCE, reason="this torch has no block_table in varlen_attn")
def test_the_stand_in_has_the_signature_of_the_real_function() -> None:
    from torch.nn.attention.varlen import varlen_attn

    standing_in = inspect.signature(stand_ins.torch_functions()["varlen_attn"])
    real = inspect.signature(varlen_attn)
    found, expected = (
        [(p.name, p.kind, p.default) for p in signature.parameters.values()] for signature in (standing_in, real)
    )
    assert found == expected


def arguments() -> dict[str, Any]:
    """A prefill: 3 and 2 queries, of sequences of 300 and 2 tokens."""
    return {
        "query": torch.randn(5, 4, 16).half(),
        "key": torch.randn(4, 256, 2, 16).half(),
        "value": torch.randn(4, 256, 2, 16).half(),
        "cu_seq_q": torch.tensor([0, 3, 5], dtype=torch.int32),
        "cu_seq_k": torch.tensor([0, 300, 302], dtype=torch.int32),
        "max_q": 3,
        "max_k": 300,
        "scale": 0.25,
        "window_size": (-1, 0),
        "enable_gqa": True,
        "seqused_k": torch.tensor([300, 2], dtype=torch.int32),
        "block_table": torch.tensor([[2, 3], [1, 0]], dtype=torch.int32),
        "num_splits": 1,
    }


def test_the_stand_in_takes_what_is_right() -> None:
    assert stand_ins.torch_functions()["varlen_attn"](**arguments()).shape == (5, 4, 16)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("enable_gqa", False, "same number of heads"),
        ("cu_seq_k", None, "both set or both not set"),
        ("cu_seq_k", torch.tensor([0, 299, 301], dtype=torch.int32), "differ"),
        ("seqused_k", None, "without pages"),
        ("seqused_k", torch.tensor([300, 2]), "int32"),
        ("num_splits", None, "put together wrongly"),
        ("num_splits", 2, "put together wrongly"),
        ("window_size", 4, "pair of numbers"),
        ("key", torch.randn(4, 16, 2, 16).half(), "divisible by 256"),
    ],
)
def test_the_stand_in_refuses_what_is_wrong(name: str, value: Any, message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        stand_ins.torch_functions()["varlen_attn"](**arguments() | {name: value})
