"""How the Triton backend is tuned, and what engines that run at the same time must not share."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux on x86-64 alone")

from nanoengine.attention import triton as module
from nanoengine.attention.triton import TritonAttention
from nanoengine.kernels.triton.tuning import DEFAULTS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_it_is_tuned_as_it_is_told_or_as_this_gpu_was(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, told = replace(DEFAULTS, decode_stages=5), replace(DEFAULTS, decode_stages=9)
    monkeypatch.setattr(module, "load_tuning", lambda: chosen)
    assert TritonAttention(16).tuning is chosen
    assert TritonAttention(16, told).tuning is told


def test_engines_do_not_count_together() -> None:
    """Their launches may run at the same time."""
    first, second = TritonAttention(16), TritonAttention(16)
    assert first._workspace.counters(1, DEVICE).data_ptr() != second._workspace.counters(1, DEVICE).data_ptr()
