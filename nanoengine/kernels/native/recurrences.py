"""Layers with states by the native kernels."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from nanoengine.kernels.native.addresses import ANY, DTYPES, address, rows, wrong
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
        taps, (_, channels) = len(weight), x.shape
        if taps > MAX_TAPS:
            raise wrong(weight, f"at most {MAX_TAPS} taps")
        out = x.new_empty(x.shape)
        inputs = [at for part in (x, before, after) for at in rows(part, x.dtype, *x.shape)]
        filters = address(weight, torch.float32, taps * channels), address(bias, torch.float32, channels)
        where = *rows(states, torch.float32, len(states), taps - 1, channels), *_addresses(runs), out.data_ptr()
        self.c.short_conv(DTYPES[x.dtype], *inputs, *filters, taps, int(silu), *where, len(runs.rows), *x.shape)
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
        tokens, columns = len(qkv), 2 * num_k_heads * depth + heads * width
        out = qkv.new_empty(tokens, heads * width, dtype=torch.float32)
        parts = *rows(qkv, qkv.dtype, tokens, columns), *rows(a, qkv.dtype, tokens, heads)
        faded = (address(part, torch.float32, heads) for part in decay)
        inputs = DTYPES[qkv.dtype], *parts, *rows(b, qkv.dtype, tokens, heads), *faded
        where = *_states(states), *_addresses(runs), out.data_ptr()
        self.c.delta_rule(*inputs, *where, len(runs.rows), num_k_heads, heads, depth, width, int(tiled))
        return out

    def mamba2(
        self, xbc: Tensor, dt: Tensor, decay: Decay, skip: Tensor, num_groups: int, states: Tensor, runs: StateRuns
    ) -> Tensor:
        _, heads, depth, width = states.shape
        tokens, columns = len(xbc), heads * width + 2 * num_groups * depth
        out = xbc.new_empty(tokens, heads * width, dtype=torch.float32)
        parts = *rows(xbc, xbc.dtype, tokens, columns), *rows(dt, xbc.dtype, tokens, heads)
        inputs = DTYPES[xbc.dtype], *parts, *(address(part, torch.float32, heads) for part in (*decay, skip))
        where = *_states(states), *_addresses(runs), out.data_ptr()
        self.c.mamba2(*inputs, *where, len(runs.rows), num_groups, heads, depth, width)
        return out

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, gate_first: bool
    ) -> Tensor:
        if len(weight) % group or x.shape[1] % len(weight):
            raise wrong(weight, f"groups of {group} that repeat in {x.shape[1]} columns")
        out = x.new_empty(x.shape, dtype=gate.dtype)
        weights = address(weight, torch.float32), len(weight), out.data_ptr()
        inputs = address(x, torch.float32), *rows(gate, gate.dtype, *x.shape)
        self.c.gated_norm(DTYPES[gate.dtype], *inputs, *weights, *x.shape, group, eps, int(gate_first))
        return out

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        out, width = x.new_empty(x.shape), 1 if gate.shape[1] == 1 else x.shape[1]
        inputs = *rows(x, x.dtype, *x.shape), *rows(gate, x.dtype, len(x), width)
        self.c.sigmoid_gate(DTYPES[x.dtype], *inputs, width, out.data_ptr(), *x.shape)
        return out


def _states(states: Tensor) -> tuple[int | None, int]:
    if states.shape[2] > MAX_DEPTH:
        raise wrong(states, f"states of a depth of at most {MAX_DEPTH}")
    return rows(states, torch.float32, *states.shape)


def _addresses(runs: StateRuns) -> list[int | None]:
    count, kind = len(runs.rows) + 1, torch.int32
    starts, tokens, slots = runs.stores or (None, None, None)
    size = ANY if tokens is None else len(tokens)
    stored = address(starts, kind, count), address(tokens, kind, size), address(slots, kind, size)
    return [address(runs.rows, kind), address(runs.starts, kind, count), *stored]
