"""Placement: a check of the free memory for the weights of a model."""

from __future__ import annotations

import torch

from nanoengine.errors import InvalidConfig
from nanoengine.ram import available_ram
from nanoengine.sizes import format_bytes


def check_room_for_weights(num_bytes: int, device: torch.device) -> None:
    """Check that weights fit into this machine's free RAM: Linux overcommits, and would kill the process later. A GPU needs no
    check: its allocation fails at once.

    Raises:
        InvalidConfig: they do not fit.
    """
    available = available_ram()
    if device.type == "cpu" and num_bytes > available:
        raise InvalidConfig(
            f"the weights take {format_bytes(num_bytes)}, but {format_bytes(available)} of RAM are available: free memory, or"
            " choose a smaller dtype or quantization, another device or a smaller model"
        )
