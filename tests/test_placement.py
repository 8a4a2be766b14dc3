"""Where a model runs and in what dtype, and clear words where it cannot."""

from __future__ import annotations

import pytest
import torch

from nanoengine.errors import InvalidConfig
from nanoengine.models import placement as module
from nanoengine.models.placement import check_room_for_weights, choose_dtype, device_name, find_device


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, for all that torch says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_auto_without_a_gpu_is_the_cpu() -> None:
    assert find_device("auto") == find_device("cpu") == torch.device("cpu")


@pytest.mark.usefixtures("gpus")
def test_auto_is_the_first_gpu_and_others_go_by_number() -> None:
    assert find_device("auto") == find_device("cuda") == torch.device("cuda", 0)
    assert find_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(InvalidConfig, match="device is 'cuda:2', but torch sees 2 CUDA devices: use device='cpu'"):
        find_device("cuda:2")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update it."),
        RuntimeError("Found no NVIDIA driver on your system."),
        AssertionError("Torch not compiled with CUDA enabled"),
    ],
)
def test_without_cuda_torchs_own_reason_is_given(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(InvalidConfig) as raised:
        find_device("cuda")
    reason = str(error).splitlines()[0]
    assert str(raised.value) == f"device is 'cuda', but torch sees 0 CUDA devices ({reason}): use device='cpu'"


@pytest.mark.usefixtures("gpus")
def test_a_gpu_that_emulates_bfloat16_computes_in_float32_unless_told() -> None:
    device = torch.device("cuda", 0)
    assert choose_dtype("auto", "bfloat16", device) == torch.float32
    assert choose_dtype("auto", "float16", device) == torch.float16
    assert choose_dtype("bfloat16", "float32", device) == torch.bfloat16


def test_a_name_says_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_name(torch.device("cpu")) == f"cpu, {torch.get_num_threads()} threads"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert device_name(torch.device("cuda", 0)) == "cuda:0 (NVIDIA H200)"


def test_weights_need_room_in_ram_and_on_a_gpu_that_is_its_own_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_ram", lambda: 4000)
    check_room_for_weights(4000, torch.device("cpu"))
    check_room_for_weights(10**12, torch.device("cuda", 0))
    with pytest.raises(InvalidConfig, match="take 4001 bytes, but 4000 bytes of RAM are available: "):
        check_room_for_weights(4001, torch.device("cpu"))
