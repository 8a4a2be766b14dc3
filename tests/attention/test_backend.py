"""Which attention backend is chosen, and what is said when none can be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanoengine.attention import cpu
from nanoengine.attention.backend import AttentionBackend, choose_backend
from nanoengine.attention.cpu import TorchAttention
from nanoengine.config import ModelConfig
from nanoengine.errors import InvalidConfig
from nanoengine.kernels.native import why_not
from tests.support import TOY

CPU = torch.device("cpu")
REASON = why_not(CPU, torch.float32)
needs_kernels = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")


def choose(name: str, block_size: int = 16, head_dim: int = TOY.head_dim) -> AttentionBackend:
    return choose_backend(name, CPU, torch.float32, replace(TOY, head_dim=head_dim), block_size)[0]


class Unable(TorchAttention):
    @staticmethod
    def why_not(device: torch.device, dtype: torch.dtype, model: ModelConfig, block_size: int) -> str | None:
        return f"it wants other blocks than {block_size} on {device.type} for {model.head_dim} and {dtype}"


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
    monkeypatch.setattr(cpu, "TorchAttention", Unable)
    with pytest.raises(InvalidConfig, match=r"torch: it wants other blocks than 3 on cpu for 4 and torch\.float32"):
        choose(name, block_size=3)
