"""Where Triton kernels can run."""

from __future__ import annotations

from functools import cache

import torch


def unsupported_reason(device: torch.device) -> str | None:
    """The reason that Triton kernels cannot run on a device; None if they can.

    With TRITON_INTERPRET=1 they run on the CPU too, slowly, for tests and debugging.
    """
    try:
        import triton
    except ImportError:
        return "the package triton is not installed: pip install 'nanoengine[cuda]'"
    if device.type == "cuda":
        return None
    return None if triton.knobs.runtime.interpret else f"Triton has no code for {device.type}"


def float8_unsupported_reason(device: torch.device) -> str | None:
    """The reason that a device multiplies no floats of 8 bits; None if it does."""
    if device.type != "cuda":
        return f"no kernel multiplies floats of 8 bits on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability >= (8, 9):
        return None
    return (
        f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, and it takes 8.9"
    )


@cache
def specializes_warps(device: torch.device) -> bool:
    """Whether Triton gives the warps of a loop different work there: some copy, others multiply.

    It does on compute capability 9.0. From Triton 3.7 on it cuts a tile of rows in two, but not the descriptor that the host has
    made of it, and does not compile.
    """
    import triton

    is_known = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    return is_known and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def num_multiprocessors(device: torch.device, interpreted: int) -> int:
    """Multiprocessors of a GPU; `interpreted` for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else interpreted
