"""Which attention backend is chosen, and what is said when none can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nanoengine.attention import torch_reference
from nanoengine.attention.backend import AttentionBackend, choose_backend
from nanoengine.attention.flash_attn import FlashAttention
from nanoengine.attention.native import NativeAttention
from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.attention.triton import TritonAttention
from nanoengine.core.attention import AttentionSpec
from nanoengine.errors import InvalidConfig
from nanoengine.kernels.native_operations import unsupported_reason
from tests.support import TOY

CPU = torch.device("cpu")
REASON = unsupported_reason(CPU, torch.float32)
needs_kernels = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")


def choose(name: str, block_size: int = 16, head_dim: int = TOY.head_dim) -> AttentionBackend:
    return choose_backend(name, CPU, torch.float32, replace(TOY, head_dim=head_dim), block_size)[0]


class Unable(TorchAttention):
    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        return f"it wants other blocks than {block_size} on {device.type} for {head_dim} and {dtype}"


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_the_torch_backend_runs_on_the_cpu(name: str) -> None:
    backend = choose(name, block_size=5)
    assert backend.name == "torch"
    assert backend.description
    assert backend.kv_shape(7, 2, 4)[:2] == (7, 5)


@needs_kernels
@pytest.mark.parametrize("name", ["auto", "native"])
def test_the_native_backend_is_preferred_where_it_can_run(name: str) -> None:
    backend = choose(name, block_size=48, head_dim=96)
    assert backend.name == "native"
    assert backend.description
    assert choose("torch", block_size=48, head_dim=96).name == "torch"


@pytest.mark.parametrize(("block_size", "head_dim"), [(8, 64), (16, 48), (5, 4)])
def test_auto_is_torch_where_the_native_backend_cannot_run(block_size: int, head_dim: int) -> None:
    assert choose("auto", block_size, head_dim).name == "torch"
    with pytest.raises(InvalidConfig, match="no attention backend can run: native: "):
        choose("native", block_size, head_dim)


@pytest.mark.parametrize("name", ["flashy", "", "Torch", "cpu"])
def test_an_unknown_backend_is_refused_with_the_known_names(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"attention_backend is '{name}'.*auto.*torch"):
        choose(name)


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_a_backend_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch_reference, "TorchAttention", Unable)
    with pytest.raises(InvalidConfig, match=r"torch: it wants other blocks than 3 on cpu for 4 and torch\.float32"):
        choose(name, block_size=3)


@needs_kernels
def test_the_reasons_that_faster_ones_were_passed_over_are_said() -> None:
    model = replace(TOY, head_dim=64)
    assert choose_backend("auto", CPU, torch.float32, model, 16)[1] == ""
    backend, passed_over = choose_backend("auto", CPU, torch.float32, model, 8)
    assert backend.name == "torch"
    assert passed_over.startswith("native: ")
    assert choose_backend("torch", CPU, torch.float32, model, 8)[1] == "", "none was passed over"


ON_CUDA = [FlashAttention, TritonAttention, TorchAttention]


@pytest.mark.parametrize("able", range(len(ON_CUDA)))
def test_on_a_gpu_the_first_that_can_run_is_chosen(monkeypatch: pytest.MonkeyPatch, able: int) -> None:
    """The names of those before it are said, each with its reason."""
    for i, backend in enumerate(ON_CUDA):
        monkeypatch.setattr(backend, "unsupported_reason", lambda *_, i=i: None if i >= able else f"reason {i}")
        monkeypatch.setattr(backend, "__init__", lambda *_: None)
    chosen, passed_over = choose_backend("auto", torch.device("cuda", 0), torch.bfloat16, TOY, 16)
    assert type(chosen) is ON_CUDA[able]
    assert passed_over == "; ".join(f"{backend.name}: reason {i}" for i, backend in enumerate(ON_CUDA[:able]))


def test_where_no_backend_can_run_every_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for i, backend in enumerate(ON_CUDA):
        monkeypatch.setattr(backend, "unsupported_reason", lambda *_, i=i: f"reason {i}")
    reasons = "; ".join(f"{backend.name}: reason {i}" for i, backend in enumerate(ON_CUDA))
    with pytest.raises(InvalidConfig, match=f"no attention backend can run: {reasons}"):
        choose_backend("auto", torch.device("cuda", 0), torch.bfloat16, TOY, 16)


ASKED = [{"window": 128}, {"sinks": True}, {"soft_cap": 30.0}]


def have(monkeypatch: pytest.MonkeyPatch, backend: type[AttentionBackend], *features: str) -> None:
    monkeypatch.setattr(backend, "features", frozenset(features))


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("name", ["torch", "native", "auto"])
def test_what_a_layer_asks_for_and_no_backend_has_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, asked: dict[str, Any]
) -> None:
    """One layer of several is enough."""
    have(monkeypatch, TorchAttention)
    have(monkeypatch, NativeAttention)
    specs = [AttentionSpec(0.5), AttentionSpec(0.5, **asked)]
    ((field, value),) = asked.items()
    named = "torch" if name == "auto" else name
    if name == "native" and REASON is not None:
        pytest.skip(f"no native kernels: {REASON}")
    reason = f"{named}: it has no {field}, and a layer of the model asks for {field}={value}"
    with pytest.raises(InvalidConfig, match=f"no attention backend can run: .*{reason}"):
        choose_backend(name, CPU, torch.float32, replace(TOY, head_dim=64), 16, specs)


def test_a_backend_that_has_what_is_asked_for_is_chosen_before_faster_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, TorchAttention, "window")
    have(monkeypatch, NativeAttention, "sinks")
    specs = [AttentionSpec(0.5, window=8)]
    backend, passed_over = choose_backend("auto", CPU, torch.float32, replace(TOY, head_dim=64), 16, specs)
    assert backend.name == "torch"
    if REASON is None:
        assert passed_over == "native: it has no window, and a layer of the model asks for window=8"
    with pytest.raises(InvalidConfig, match="it has no soft_cap"):
        choose_backend("torch", CPU, torch.float32, TOY, 16, [*specs, AttentionSpec(0.5, window=8, soft_cap=2.0)])


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("name", ["torch", "native"])
def test_on_a_cpu_every_feature_is_heeded(name: str, asked: dict[str, Any]) -> None:
    if name == "native" and REASON is not None:
        pytest.skip(f"no native kernels: {REASON}")
    specs = [AttentionSpec(0.5, **asked)]
    assert choose_backend(name, CPU, torch.float32, replace(TOY, head_dim=64), 16, specs)[0].name == name


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ({}, FlashAttention),
        ({"window": 128, "soft_cap": 50.0}, FlashAttention),
        ({"sinks": True}, TritonAttention),
        ({"window": 128, "sinks": True}, TritonAttention),
    ],
    ids=str,
)
def test_on_a_gpu_the_first_that_heeds_all_is_chosen(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], chosen: type[AttentionBackend]
) -> None:
    for backend in ON_CUDA:
        monkeypatch.setattr(backend, "unsupported_reason", lambda *_: None)
        monkeypatch.setattr(backend, "__init__", lambda *_: None)
    specs = [AttentionSpec(0.5), AttentionSpec(0.5, **asked)]
    backend, passed_over = choose_backend("auto", torch.device("cuda", 0), torch.bfloat16, TOY, 16, specs)
    assert type(backend) is chosen
    missing = [f"{name}={value}" for name, value in asked.items() if name not in FlashAttention.features]
    reason = "flash_attn: it has no {}, and a layer of the model asks for {}"
    assert passed_over == "; ".join(reason.format(one.partition("=")[0], one) for one in missing)


def test_who_has_no_int8_cache_is_passed_over_with_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in ON_CUDA:
        monkeypatch.setattr(backend, "unsupported_reason", lambda *_: None)
        monkeypatch.setattr(backend, "__init__", lambda *_: None)
    where = torch.device("cuda", 0), torch.bfloat16, TOY, 16
    backend, passed_over = choose_backend("auto", *where, quantized=True)
    assert type(backend) is TritonAttention
    assert passed_over == "flash_attn: it has no int8 cache, and kv_cache_dtype is 'int8': choose 'auto'"
    with pytest.raises(
        InvalidConfig, match="no attention backend can run: flash_attn: it has no int8 cache, and kv_cach"
    ):
        choose_backend("flash_attn", *where, quantized=True)
    assert choose_backend("flash_attn", *where)[0].name == "flash_attn"


def test_a_scale_is_asked_of_all() -> None:
    specs = [AttentionSpec(0.5), AttentionSpec(3.0)]
    assert choose_backend("torch", CPU, torch.float32, TOY, 16, specs)[0].name == "torch"


def test_every_backend_says_whether_it_can_be_recorded() -> None:
    assert [backend.capturable for backend in ON_CUDA] == [True, True, False]
    assert NativeAttention.capturable
    assert not TorchAttention.capturable
