"""Paged attention by the package flash-attn: FlashAttention-3 on Hopper, FlashAttention-2 (Dao, 2023) on other GPUs since Ampere.

Version 3 is by Shah et al. (2024). It multiplies V of slots that are unwritten, or before a window, by 0, so they must hold
finite numbers; version 2 reads none of another block than those that are seen.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nanoengine.attention.backend import AttentionSpec, Runs
from nanoengine.attention.nhd_layout import (
    NHDLayout,
    capability,
    key_starts,
    nhd_unsupported_reason,
    pages_unsupported_reason,
    same_lengths,
)
from nanoengine.model_config import ModelConfig

MODULES = {3: "flash_attn_interface", 2: "flash_attn"}
"""The module of each version of the package; they can be installed side by side. Best first."""

WITHOUT_WINDOW = (-1, -1)
"""To the left and right of the diagonal, which ends in the bottom right corner; -1 is without end."""

HOPPER = 9
"""The only major compute capability that version 3 is written for."""


class FlashAttention(NHDLayout):
    """Prefill packs the queries of all sequences; decode splits long sequences among the multiprocessors."""

    name = "flash_attn"
    description = "paged kernels of the package flash-attn"
    features = frozenset({"window", "soft_cap"})  # version 3 alone has chunks, and sinks in some builds

    def __init__(self, block_size: int):
        super().__init__(block_size)
        self._kernels: _Version2 | _Version3 | None = None

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, model: ModelConfig, block_size: int) -> str | None:
        if all(_load(version) is None for version in MODULES):
            return "the package flash-attn is not installed"
        reason = nhd_unsupported_reason(device, dtype, model)
        if reason is not None:
            return reason
        reasons = [_version_unsupported_reason(version, device, block_size) for version in MODULES]
        return None if None in reasons else "; ".join(reason for reason in reasons if reason)

    def prefill(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        runs: Runs,
        spec: AttentionSpec,
        sinks: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        return self._on(q.device).prefill(q, k_cache, v_cache, runs, spec)

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        runs: Runs,
        spec: AttentionSpec,
        sinks: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        return self._on(q.device).decode(q, k_cache, v_cache, runs, spec)

    def _on(self, device: torch.device) -> _Version2 | _Version3:
        """The functions of the best version that runs on a device."""
        if self._kernels is None:
            best = next(
                version for version in MODULES if _version_unsupported_reason(version, device, self.block_size) is None
            )
            module = _load(best)
            assert isinstance(module, ModuleType)
            self._kernels = _Version3(module) if best == 3 else _Version2(module)
        return self._kernels


class _Version(ABC):
    """What versions share: decode, but for the name of an argument."""

    table: str

    def __init__(self, module: ModuleType):
        self._with_cache: Callable[..., Tensor] = module.flash_attn_with_kvcache

    @abstractmethod
    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, runs: Runs, spec: AttentionSpec) -> Tensor:
        """Attention of runs of any lengths."""

    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, runs: Runs, spec: AttentionSpec) -> Tensor:
        """Attention of runs of one length, of which long ones are split; of others it is that of chunks."""
        query_len = same_lengths(q, runs)
        if query_len is None:
            return self.prefill(q, k_cache, v_cache, runs, spec)
        attended = self._with_cache(
            q.unflatten(0, (-1, query_len)),
            k_cache,
            v_cache,
            cache_seqlens=runs.seq_lens,
            **_asked(spec),
            **{self.table: runs.block_tables},
        )
        return attended.flatten(0, 1)


class _Version2(_Version):
    table = "block_table"

    def __init__(self, module: ModuleType):
        super().__init__(module)
        self._packed: Callable[..., Tensor] = module.flash_attn_varlen_func

    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, runs: Runs, spec: AttentionSpec) -> Tensor:
        return self._packed(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=runs.query_start_loc,
            cu_seqlens_k=key_starts(runs),
            max_seqlen_q=runs.longest,
            max_seqlen_k=max(runs.seq_lens_list),
            **_asked(spec),
            block_table=runs.block_tables,
        )


class _Version3(_Version):
    table = "page_table"

    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, runs: Runs, spec: AttentionSpec) -> Tensor:
        return self._with_cache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=runs.seq_lens,
            page_table=runs.block_tables,
            cu_seqlens_q=runs.query_start_loc,
            max_seqlen_q=runs.longest,
            **_asked(spec),
        )


def _asked(spec: AttentionSpec) -> dict[str, Any]:
    """What a layer asks for, in the words of both versions; a window there is counted without the query's own token."""
    return {
        "softmax_scale": spec.scale,
        "causal": True,
        "window_size": WITHOUT_WINDOW if spec.window is None else (spec.window - 1, 0),
        "softcap": spec.soft_cap or 0.0,
    }


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
    table = {3: "page_table", 2: "block_table"}[version]
    for function in functions:
        takes = inspect.signature(getattr(module, function)).parameters if hasattr(module, function) else {}
        for needed in (table, "window_size", "softcap"):
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
        return pages_unsupported_reason("flash-attn 2", block_size)
    found = capability(device)
    if found is None or found[0] != HOPPER:
        has = "none" if found is None else f"{found[0]}.{found[1]}"
        return f"flash-attn 3 runs on compute capability {HOPPER}.0 alone (Hopper), and this GPU has {has}"
    return None
