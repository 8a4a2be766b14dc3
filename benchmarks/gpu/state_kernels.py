"""Layers with states: decodes of several sequences, and a prompt alone, in the sizes of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.kernel_bench import Bench
from nanoengine.kernels.recurrences import Decay, StateRuns

SIZES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "short_conv, 8192 channels": ((8192,), (3, 8192)),
    "delta_rule, 32 heads of 128 x 128": ((8192, 32, 32), (32, 128, 128)),
    "mamba2, 48 heads of 128 x 64": ((3328, 48), (48, 128, 64)),
}
"""Parts of what is projected of a token, and the state of a sequence: Qwen3-Next's twice, and Granite 4's."""


def states(bench: Bench) -> None:
    """The least is to read and write each state once, and what is projected and made of the tokens."""
    for name, (widths, shape) in SIZES.items():
        for tokens, batch in (
            *((1, batch) for batch in bench.args.batch),
            *((prompt, 1) for prompt in bench.args.prompt),
        ):
            x = bench.random(tokens * batch, sum(widths))
            slots = torch.zeros(batch, *shape, device=bench.device)
            runs = StateRuns(
                torch.arange(batch, dtype=torch.int32, device=bench.device),
                torch.arange(0, tokens * batch + 1, tokens, dtype=torch.int32, device=bench.device),
            )
            work = _work(bench, name, x.split(widths, dim=1), slots, runs)
            num_bytes = 2 * slots.nbytes + x.nbytes + work().nbytes
            bench.add({"kernel": name, "rows": batch, "tokens": tokens}, work, num_bytes)


def _work(bench: Bench, name: str, parts: Sequence[Tensor], slots: Tensor, runs: StateRuns) -> Callable[[], Tensor]:
    first, kernels, numbers = parts[0], bench.kernels, torch.rand(slots.shape[1], device=bench.device)
    decay = Decay(numbers, numbers)
    if name.startswith("short_conv"):
        filters = torch.randn(4, first.shape[1], device=bench.device)
        return partial(kernels.short_conv, first, filters, None, slots, runs, silu=True)
    if name.startswith("delta_rule"):
        return partial(kernels.delta_rule, first, parts[1], parts[2], decay, 16, slots, runs)
    return partial(kernels.mamba2, first, parts[1], decay, numbers, 1, slots, runs)
