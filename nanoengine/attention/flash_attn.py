"""The package flash-attn beyond the core: FlashAttention-3 on Hopper, windows, soft caps, and K/V that Triton writes.

Version 3 is by Shah et al. (2024). It multiplies V of slots that are unwritten, or before a window, by 0, so they must hold
finite numbers; version 2 reads none of another block than those that are seen.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nanoengine.attention.backend import AttentionBackend
from nanoengine.core import flash_attention as core
from nanoengine.core.attention import AttentionSpec, KVLayer, Runs
from nanoengine.core.flash_attention import capability
from nanoengine.kernels.triton.launch import unsupported_reason as triton_unsupported_reason

MODULES = {3: "flash_attn_interface", 2: "flash_attn"}
"""The module of each version of the package; they can be installed side by side. Best first."""

TABLES = {3: "page_table", 2: "block_table"}
"""What each calls a block table."""

WITHOUT_WINDOW = (-1, -1)
"""To the left and right of the diagonal, which ends in the bottom right corner; -1 is without end."""

HOPPER = 9
"""The only major compute capability that version 3 is written for."""


class FlashAttention(core.FlashAttention, AttentionBackend):
    """K/V are written by Triton's kernels where there are any."""

    features = frozenset({"window", "soft_cap"})  # version 3 has sinks in some builds
    capturable = True

    def __init__(self, block_size: int):
        super().__init__(block_size)
        self._version: int | None = None
        self._write: Callable[..., None] | None = None
        if triton_unsupported_reason(torch.device("cuda")) is None:
            from nanoengine.kernels.triton.rotate_and_write import rotate_and_write, write_kv

            self.rotate_and_write, self._write = rotate_and_write, write_kv

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        if all(_load(version) is None for version in MODULES):
            return "the package flash-attn is not installed"
        reason = core.gpu_unsupported_reason(device, dtype, head_dim)
        if reason is not None:
            return reason
        if head_dim & (head_dim - 1):
            return f"head_dim {head_dim} is no power of two, which the kernel that writes K/V takes"
        reasons = [_version_unsupported_reason(version, device, block_size) for version in MODULES]
        return None if None in reasons else "; ".join(reason for reason in reasons if reason)

    def kv_shape(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, *, quantized: bool = False
    ) -> tuple[int, ...]:
        assert not quantized
        return super().kv_shape(num_blocks, num_kv_heads, head_dim)

    def write_kv(self, k: Tensor, v: Tensor, kv: KVLayer, slot_mapping: Tensor) -> None:
        if self._write is None:
            super().write_kv(k, v, kv, slot_mapping)
        else:
            self._write(k, v, kv, slot_mapping)

    def prefill(self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        if self._on(q.device) == 2:
            return super().prefill(q, kv, runs, spec, sinks)
        return importlib.import_module(self.module).flash_attn_with_kvcache(
            q,
            *kv,
            cache_seqlens=runs.seq_lens,
            page_table=runs.block_tables,
            cu_seqlens_q=runs.query_start_loc,
            max_seqlen_q=runs.longest,
            **self.options(spec),
        )

    def decode(self, q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        self._on(q.device)
        return super().decode(q, kv, runs, spec, sinks)

    def options(self, spec: AttentionSpec) -> dict[str, Any]:
        """A window of the package is counted without the query's own token."""
        window = WITHOUT_WINDOW if spec.window is None else (spec.window - 1, 0)
        return {**super().options(spec), "window_size": window, "softcap": spec.soft_cap or 0.0}

    def _on(self, device: torch.device) -> int:
        """The best version that runs on a device."""
        if self._version is None:
            runs = (v for v in MODULES if _version_unsupported_reason(v, device, self.block_size) is None)
            self._version = next(runs)
            self.module, self.table = MODULES[self._version], TABLES[self._version]
        return self._version


def _load(version: int) -> ModuleType | str | None:
    """The module of a version; why it cannot be imported; or None if it is not installed."""
    name = MODULES[version]
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        return None if error.name == name else _broken(version, error)
    except (ImportError, OSError, RuntimeError) as error:  # as when it was built for another torch
        return _broken(version, error)
    functions = {3: ("flash_attn_with_kvcache",), 2: ("flash_attn_with_kvcache", "flash_attn_varlen_func")}[version]
    for function in functions:
        takes = inspect.signature(getattr(module, function)).parameters if hasattr(module, function) else {}
        for needed in (TABLES[version], "window_size", "softcap"):
            if needed not in takes:
                return f"the module {name} has no {function} with {needed}: install flash-attn 2.8 or later"
    return module


def _broken(version: int, error: Exception) -> str:
    return f"flash-attn {version} is installed, but cannot be imported ({error}): was it built for another torch?"


def _version_unsupported_reason(version: int, device: torch.device, block_size: int) -> str | None:
    """The reason that a version cannot run; None if it can, "" if it is not installed."""
    module = _load(version)
    if not isinstance(module, ModuleType):
        return module or ""
    if version == 2:
        return core.page_unsupported_reason(block_size)
    found = capability(device)
    if found is None or found[0] != HOPPER:
        has = "none" if found is None else f"{found[0]}.{found[1]}"
        return f"flash-attn 3 runs on compute capability {HOPPER}.0 alone (Hopper), and this GPU has {has}"
    return None
