"""What is chosen or shown beside the chain: attention of prompts, beside that of cuDNN; drawing of tokens; quantized weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product, takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.chain import BLOCK_SIZE, Chain
from benchmarks.gpu.clock import launch_seconds, record, seconds
from benchmarks.report import Report
from nanoengine.core.attention import KVLayer
from nanoengine.core.sampling import SamplingTable
from nanoengine.kernels.triton.draws.repeated import RepeatedDraws
from nanoengine.kernels.triton.draws.sampling import choose_tokens
from nanoengine.kernels.triton.tuning import Tuning
from nanoengine.models.quantization.at_load import quantizer

SHORT = 1 << 30
"""Of `short_prompt`: every prompt is."""
GAIN = 0.02
TILES = 64, 32
"""Tokens of K and V that a program of prefill attention works on at once; the first is what stands without a measurement."""
RELEVANT = {"large": (512, SHORT), "small": (1, 1024)}
"""Of programs of each size, the lengths of prompts for which a tile is chosen."""
MOST_ERROR = 0.02
"""Of the largest number, between two ways to compute the same."""

CONTEXT = 1088


@torch.inference_mode()
def prompts(chain: Chain, report: Report, tuning: Tuning, lengths: Sequence[int], repeat: int) -> Tuning:
    """Attention of one prompt without history, in large programs and in small ones, with tiles of 64 and of 32 tokens, beside
    cuDNN's.

    Kept is the tile of each size that is faster in the geometric mean, and small programs up to the length from which on they are
    not faster.
    """
    times: dict[tuple[str, int], dict[int, float]] = {key: {} for key in product(RELEVANT, TILES)}
    for length in sorted(lengths):
        (q, runs), spec = chain.queries([length], [length]), chain.spec
        flop = 4 * q.shape[1] * q.shape[2] * length * (length + 1) / 2
        expected: Tensor | None = None
        for (size, tile), found in times.items():
            chain.tune(of_prompts(tuning, size, tile))
            attend = partial(chain.backend.prefill, q, runs=runs, spec=spec)
            try:
                result = attend(chain.kv[-1])
                expected = result if expected is None else expected
                error = ((result - expected).abs().max() / expected.abs().max()).item()
                assert error < MOST_ERROR, f"it is wrong by {error:.2g} of the largest number"
                found[length] = _add(chain, report, length, f"{size}, {tile}", attend, repeat, flop)
            except Exception as failure:  # Triton and torch have none in common
                report.warn(f"left out: {size} programs, tiles of {tile}, {length} tokens: {str(failure)[:200]}")
                found[length] = math.inf
        if chain.device.type == "cuda":
            _add(chain, report, length, "cuDNN", _cudnn(chain, length), repeat, flop)
    tiles = {size: min(TILES, key=lambda tile: _mean(times, size, tile)) for size in RELEVANT}
    large, small = (times[size, tile] for size, tile in tiles.items())
    shorter = takewhile(lambda length: small[length] < (1 - GAIN) * large[length], sorted(lengths))
    return replace(tuning, short_prompt=max(shorter, default=0), prefill_tile=tiles["large"], short_tile=tiles["small"])


def of_prompts(tuning: Tuning, size: str, tile: int) -> Tuning:
    """Every prompt in large or in small programs."""
    return replace(tuning, short_prompt=SHORT * (size == "small"), prefill_tile=tile, short_tile=tile)


def _mean(times: dict[tuple[str, int], dict[int, float]], size: str, tile: int) -> float:
    """The geometric mean where programs of that size come into question; what stands today is given up for a gain alone."""
    shortest, longest = RELEVANT[size]
    found = [us for length, us in times[size, tile].items() if shortest <= length <= longest]
    return (1 - GAIN if tile == TILES[0] else 1.0) * math.prod(found) ** (1 / max(1, len(found)))


def _cudnn(chain: Chain, length: int) -> Callable[[KVLayer], Tensor]:
    config = chain.config
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    q, k, v = (chain.normal(1, length, own, config.head_dim).transpose(1, 2) for own in heads)

    def attend(_: KVLayer) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return attend


def _add(
    chain: Chain, report: Report, length: int, how: str, attend: Callable[[KVLayer], Tensor], repeat: int, flop: float
) -> float:
    found = chain.layer_seconds(attend, repeat)
    case = {"work": "attention of a prompt", "tokens": length, "programs": how}
    report.add(case, {"us": 1e6 * found, "tflop_s": flop / found / 1e12})
    return found


@torch.inference_mode()
def draws(chain: Chain, report: Report, tuning: Tuning, rows: Sequence[int], repeat: int) -> Tuning:
    """Drawing a token for each row: greedy, at random, and from what filters leave; and the host's time to launch
    that, once and again. There is nothing to choose."""
    chain.tune(tuning)
    device, vocab = chain.device, chain.config.vocab_size
    for count in rows:
        logits = torch.randn(count, vocab, device=device, dtype=torch.float32, generator=chain.random) * 3
        entries = torch.arange(count, dtype=torch.int32, device=device)
        for how, (temperature, top_k, top_p) in {
            "greedy": (0, 0, 1),
            "drawn": (0.6, 0, 1),
            "filtered": (0.6, 50, 0.9),
        }.items():
            ones = torch.ones(count + 1, dtype=torch.float32, device=device)
            seeds = torch.arange(count + 1, dtype=torch.int64, device=device)
            filtering = set(range(count)) if top_k else set()
            table = SamplingTable(ones * temperature, ones.int() * top_k, ones * top_p, ones * 0, seeds, filtering)
            given = logits, table, entries, entries, None, tuning.launch(count)
            once, again = partial(choose_tokens, *given), partial(RepeatedDraws().choose, *given)
            found = seconds(device, record(device, once), repeat)
            figures = {"us": 1e6 * found, "gb_s": logits.nbytes / found / 1e9}
            expected, _ = once(), again()
            if not torch.equal(again(), expected):
                report.warn(f"wrong: a draw that is made again chooses other tokens: {how}, {count} rows")
            if device.type == "cuda":
                figures |= {
                    "host_once_us": 1e6 * launch_seconds(once, repeat),
                    "host_again_us": 1e6 * launch_seconds(again, repeat),
                }
            report.add({"work": "drawing", "rows": count, "how": how}, figures)
    return tuning


@torch.inference_mode()
def quantized(
    device: torch.device, shape: str, dtype: torch.dtype, report: Report, tuning: Tuning, args: Any
) -> Tuning:
    """A step of one stream with weights of 8 and 4 bits, beside numbers. There is nothing to choose."""
    lens, first = [max(2, CONTEXT // args.scale)], 0.0
    for name in (None, "int8", "int4"):
        chain = Chain(shape, device, dtype, lens[0] + BLOCK_SIZE, quantize=None if name is None else quantizer(name))
        chain.tune(tuning)
        found = seconds(device, chain.record(chain.inputs(lens)), args.repeat)
        first = first or found
        case = {"work": "quantized step", "shape": shape, "weights": name or "numbers"}
        report.add(case, {"us": 1e6 * found, "times_as_fast": first / found})
    return tuning
