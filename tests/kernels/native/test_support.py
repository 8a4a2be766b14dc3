"""The dtype where the kernels run, and what profilers see of calls of C. What they compute is tested where they are used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanoengine.builder import read_config
from nanoengine.kernels import capability
from nanoengine.kernels.capability import NativeAndTriton
from nanoengine.kernels.native.operations import NativeKernels
from tests.kernels.marks import needs_kernels

pytestmark = needs_kernels


def test_profilers_see_every_call() -> None:
    kernels, x, weight = NativeKernels(), torch.randn(3, 32), torch.rand(32)
    with torch.profiler.profile() as profile:
        seen = kernels.rms_norm(x, weight, 1e-6)
    assert "nanoengine::rms_norm" in {event.key for event in profile.key_averages()}
    assert torch.equal(seen, kernels.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize(
    ("asked", "checkpoint", "kernels", "dtype"),
    [
        ("auto", "bfloat16", "auto", torch.bfloat16),
        ("auto", "float16", "native", torch.bfloat16),
        ("auto", "float32", "auto", torch.float32),
        ("auto", "float16", "torch", torch.float32),
        ("float16", "bfloat16", "auto", torch.float16),
    ],
)
def test_halves_stay_halves_where_the_native_kernels_run(
    asked: str, checkpoint: str, kernels: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And elsewhere become what torch is fast at: here nothing but float32."""
    monkeypatch.setattr(capability, "_is_fast", lambda *_: False)
    config = read_config("demo", {"dtype": asked, "kernels": kernels})
    device = SimpleNamespace(torch_device=torch.device("cpu"))
    startup: Any = SimpleNamespace(
        config=config, model_config=SimpleNamespace(dtype=checkpoint), device=device, use_tqdm=False
    )
    assert NativeAndTriton().dtype(startup) is dtype
