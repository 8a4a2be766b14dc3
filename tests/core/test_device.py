"""Where an engine runs, and clear words where it cannot."""

from __future__ import annotations

import pytest
import torch

from nanoengine.core.device import open_device
from nanoengine.core.errors import InvalidConfig


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, for all that torch says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)


@pytest.mark.usefixtures("gpus")
def test_auto_is_the_current_gpu_and_others_go_by_number() -> None:
    for name, index in (("auto", 1), ("cuda", 1), ("cuda:0", 0)):
        device = open_device(name)
        assert device.is_cuda
        assert device.torch_device == torch.device("cuda", index)
    with pytest.raises(InvalidConfig, match="device is 'cuda:2', but torch sees 2 GPUs"):
        open_device("cuda:2")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_without_a_gpu_auto_is_the_cpu_and_all_else_is_refused_with_torchs_reason(name: str) -> None:
    assert open_device("auto").torch_device == open_device("cpu").torch_device == torch.device("cpu")
    with pytest.raises(InvalidConfig, match=f"device is '{name}': No CUDA GPUs are available"):
        open_device(name)


@pytest.mark.parametrize("name", ["", "gpu", "mps", "meta", "cpu:x", 7, None])
def test_what_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfig, match="device is"):
        open_device(name)
