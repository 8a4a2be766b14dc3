"""Layers that remember a sequence as a state of fixed size, token by token: the reference of their kernels, in plain torch.

The token recurrence is equal to the bit however a sequence is cut into steps. A state is float32, and lies in a slot: a row of a
tensor [num_slots, ...]. A run reads the state of its row and leaves it behind its last token; `stores` may say otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Stores(NamedTuple):
    """Slots for the states of a step's runs: run i stores one behind tokens[starts[i]:starts[i + 1]], which ascend."""

    starts: Tensor  # [num_runs + 1] int32
    tokens: Tensor  # [m] int32: tokens of the step
    slots: Tensor  # [m] int32


class StateRuns(NamedTuple):
    """Runs of new tokens, as layers with states see them."""

    rows: Tensor  # [num_runs] int32: the slot of each
    starts: Tensor  # [num_runs + 1] int32: the tokens of run i are [starts[i], starts[i + 1])
    stores: Stores | None = None  # None: of each run behind its last token, in its row's slot

    def rows_of_runs(self) -> Iterator[tuple[int, list[tuple[int, list[int]]]]]:
        """(slot, its tokens, each with the slots that the state behind it goes to) of each run."""
        rows, starts = self.rows.tolist(), self.starts.tolist()
        first, tokens, slots = (part.tolist() for part in self.stores) if self.stores else ([], [], [])
        for run, row in enumerate(rows):
            tokens_of_run = range(starts[run], starts[run + 1])
            if self.stores is None:
                yield row, [(token, [row] * (token == tokens_of_run[-1])) for token in tokens_of_run]
            else:
                stored = list(zip(tokens, slots, strict=True))[first[run] : first[run + 1]]
                yield row, [(token, [slot for at, slot in stored if at == token]) for token in tokens_of_run]


class Decay(NamedTuple):
    """How the state of a head fades: by exp(-exp(log_rate) * softplus(x + bias)) for what a projection says, x."""

    log_rate: Tensor  # [num_heads] float32
    bias: Tensor  # [num_heads] float32


def short_conv(
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
    """A causal convolution of each channel over few tokens: [num_tokens, channels] -> the same.

    Args:
        x, before, after: [num_tokens, channels]; rows may lie apart. What is convolved is before * x, the result is multiplied by
            `after`.
        weight: [taps, channels] float32, of the token itself last.
        bias: [channels] float32.
        states: [num_slots, taps - 1, channels] float32: the last inputs of each sequence.
        silu: whether the result goes through it.
    """
    inputs = x.float() if before is None else x.float() * before.float()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for row, tokens in runs.rows_of_runs():
        state = states[row].clone()
        for token, slots in tokens:
            window = torch.cat((state, inputs[token, None]))
            total = torch.zeros_like(inputs[token]) if bias is None else bias.clone()
            for tap, column in zip(weight, window, strict=True):
                total = total + tap * column
            out[token] = total
            state = window[1:]
            for slot in slots:
                states[slot] = state
    out = F.silu(out) if silu else out
    return (out if after is None else out * after.float()).to(x.dtype)


def delta_rule(
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
    """The gated delta rule (Yang et al., 2024): S <- e S + k (beta (v - e S^T k))^T; out = S^T q, with q and k of length 1.

    Args:
        qkv: [num_tokens, 2 * num_k_heads * d_k + num_heads * d_v].
        a, b: [num_tokens, num_heads]; rows may lie apart. beta is sigmoid(b), e what `decay` makes of a.
        states: [num_slots, num_heads, d_k, d_v] float32.
        tiled: head i has query and key i % num_k_heads, and not i // (num_heads / num_k_heads).

    Returns:
        [num_tokens, num_heads * d_v] float32.
    """
    _, heads, d_k, d_v = states.shape
    q, k, v = qkv.float().split((num_k_heads * d_k, num_k_heads * d_k, heads * d_v), dim=-1)
    q, k = (x.unflatten(-1, (num_k_heads, d_k)) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    tokens_of_run = torch.arange(heads, dtype=torch.int64, device=v.device)
    tokens_of_run = tokens_of_run % num_k_heads if tiled else tokens_of_run // (heads // num_k_heads)
    q, k = q[:, tokens_of_run] * d_k**-0.5, k[:, tokens_of_run]
    v, beta = v.unflatten(-1, (heads, d_v)), b.float().sigmoid()
    fade = torch.exp(-torch.exp(decay.log_rate) * F.softplus(a.float() + decay.bias))
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    for row, tokens in runs.rows_of_runs():
        state = states[row].clone()
        for token, slots in tokens:
            seen = fade[token, :, None] * torch.einsum("hkv,hk->hv", state, k[token])
            change = beta[token, :, None] * (v[token] - seen)
            state = state * fade[token, :, None, None] + k[token, :, :, None] * change[:, None]
            out[token] = torch.einsum("hkv,hk->hv", state, q[token])
            for slot in slots:
                states[slot] = state
    return out.flatten(1)


def mamba2(
    xbc: Tensor, dt: Tensor, decay: Decay, skip: Tensor, num_groups: int, states: Tensor, runs: StateRuns
) -> Tensor:
    """The scan of Mamba 2 (Dao and Gu, 2024): S <- e S + B (t x)^T; out = S^T C + skip x, where t = softplus(dt + bias).

    Args:
        xbc: [num_tokens, num_heads * d + 2 * num_groups * n]; groups of heads share B and C.
        dt: [num_tokens, num_heads]; rows may lie apart. e is what `decay` makes of it.
        skip: [num_heads] float32.
        states: [num_slots, num_heads, n, d] float32.

    Returns:
        [num_tokens, num_heads * d] float32.
    """
    _, heads, n, d = states.shape
    x, b, c = xbc.float().split((heads * d, num_groups * n, num_groups * n), dim=-1)
    x = x.unflatten(-1, (heads, d))
    b, c = (part.unflatten(-1, (num_groups, n)).repeat_interleave(heads // num_groups, dim=1) for part in (b, c))
    step = F.softplus(dt.float() + decay.bias)
    fade = torch.exp(-torch.exp(decay.log_rate) * step)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for row, tokens in runs.rows_of_runs():
        state = states[row].clone()
        for token, slots in tokens:
            change = step[token, :, None] * x[token]
            state = state * fade[token, :, None, None] + b[token, :, :, None] * change[:, None]
            out[token] = torch.einsum("hnd,hn->hd", state, c[token]) + skip[:, None] * x[token]
            for slot in slots:
                states[slot] = state
    return out.flatten(1)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, gate_first: bool) -> Tensor:
    """RMSNorm of each `group` of columns, times silu(gate), before or behind it: [num_tokens, width] float32 -> gate's dtype.

    Args:
        gate: [num_tokens, width]; rows may lie apart.
        weight: [width] float32, or fewer, which repeat.
    """
    factor = F.silu(gate.float())
    x = x * factor if gate_first else x
    normed = F.rms_norm(x.unflatten(-1, (-1, group)), (group,), eps=eps).flatten(1)
    normed = normed * weight.repeat(x.shape[1] // len(weight))
    return (normed if gate_first else normed * factor).to(gate.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate): [num_tokens, width] -> the same. The gate is [num_tokens, width or 1]; rows may lie apart."""
    return (x.float() * gate.float().sigmoid()).to(x.dtype)
