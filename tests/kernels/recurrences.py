"""What layers with states ask of kernels: right to the reference, and the same bits however runs are cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanoengine.kernels import recurrences as reference
from nanoengine.kernels.operations import Kernels
from nanoengine.kernels.recurrences import Decay, StateRuns, Stores

NUM_SLOTS = 9

Mix = Callable[[Any, Tensor, Tensor, StateRuns], Tensor]
"""(kernels or the reference, inputs of tokens, states, runs) -> what comes out."""


LARGE = [333, 1, 60, *[1] * 60]
"""Tokens of runs beside a long one: its tokens are computed at once, and one by one among many."""


def check_recurrences(
    kernels: Kernels, seed: int, device: str = "cpu", *, small: bool = False, real: bool = False
) -> None:
    """Draw sizes and runs, small ones for an interpreter, or those of models; slots that no run has are NaN, and stay so."""
    with torch.device(device):
        check_on_device(kernels, seed, small=small, real=real)


def check_on_device(kernels: Kernels, seed: int, *, small: bool, real: bool) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.bfloat16])
    for mix, width, shape in (
        conv(rng, real=real),
        delta_rule(rng, small=small, real=real),
        mamba2(rng, small=small, real=real),
    ):
        lens = [rng.choice([1, 1, 2, 4] if small else [1, 1, 2, 5, 9]) for _ in range(rng.randint(1, 4 - small))]
        lens = LARGE if real else lens
        x = torch.randn(sum(lens), width + 3).to(dtype)[:, :width]  # rows lie apart
        num_slots = len(lens) + 2 if real else NUM_SLOTS
        slots = rng.sample(range(num_slots), len(lens) + 2)
        whole = runs_of(slots[: len(lens)], lens)
        begun = torch.full((num_slots, *shape), float("nan"))
        begun[slots[: len(lens)]] = torch.randn(len(lens), *shape)
        right_states, states = begun.clone(), apart(begun)
        right, out = mix(reference, x, right_states, whole), mix(kernels, x, states, whole)
        exact = 2e-3 if real else 2e-4
        close = exact if dtype is torch.float32 or out.dtype is torch.float32 else 2e-2
        torch.testing.assert_close(out, right, rtol=close, atol=close)
        torch.testing.assert_close(states, right_states, rtol=exact, atol=exact, equal_nan=True)
        check_cut(kernels, mix, x, begun, slots, lens, out, states, rng)
        check_padding(kernels, mix, x, begun, slots, lens, out, states)
    check_gates(kernels, rng, dtype)


def check_cut(
    kernels: Kernels,
    mix: Mix,
    x: Tensor,
    begun: Tensor,
    slots: list[int],
    lens: list[int],
    out: Tensor,
    right: Tensor,
    rng: random.Random,
) -> None:
    """Token by token in turns; and with a state that is kept inside of the first run, which itself is left as it was."""
    states, found = apart(begun), torch.empty_like(out)
    first = [sum(lens[:i]) for i in range(len(lens))]
    for step in range(max(lens)):
        own = [i for i in rng.sample(range(len(lens)), len(lens)) if step < lens[i]]
        tokens = [first[i] + step for i in own]
        found[tokens] = mix(kernels, x[tokens], states, runs_of([slots[i] for i in own], [1] * len(own)))
    assert torch.equal(found, out)
    assert torch.equal(states.nan_to_num(), right.nan_to_num())
    states, cut = apart(begun), rng.randrange(lens[0])
    ints = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    others = range(1, len(lens))
    ends = [first[i] + lens[i] - 1 for i in others]
    stores = Stores(
        ints(0, *(1 + i for i in range(len(lens)))), ints(cut, *ends), ints(slots[-1], *(slots[i] for i in others))
    )
    assert torch.equal(mix(kernels, x, states, runs_of(slots[: len(lens)], lens)._replace(stores=stores)), out)
    assert torch.equal(states[slots[0]], begun[slots[0]])
    rest = list(range(cut + 1, lens[0]))
    if rest:
        assert torch.equal(mix(kernels, x[rest], states, runs_of([slots[-1]], [len(rest)])), out[rest])
    assert torch.equal(states[slots[-1]], right[slots[0]])


def check_padding(
    kernels: Kernels, mix: Mix, x: Tensor, begun: Tensor, slots: list[int], lens: list[int], out: Tensor, right: Tensor
) -> None:
    """Runs of padding behind the others, some without a token, have one slot, and may leave anything there."""
    states, padded = apart(begun), torch.cat((x, x[:1], x[-1:]))
    own, padding = slots[: len(lens)], slots[-1]
    found = mix(kernels, padded, states, runs_of([*own, *[padding] * 4], [*lens, 1, 0, 1, 0]))
    assert torch.equal(found[: len(x)], out)
    assert torch.equal(states[own], right[own])
    states = apart(begun)
    states[padding] = before = torch.randn(states[padding].shape)
    mix(kernels, x, states, runs_of([*own, padding], [*lens, 0]))
    assert torch.equal(states[padding], before)


def runs_of(slots: list[int], lens: list[int]) -> StateRuns:
    starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
    return StateRuns(torch.tensor(slots, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32))


def apart(states: Tensor) -> Tensor:
    """The same numbers, with something between two slots."""
    room = torch.full((len(states), states[0].numel() + 5), 7.0)
    view = room[:, :-5].unflatten(1, states.shape[1:])
    return view.copy_(states)


def conv(rng: random.Random, *, real: bool) -> tuple[Mix, int, tuple[int, ...]]:
    taps, channels = rng.choice([2, 3, 4, 8]), rng.choice([2048, 8192] if real else [1, 16, 37, 64, 200])
    is_gated, silu = rng.random() < 0.5, rng.random() < 0.5
    weight, bias = torch.randn(taps, channels), torch.randn(channels) if rng.random() < 0.5 else None

    def mix(kernels: Any, x: Tensor, states: Tensor, runs: StateRuns) -> Tensor:
        before, after, own = x.chunk(3, dim=1)
        gates = {"before": before, "after": after} if is_gated else {}
        return kernels.short_conv(own, weight, bias, states, runs, silu=silu, **gates)

    return mix, 3 * channels, (taps - 1, channels)


def heads(
    rng: random.Random, *, small: bool, of_model: tuple[int, int, int, int] | None
) -> tuple[int, int, int, int, Decay]:
    """Groups, heads, depth and width of states, drawn or those of a model."""
    groups, sharing = rng.choice([(2, 2), (1, 3), (2, 1), (1, 1)][: 3 if small else 4])
    depth, width = rng.choice([1, 6, 16, 33, 64, 256]), rng.choice([1, 10, 16] if small else [1, 10, 16, 64, 100])
    groups, sharing, depth, width = of_model or (groups, sharing, depth, width)
    count = groups * sharing
    return groups, count, depth, width, Decay(torch.randn(count), torch.randn(count))


def delta_rule(rng: random.Random, *, small: bool, real: bool) -> tuple[Mix, int, tuple[int, ...]]:
    groups, count, depth, width, decay = heads(rng, small=small, of_model=(16, 2, 128, 128) if real else None)
    channels, tiled = 2 * groups * depth + count * width, rng.random() > 0.5

    def mix(kernels: Any, x: Tensor, states: Tensor, runs: StateRuns) -> Tensor:
        qkv, a, b = x.split([channels, count, count], dim=1)
        return kernels.delta_rule(qkv, a, b, decay, groups, states, runs, tiled=tiled)

    return mix, channels + 2 * count, (count, depth, width)


def mamba2(rng: random.Random, *, small: bool, real: bool) -> tuple[Mix, int, tuple[int, ...]]:
    groups, count, depth, width, decay = heads(rng, small=small, of_model=(1, 48, 128, 64) if real else None)
    channels, skip = 2 * groups * depth + count * width, torch.randn(count)

    def mix(kernels: Any, x: Tensor, states: Tensor, runs: StateRuns) -> Tensor:
        xbc, dt = x.split([channels, count], dim=1)
        return kernels.mamba2(xbc / depth**0.5, dt, decay, skip, groups, states, runs)

    return mix, channels + count, (count, depth, width)


def check_gates(kernels: Kernels, rng: random.Random, dtype: torch.dtype) -> None:
    rows, groups, group = rng.randint(1, 5), rng.choice([1, 3]), rng.choice([1, 16, 37, 128])
    x, gate = torch.randn(rows, groups * group), torch.randn(rows, groups * group + 2).to(dtype)[:, 2:]
    weight, first = torch.randn(rng.choice([group, groups * group])), rng.random() < 0.5
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    found = kernels.gated_norm(x, gate, weight, 1e-5, group, gate_first=first)
    torch.testing.assert_close(found, reference.gated_norm(x, gate, weight, 1e-5, group, gate_first=first), **close)
    for by in (gate, gate[:, :1]):
        torch.testing.assert_close(
            kernels.sigmoid_gate(x.to(dtype), by), reference.sigmoid_gate(x.to(dtype), by), **close
        )
    assert torch.equal(kernels.gated_norm(x[-1:], gate[-1:], weight, 1e-5, group, gate_first=first), found[-1:])
