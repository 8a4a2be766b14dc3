"""What launches of kernels leave to the next one: counters of programs that have arrived."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

LEAST_COUNTERS = 1 << 14
"""Counters that a workspace has from the start: 64 KB, and all that 2048 sequences with 8 KV heads take."""


class Workspace:
    """What launches leave to the next one: counters of the programs that have arrived, zeros between two launches.

    Launches that share it must follow one another, as those on one stream do: every engine has its own. An address that a CUDA
    graph holds stays good as long as the workspace lives. More counters are made, and made zeros, by the first launch that wants
    them: it must not be the one that is captured.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []  # the last is used; graphs may write to the others

    def counters(self, count: int, device: torch.device) -> Tensor:
        """At least so many, int32."""
        if not self._buffers or self._buffers[-1].device != device or len(self._buffers[-1]) < count:
            size = max(LEAST_COUNTERS, triton.next_power_of_2(count))
            self._buffers.append(torch.zeros(size, dtype=torch.int32, device=device))
        return self._buffers[-1]
