"""Whether the native kernels can run."""

from __future__ import annotations

import torch

from nanoengine.kernels.native.addresses import DTYPES
from nanoengine.kernels.native.c_functions import c_functions
from nanoengine.kernels.native.compiler import CannotCompile
from nanoengine.kernels.native.libraries import must_compile
from nanoengine.progress import stage


def unsupported_reason(device: torch.device, dtype: torch.dtype, *, use_tqdm: bool = False) -> str | None:
    """The reason that native kernels cannot run here; None if they can. Compiles them at the first call, and may show it."""
    if device.type != "cpu":
        return f"they are for the CPU, not for {device.type}"
    if dtype not in DTYPES:
        return f"they compute in float32 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    try:
        with stage("Compiling kernels, once for this CPU", shown=use_tqdm and must_compile()):
            c_functions()
    except CannotCompile as error:
        return str(error)
    return None
