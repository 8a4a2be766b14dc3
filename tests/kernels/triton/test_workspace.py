"""Counters that launches leave to the next one."""

from __future__ import annotations

import torch

from nanoengine.kernels.triton.workspace import Workspace
from tests.kernels.formulas import DEVICE


def test_a_workspace_grows_and_keeps_what_a_graph_may_write_to() -> None:
    workspace = Workspace()
    few = workspace.counters(3, DEVICE)
    device = few.device  # as tensors say it: with its number
    assert workspace.counters(len(few), device) is few
    many = workspace.counters(len(few) + 1, device)
    assert len(many) > len(few)
    assert workspace.counters(3, device) is many
    for counters in (few, many):
        assert counters.dtype == torch.int32
        assert not counters.any()
        assert any(counters is kept for kept in workspace._buffers)
