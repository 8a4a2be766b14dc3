"""Layers with states by the native kernels."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from nanoengine.kernels.addresses import DTYPES, address, address_of_floats
from nanoengine.kernels.recurrences import Decay, StateRuns

MAX_TAPS, MAX_DEPTH = 8, 256
"""As the sources have them."""


class NativeRecurrences:
    """Those methods of `NativeKernels`. See `recurrences.py`."""

    c: SimpleNamespace

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        states: Tensor,
        runs: StateRuns,
        *,
        before: Tensor | None = None,
        after: Tensor | None = None,
        silu: bool = False,
    ) -> Tensor:
        taps = len(weight)
        assert taps <= MAX_TAPS
        out = torch.empty(x.shape, dtype=x.dtype)
        filters = address_of_floats(weight), address_of_floats(bias), taps, int(silu)
        where = states.data_ptr(), states.stride(0), *_addresses(runs)
        sizes = len(runs.rows), *x.shape
        self.c.short_conv(
            DTYPES[x.dtype], *_part(x), *_part(before), *_part(after), *filters, *where, out.data_ptr(), *sizes
        )
        return out

    def delta_rule(
        self,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        decay: Decay,
        num_k_heads: int,
        states: Tensor,
        runs: StateRuns,
        *,
        tiled: bool = False,
    ) -> Tensor:
        _, heads, depth, width = states.shape
        assert depth <= MAX_DEPTH
        out = torch.empty(len(qkv), heads * width)
        inputs = DTYPES[qkv.dtype], *_part(qkv), *_part(a), *_part(b), *map(address_of_floats, decay)
        where = states.data_ptr(), states.stride(0), *_addresses(runs), out.data_ptr()
        self.c.delta_rule(*inputs, *where, len(runs.rows), num_k_heads, heads, depth, width, int(tiled))
        return out

    def mamba2(
        self, xbc: Tensor, dt: Tensor, decay: Decay, skip: Tensor, num_groups: int, states: Tensor, runs: StateRuns
    ) -> Tensor:
        _, heads, depth, width = states.shape
        assert depth <= MAX_DEPTH
        out = torch.empty(len(xbc), heads * width)
        inputs = DTYPES[xbc.dtype], *_part(xbc), *_part(dt), *map(address_of_floats, (*decay, skip))
        where = states.data_ptr(), states.stride(0), *_addresses(runs), out.data_ptr()
        self.c.mamba2(*inputs, *where, len(runs.rows), num_groups, heads, depth, width)
        return out

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, gate_first: bool
    ) -> Tensor:
        assert len(weight) % group == 0
        out = torch.empty(x.shape, dtype=gate.dtype)
        weights = address_of_floats(weight), len(weight), out.data_ptr()
        self.c.gated_norm(
            DTYPES[gate.dtype], address_of_floats(x), *_part(gate), *weights, *x.shape, group, eps, int(gate_first)
        )
        return out

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        self.c.sigmoid_gate(DTYPES[x.dtype], *_part(x), *_part(gate), gate.shape[1], out.data_ptr(), *x.shape)
        return out


def _part(columns: Tensor | None) -> tuple[int | None, int]:
    """Where columns of a matrix begin, and what is between its rows."""
    if columns is None:
        return None, 0
    assert columns.stride(1) == 1 or columns.shape[1] == 1
    return columns.data_ptr(), columns.stride(0)


def _addresses(runs: StateRuns) -> list[int | None]:
    return [address(part) for part in (runs.rows, runs.starts, *(runs.stores or (None,) * 3))]
