"""Which attention backend is chosen, and what is said when none can be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM
from nanoengine.core.attention import AttentionSpec, CoreAttentionBackend
from nanoengine.errors import InvalidConfig
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.kernels.capability import choose_backend
from nanoengine.kernels.flash_attn import FlashAttention
from nanoengine.kernels.native.attention import NativeAttention
from nanoengine.kernels.reference.attention import TorchAttention
from nanoengine.kernels.triton.attention import backend as triton_module
from nanoengine.kernels.triton.attention.backend import TritonAttention
from tests.kernels.marks import needs_kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HALF = torch.bfloat16


def choose(name: str, block_size: int = 16, head_dim: int = 64, *specs: AttentionSpec) -> tuple[str, str]:
    """The name of the backend on a CPU, and why faster ones were passed over."""
    backend, unavailable_backends = choose_backend(name, CPU, torch.float32, block_size, [head_dim], specs)
    return backend.name, unavailable_backends


# ---- on a CPU


@needs_kernels
def test_the_native_backend_is_preferred_where_it_can_run() -> None:
    for name in ("auto", "native"):
        assert choose(name, 48, 96) == ("native", "")
    assert choose("torch", 48, 96) == ("torch", "")


@pytest.mark.parametrize(("block_size", "head_dim"), [(8, 64), (16, 48), (5, 4)])
def test_auto_is_torch_where_the_native_backend_cannot_run(block_size: int, head_dim: int) -> None:
    name, unavailable_backends = choose("auto", block_size, head_dim)
    assert name == "torch"
    assert unavailable_backends.startswith("native: ")
    assert choose("torch", block_size, head_dim) == ("torch", ""), "none was passed over"
    with pytest.raises(InvalidConfig, match="no attention backend can run: native: "):
        choose("native", block_size, head_dim)


@needs_kernels
def test_start_up_says_who_was_passed_over(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.DEBUG, "nanoengine"),
        LLM(str(tiny), device="cpu", num_kv_blocks=200, block_size=8, use_tqdm=False),
    ):
        said = "attention: torch (not native: block_size 8 is no multiple of 16); KV pool: 200 blocks x 8 tokens"
        assert said in caplog.text


@pytest.mark.parametrize("name", ["flashy", "", "Torch", "cpu"])
def test_an_unknown_backend_is_refused_with_the_known_names(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"attention_backend is '{name}'.*auto.*torch"):
        choose(name)


ASKED = [{"window": 128}, {"sinks": True}, {"soft_cap": 30.0}]


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("name", ["torch", pytest.param("native", marks=needs_kernels), "auto"])
def test_what_a_layer_asks_for_is_heeded_or_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, asked: dict[str, Any]
) -> None:
    """One layer of several is enough; scales are heeded by all."""
    specs = AttentionSpec(0.5), AttentionSpec(3.0), AttentionSpec(0.5, **asked)
    named = "torch" if name == "auto" else name
    assert name == "auto" or choose(name, 16, 64, *specs)[0] == name
    for backend in (TorchAttention, NativeAttention):
        monkeypatch.setattr(backend, "features", frozenset())
    assert name == "auto" or choose(name, 16, 64, *specs[:2])[0] == name
    ((field, value),) = asked.items()
    reason = f"{named}: it has no {field}, and a layer of the model asks for {field}={value}"
    with pytest.raises(InvalidConfig, match=f"no attention backend can run: .*{reason}"):
        choose(name, 16, 64, *specs)


# ---- on a GPU

ON_CUDA: list[type[AttentionBackend]] = [TritonAttention, FlashAttention, TorchAttention]


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """All backends for GPUs can run, and flash-attn is installed."""
    for backend in ON_CUDA:
        monkeypatch.setattr(backend, "unsupported_reason", lambda *_: None)
        monkeypatch.setattr(backend, "__init__", CoreAttentionBackend.__init__)
    return monkeypatch


def on_gpu(name: str = "auto", *specs: AttentionSpec, quantized: bool = False) -> tuple[type[AttentionBackend], str]:
    backend, unavailable_backends = choose_backend(name, CUDA, HALF, None, [64], specs, quantized=quantized)
    assert backend.block_size == (256 if isinstance(backend, FlashAttention) else 16)
    return type(backend), unavailable_backends


@pytest.mark.parametrize("first", range(len(ON_CUDA) + 1))
def test_the_first_that_can_run_is_chosen_and_reasons_are_said(able: pytest.MonkeyPatch, first: int) -> None:
    for i, backend in enumerate(ON_CUDA[:first]):
        able.setattr(backend, "unsupported_reason", lambda *_, i=i: f"reason {i}")
    reasons = "; ".join(f"{backend.name}: reason {i}" for i, backend in enumerate(ON_CUDA[:first]))
    if first < len(ON_CUDA):
        assert on_gpu() == (ON_CUDA[first], reasons)
    else:
        with pytest.raises(InvalidConfig, match=f"no attention backend can run: {reasons}"):
            on_gpu()


@pytest.mark.parametrize(
    ("asked", "chosen", "lacks"),
    [
        ({}, FlashAttention, None),
        ({"window": 128}, FlashAttention, None),
        ({"soft_cap": 50.0}, TorchAttention, "soft_cap"),
        ({"sinks": True}, TorchAttention, "sinks"),
        ({"window": 128, "sinks": True}, TorchAttention, "sinks"),
        ({"window": 128, "chunked": True}, TorchAttention, "chunked"),
    ],
    ids=str,
)
def test_the_first_that_heeds_all_is_chosen(
    able: pytest.MonkeyPatch, asked: dict[str, Any], chosen: type[AttentionBackend], lacks: str | None
) -> None:
    specs = AttentionSpec(0.5), AttentionSpec(0.5, **asked)
    assert on_gpu("auto", *specs) == (TritonAttention, "")
    able.setattr(TritonAttention, "unsupported_reason", lambda *_: "no Triton")
    reason = f"flash_attn: it has no {lacks}, and a layer of the model asks for {lacks}={asked[lacks]}" if lacks else ""
    assert on_gpu("auto", *specs) == (chosen, "; ".join(filter(None, ("triton: no Triton", reason))))


def test_blocks_of_another_size_are_asked_for(able: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    for backend in ON_CUDA[:2]:
        able.setattr(backend, "unsupported_reason", lambda *where: asked.append(where[-1]) or "no")
    assert [choose_backend("auto", CUDA, HALF, size, [64])[0].block_size for size in (64, None)] == [64, 16]
    assert asked == [64, 64, 16, 256]


def test_who_has_no_int8_cache_is_passed_over_with_that_reason(able: pytest.MonkeyPatch) -> None:
    reason = "flash_attn: it has no int8 cache, and kv_cache_dtype is 'int8': choose 'auto'"
    able.setattr(TritonAttention, "unsupported_reason", lambda *_: "no")
    assert on_gpu(quantized=True) == (TorchAttention, f"triton: no; {reason}")
    with pytest.raises(InvalidConfig, match=f"no attention backend can run: {reason}"):
        on_gpu("flash_attn", quantized=True)
    assert on_gpu("flash_attn")[0] is FlashAttention


def test_every_backend_says_whether_it_can_be_recorded() -> None:
    assert [backend.capturable for backend in (*ON_CUDA, NativeAttention)] == [True, True, False, True]


# ---- what each takes


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "dim", "block_size", "named"),
    [
        *((torch.float32, dim, 16, ()) for dim in (32, 96, 512)),
        *((HALF, 64, block_size, (f"block_size {block_size}", "16")) for block_size in (1, 8, 17, 40)),
        *((HALF, dim, 16, (f"head_dim {dim}", "32", "512")) for dim in (4, 48, 80, 544)),
        *((dtype, 64, 16, (str(dtype).removeprefix("torch."),)) for dtype in (torch.float16, torch.float64)),
    ],
)
def test_what_the_native_backend_takes(dtype: torch.dtype, dim: int, block_size: int, named: tuple[str, ...]) -> None:
    reason = NativeAttention.unsupported_reason(CPU, dtype, dim, block_size)
    assert (reason is None) == (not named)
    assert all(each in str(reason) for each in named)
    assert "cuda" in str(NativeAttention.unsupported_reason(torch.device("cuda"), dtype, 64, 16))


@pytest.mark.parametrize(
    ("dtype", "dim", "block_size", "capability", "reason"),
    [
        (HALF, 16, 16, (8, 0), None),
        (torch.float32, 256, 256, (10, 0), None),
        (torch.float16, 96, 64, (9, 0), None),
        *((HALF, 64, size, (9, 0), f"block_size {size} is not a power of two from 16 to 256") for size in (8, 48, 512)),
        *((HALF, dim, 16, (9, 0), f"head_dim {dim} is not a multiple of 16 up to 256") for dim in (8, 72, 512)),
        (torch.float64, 64, 16, (9, 0), "it computes in bfloat16, float16 and float32, not in float64"),
        (HALF, 64, 16, (7, 5), "the GPU has compute capability 7.5, and 8.0 is the least"),
    ],
)
def test_what_the_triton_backend_takes(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    dim: int,
    block_size: int,
    capability: tuple[int, int],
    reason: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(triton_module, "unsupported_reason", lambda _: None)
    assert TritonAttention.unsupported_reason(CUDA, dtype, dim, block_size) == reason
    monkeypatch.setattr(triton_module, "unsupported_reason", lambda device: f"nothing runs on {device.type}")
    assert reason or TritonAttention.unsupported_reason(CUDA, dtype, dim, block_size) == "nothing runs on cuda"
