"""Which attention backend is chosen, and what is said when none can be."""

from __future__ import annotations

import pytest
import torch

from nanoengine.attention import cpu
from nanoengine.attention.backend import AttentionBackend, choose_backend
from nanoengine.attention.cpu import TorchAttention
from nanoengine.config import ModelConfig
from nanoengine.errors import InvalidConfig
from tests.support import TOY


def choose(name: str, block_size: int = 16) -> AttentionBackend:
    return choose_backend(name, torch.device("cpu"), torch.float32, TOY, block_size)


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


@pytest.mark.parametrize("name", ["flashy", "", "Torch", "cpu"])
def test_an_unknown_backend_is_refused_with_the_known_names(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"attention_backend is '{name}'.*auto.*torch"):
        choose(name)


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_a_backend_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(cpu, "TorchAttention", Unable)
    with pytest.raises(InvalidConfig, match=r"torch: it wants other blocks than 3 on cpu for 4 and torch\.float32"):
        choose(name, block_size=3)
