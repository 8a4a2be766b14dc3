"""What the time of one stream is made of: the step from one kernel to the next, and the reading of weights.

Of kernels that do nothing, each behind the one before, there are as many as a step of 28 layers has. In the chain of a model all
layers have the weights of the first: they stay in the L2 cache, and all else is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu.chain import Chain, record, seconds
from benchmarks.report import Report
from nanoengine.core.layers import Linear
from nanoengine.core.qwen3 import DenseLayer
from nanoengine.kernels.triton import dependent
from nanoengine.kernels.triton.tuning import Tuning

KERNELS = 168
PROGRAMS = (1, 512)
MOST_INTERPRETED = 3
LAUNCHES = {0: "plain", 1: "dependent", 2: "dependent, early"}


@triton.jit
def _count_kernel(count: Any, LAUNCH: tl.constexpr) -> None:
    """The first program adds 1."""
    dependent.start(LAUNCH)
    dependent.wait(LAUNCH)
    if tl.program_id(0) == 0:
        tl.store(count, tl.load(count) + 1)


@torch.inference_mode()
def edges(chain: Chain, report: Report, tuning: Tuning, lens: Sequence[int], repeat: int) -> Tuning:
    """Report both; there is nothing to choose.

    Args:
        lens: tokens of the sequences of the chain's step.
        repeat: replays that are timed.
    """
    on_gpu = chain.device.type == "cuda"
    kinds = LAUNCHES if on_gpu and torch.cuda.get_device_capability(chain.device) >= (9, 0) else {0: "plain"}
    kernels = KERNELS if on_gpu else MOST_INTERPRETED
    for launch, name in kinds.items():
        for programs in PROGRAMS if on_gpu else PROGRAMS[:1]:
            count = torch.zeros(1, dtype=torch.int32, device=chain.device)

            def work(launch: int = launch, programs: int = programs, count: Tensor = count) -> Tensor:
                for _ in range(kernels):
                    _count_kernel[(programs,)](count, LAUNCH=launch, **dependent.options(launch))
                return count

            replay = record(chain.device, work)
            count.zero_()
            replay()
            seen = int(count.item())
            found = seconds(chain.device, replay, repeat)
            case = {"work": "edge of a kernel", "launch": name, "programs": programs}
            report.add(case, {"us": 1e6 * found / kernels, "counted": float(seen)})
            if seen != kernels:
                report.warn(f"{kernels} kernels that wait for each other ({name}) have counted to {seen}")
    step = chain.inputs(lens)
    for launch, name in kinds.items():
        chain.tune(replace(tuning, dependent_launch=launch))
        of_all = seconds(chain.device, chain.record(step), repeat)
        with weights_of_the_first_layer(chain):
            of_one = seconds(chain.device, chain.record(step), repeat)
        case = {"work": "weights of one layer for all", "launch": name, "sequences": len(lens)}
        report.add(case, {"us": 1e6 * of_one, "with_those_of_all_us": 1e6 * of_all})
    return tuning


@contextmanager
def weights_of_the_first_layer(chain: Chain) -> Iterator[None]:
    """All layers of a dense model compute with them."""
    of_layers = [list(_products(layer)) for layer in chain.model.layers]
    kept = [[part.weight for part in products] for products in of_layers]
    try:
        for products in of_layers:
            for part, weight in zip(products, kept[0], strict=True):
                part.weight = weight
        yield
    finally:
        for products, weights in zip(of_layers, kept, strict=True):
            for part, weight in zip(products, weights, strict=True):
                part.weight = weight


def _products(layer: DenseLayer) -> Iterator[Linear]:
    """Those of attention and of the MLP, in the same order for each layer."""
    for part in (layer.self_attn, layer.mlp):
        yield from (each for each in vars(part).values() if isinstance(each, Linear))
