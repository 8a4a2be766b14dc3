"""Attention by flash-attn 4 beside Triton's: prompts, from which on it is chosen; and decodes, to be seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu.chain import AT_ONCE, BLOCK_SIZE, Chain
from benchmarks.gpu.clock import launch_seconds
from benchmarks.random_weights import SHAPES
from benchmarks.report import Report
from nanoengine.core.attention import AttentionSpec, Runs
from nanoengine.core.model_config import DenseConfig
from nanoengine.kernels import flash_attn_4
from nanoengine.kernels.triton.tuning import Tuning
from nanoengine.models.architectures import read_model_config

GAIN = 0.05
"""It is chosen where it takes so much less time."""
CLOSE = 0.02
"""Most of the root of the mean square of differences from Triton's result, in standard deviations: each rounds in its way."""
DECODES = [1088], [600] * 256


def compile_flash(shape: str, device: torch.device, dtype: torch.dtype) -> None:
    """Compile all of its kernels that are timed here, if they are not in its cache."""
    config = read_model_config(SHAPES[shape])
    if flash_attn_4.unsupported_reason(device, dtype, config.head_dim) is None:
        count = torch.cuda.get_device_properties(device).multi_processor_count
        compile_for(config, dtype, torch.cuda.get_device_capability(device), count)


def compile_for(config: DenseConfig, dtype: torch.dtype, capability: tuple[int, int], multiprocessors: int) -> None:
    """The same, for a GPU that need not be there."""
    flash_attn_4.compile_ahead(flash_attn_4.kernels_of(config, dtype), capability, multiprocessors)
    with FakeTensorMode(), torch.inference_mode():
        of = partial(torch.empty, dtype=dtype, device="cuda")
        ints = partial(torch.empty, dtype=torch.int32, device="cuda")
        k, v = (of(64, config.num_kv_heads, BLOCK_SIZE, config.head_dim) for _ in range(2))
        runs = Runs(ints(2), ints(1), ints(1, 64), [1], [1024])  # a decode
        q = of(1, config.num_heads, config.head_dim)
        flash_attn_4.attend(q, _views((k, v)), runs, AttentionSpec(1.0), None)


@torch.inference_mode()
def flash_prompts(chain: Chain, report: Report, tuning: Tuning, args: Any) -> Tuning:
    """Chosen for prompts from that length on from which it is faster by `GAIN`, and right, at every length."""
    if reason := flash_attn_4.unsupported_reason(chain.device, chain.dtype, chain.config.head_dim):
        print(f"flash-attn 4 is left out: {reason}", flush=True)
        report.facts["flash-attn 4"] = reason
        return tuning
    chain.tune(tuning)
    chosen, is_faster = 0, True
    for length in sorted((n for n in args.prompts if n >= flash_attn_4.LEAST_TOKENS), reverse=True):
        is_faster = _is_faster(chain, report, length, args) and is_faster
        chosen = length if is_faster else chosen
    for lens in DECODES:
        _decodes(chain, report, lens, args.repeat)
    return replace(tuning, flash_prompt=chosen)


def _is_faster(chain: Chain, report: Report, length: int, args: Any) -> bool:
    (q, runs), spec = chain.queries([length], [length]), chain.spec
    ways: dict[str, Callable[..., Tensor]] = {
        "Triton": lambda kv: chain.backend.prefill(q, kv, runs, spec),
        "flash-attn 4": lambda kv: flash_attn_4.attend(q, _views(kv), runs, spec, None),
    }
    flop = 4 * chain.config.num_heads * chain.config.head_dim * length * (length + 1) / 2
    expected, times = ways["Triton"](chain.kv[0]).float(), {}
    for name, way in ways.items():
        with _left_out(report, f"{name} at {length} tokens"):
            found = way(chain.kv[0])
            error = ((found.float() - expected).square().mean().sqrt() / expected.std()).item()
            same = all(torch.equal(way(chain.kv[0]), found) for _ in range(args.replays))
            if not error < CLOSE or not same:  # or not a number
                raise ValueError(f"it is {error:.3g} standard deviations from Triton's; the same each time: {same}")
            times[name] = chain.layer_seconds(way, args.repeat)
            case = {"work": "attention of a prompt alone", "tokens": length, "by": name}
            figures = {"us": 1e6 * times[name], "tflop_s": flop / times[name] / 1e12, "error": error}
            torch.cuda.synchronize()
            figures["host_us"] = 1e6 * launch_seconds(partial(way, chain.kv[0]), AT_ONCE)
            torch.cuda.synchronize()
            report.add(case, figures)
    return times.get("flash-attn 4", math.inf) < (1 - GAIN) * times["Triton"]


def _decodes(chain: Chain, report: Report, lens: list[int], repeat: int) -> None:
    (q, runs), spec = chain.queries([1] * len(lens), lens), chain.spec
    ways: dict[str, Callable[..., Tensor]] = {
        "Triton": lambda kv: chain.backend.decode(q, kv, runs, spec),
        "flash-attn 4": lambda kv: flash_attn_4.attend(q, _views(kv), runs, spec, None),
    }
    size = 2 * sum(lens) * chain.config.num_kv_heads * chain.config.head_dim * q.element_size()
    for name, way in ways.items():
        with _left_out(report, f"{name}, {len(lens)} decodes"):
            found = chain.layer_seconds(way, repeat)
            case = {"work": "attention of decodes alone", "sequences": len(lens), "by": name}
            report.add(case, {"us": 1e6 * found, "gb_s": size / found / 1e9})


@contextmanager
def _left_out(report: Report, what: str) -> Iterator[None]:
    """One way that fails ends no other."""
    try:
        yield
    except Exception as error:  # the package, Triton and torch have none in common
        report.warn(f"left out: {what}: {type(error).__name__}: {str(error)[:200]}")


def _views(kv: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return kv[0].transpose(1, 2), kv[1].transpose(1, 2)
