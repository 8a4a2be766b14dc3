"""What is chosen or shown beside the chain: attention of prompts, beside that of cuDNN; drawing of tokens; quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.chain import BLOCK_SIZE, Chain, record, seconds
from benchmarks.report import Report
from nanoengine.core.attention import AttentionSpec, Runs
from nanoengine.core.sampling import SamplingTable
from nanoengine.kernels.triton.draws.repeated import RepeatedDraws
from nanoengine.kernels.triton.draws.sampling import choose_tokens
from nanoengine.kernels.triton.tuning import Tuning
from nanoengine.models.quantization.at_load import quantizer

SHORT = 1 << 30
"""Of `short_prompt`: every prompt is."""
AT_ONCE = 8
"""Layers in one graph."""
GAIN = 0.02

CONTEXT = 1088


@torch.inference_mode()
def prompts(chain: Chain, report: Report, tuning: Tuning, lengths: Sequence[int], repeat: int) -> Tuning:
    """Attention of one prompt without history, in large programs and in small ones; small ones are kept up to the length from
    which on they are not faster."""
    config, chosen, is_faster = chain.config, 0, True
    spec = AttentionSpec(config.head_dim**-0.5)
    for length in sorted(lengths):
        q = chain.normal(length, config.num_heads, config.head_dim)
        ints = partial(torch.tensor, dtype=torch.int32, device=chain.device)
        tables = torch.randperm(chain.num_blocks, device=chain.device)[None, : -(-length // BLOCK_SIZE)].to(torch.int32)
        runs = Runs(ints([0, length]), ints([length]), tables, [length], [length])
        flop = 4 * config.num_heads * config.head_dim * length * (length + 1) / 2
        times = []
        for short in (0, SHORT):
            chain.tune(replace(tuning, short_prompt=short))

            def work(q: Tensor = q, runs: Runs = runs) -> Tensor:
                return [chain.backend.prefill(q, kv, runs, spec) for kv in chain.kv[:AT_ONCE]][-1]

            times.append(_add(chain, report, length, "small" if short else "large", work, repeat, flop))
        is_faster &= times[1] < (1 - GAIN) * times[0]
        chosen = length if is_faster else chosen
        if chain.device.type == "cuda":
            heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
            q, k, v = (chain.normal(1, length, own, config.head_dim).transpose(1, 2) for own in heads)
            attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)

            def cudnn(attend: Callable[[], Tensor] = attend) -> Tensor:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    return [attend() for _ in chain.kv[:AT_ONCE]][-1]

            _add(chain, report, length, "cuDNN", cudnn, repeat, flop)
    return replace(tuning, short_prompt=chosen)


def _add(
    chain: Chain, report: Report, length: int, how: str, work: Callable[[], Tensor], repeat: int, flop: float
) -> float:
    found = seconds(chain.device, record(chain.device, work), repeat) / min(AT_ONCE, len(chain.kv))
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


def launch_seconds(work: Callable[[], object], repeat: int) -> float:
    """What the host takes to launch some work, in the mean; the device may still be at it then."""
    start = perf_counter()
    for _ in range(repeat):
        work()
    return (perf_counter() - start) / repeat


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
