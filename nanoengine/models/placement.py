"""In what dtype a model runs, and whether there is room for it."""

from __future__ import annotations

import torch

from nanoengine.core.ram import available_ram
from nanoengine.errors import InvalidConfig
from nanoengine.sizes import told


def choose_dtype(asked: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in; "auto" is the checkpoint's where the device is fast at it, float32 elsewhere."""
    if asked != "auto":
        return getattr(torch, asked)
    if checkpoint == "float32" or _is_fast(checkpoint, device):
        return getattr(torch, checkpoint)
    return torch.float32


def _is_fast(dtype: str, device: torch.device) -> bool:
    """Whether the device computes a half-precision dtype itself, rather than by way of float32."""
    if device.type == "cuda":
        return dtype == "float16" or torch.cuda.is_bf16_supported(including_emulation=False)
    if not torch.backends.mkldnn.is_available():  # as in the builds for macOS
        return False
    name = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}[dtype]
    return bool(getattr(torch.ops.mkldnn, name)())


def check_room_for_weights(num_bytes: int, device: torch.device) -> None:
    """Check that weights fit into this machine's free RAM. Linux overcommits: the allocation would succeed, and the process be
    killed later.

    A GPU refuses at once what does not fit, so nothing is checked there.

    Raises:
        InvalidConfig: they do not.
    """
    available = available_ram()
    if device.type == "cpu" and num_bytes > available:
        raise InvalidConfig(
            f"the weights take {told(num_bytes)}, but {told(available)} of RAM are available: free memory, or choose a smaller "
            "dtype or quantization, another device or a smaller model"
        )
