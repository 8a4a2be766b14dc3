"""Kernels with specialized warps, beside those that compute the same: are they right, the same in every replay, and faster?

    python -m benchmarks.gpu.specialized --tuning '{"short_prompt": 512}' --save specialized.json

A process of its own, which has a time limit: a kernel whose warps wait for each other for ever ends nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.chain import BLOCK_SIZE, record, seconds
from benchmarks.report import Report
from nanoengine.core.attention import AttentionSpec, Runs
from nanoengine.kernels.triton.attention.backend import TritonAttention
from nanoengine.kernels.triton.attention.whole_prompt import whole_prompt
from nanoengine.kernels.triton.products.activation import gate_and_multiply
from nanoengine.kernels.triton.products.gated_product import gated_product
from nanoengine.kernels.triton.tuning import Tuning

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, GATED = 16, 8, 128, 1024, 3072
"""The shapes of Qwen3-0.6B."""
LENGTHS = 512, 1024, 2048, 4096, 16384
ROWS = 1024, 4096, 16384
TILES = 64, 128
LAYERS = 8
"""In one graph."""
REPLAYS = 200
MOST_ERROR = 0.02
GAIN = 0.03
SECONDS = 25


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("gpu_specialized")
    parser.add_argument("--tuning", type=json.loads, default={}, help="fields, as JSON")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--warm", action="store_true", help="only compile the kernels")
    parser.add_argument("--save", type=Path, default=Path("specialized.json"))
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    found: list[dict[str, object]] = []
    with torch.inference_mode(), torch.device("cuda"):
        for length in LENGTHS[:1] if args.warm else LENGTHS:
            measure(found, args, "prompt", length, prompts(length, Tuning(**args.tuning)))
        for rows in (ROWS[0], ROWS[-1]) if args.warm else ROWS:
            measure(found, args, "gates", rows, gates(rows))


def prompts(length: int, tuning: Tuning) -> dict[str, Callable[[], Tensor]]:
    """Attention of a prompt without history."""
    width = HEADS + 2 * KV_HEADS
    qkv = [torch.randn(length, width, HEAD_DIM, dtype=torch.bfloat16) for _ in range(LAYERS)]
    parts = [each.split((HEADS, KV_HEADS, KV_HEADS), dim=1) for each in qkv]
    backend, scale = TritonAttention(BLOCK_SIZE, replace(tuning, whole_prompt_tile=0)), HEAD_DIM**-0.5
    num_blocks = -(-length // BLOCK_SIZE)
    shape = backend.kv_shape(num_blocks, KV_HEADS, HEAD_DIM)
    kv = [(torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape, dtype=torch.bfloat16)) for _ in parts]
    table = torch.randperm(num_blocks)
    slots = (table[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:length]
    for (_, k, v), caches in zip(parts, kv, strict=True):
        backend.write_kv(k, v, caches, slots)
    starts, lens = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, length], [length]))
    runs, spec = Runs(starts, lens, table[None].int(), [length], [length]), AttentionSpec(scale)
    ways: dict[str, Callable[[], Tensor]] = {
        "paged": lambda: [backend.prefill(q, each, runs, spec) for (q, *_), each in zip(parts, kv, strict=True)][-1]
    }
    for tile in TILES:
        ways[str(tile)] = partial(_whole_prompts, parts, scale, tile)
    return ways


def _whole_prompts(parts: Sequence[tuple[Tensor, ...]], scale: float, tile: int) -> Tensor:
    return [whole_prompt(q, k, v, scale, tile) for q, k, v in parts][-1]


def gates(rows: int) -> dict[str, Callable[[], Tensor]]:
    """The product of a gated MLP, and its gate."""
    x = [torch.randn(rows, HIDDEN, dtype=torch.bfloat16) for _ in range(LAYERS)]
    weights = [torch.randn(2 * GATED, HIDDEN, dtype=torch.bfloat16) / 32 for _ in x]
    pairs = list(zip(x, weights, strict=True))
    return {
        "cuBLAS": lambda: [gate_and_multiply(F.linear(*pair), "silu") for pair in pairs][-1],
        "inside": lambda: [gated_product(*pair, "silu") for pair in pairs][-1],
    }


def measure(
    found: list[dict[str, object]],
    args: argparse.Namespace,
    work: str,
    size: int,
    ways: dict[str, Callable[[], Tensor]],
) -> None:
    """Times of all ways; the first is what the others have to compute. What is known is written after each."""
    expected = next(iter(ways.values()))().clone()
    for how, way in ways.items():
        error = ((way() - expected).abs().max() / expected.abs().max()).item()
        if args.warm:
            continue
        replay = record(torch.device("cuda"), way)
        first = replay().clone()
        differ = sum(not torch.equal(replay(), first) for _ in range(REPLAYS if size == LENGTHS[1] else 1))
        us = 1e6 * seconds(torch.device("cuda"), replay, args.repeat) / LAYERS
        found.append({"work": work, "size": size, "how": how, "us": us, "error": error, "differ": differ})
        args.save.write_text(json.dumps(found))


def specialized(report: Report, tuning: Tuning) -> Tuning:
    """Run this program, and keep what is right and faster at all sizes: attention from 512 to 4,096 tokens, gates everywhere."""
    with tempfile.TemporaryDirectory() as folder:
        save = Path(folder) / "found.json"
        command = [sys.executable, "-m", __spec__.name, "--tuning", json.dumps(asdict(tuning)), "--save", str(save)]
        try:
            ended = subprocess.run(command, timeout=SECONDS, capture_output=True, text=True, check=False)
            if ended.returncode:
                report.warn(f"specialized kernels: exit {ended.returncode}: {ended.stderr[-300:]}")
        except subprocess.TimeoutExpired:
            report.warn(f"specialized kernels: not done after {SECONDS} s")
        found = json.loads(save.read_text()) if save.is_file() else []
    times: dict[tuple[str, str], dict[int, float]] = {}
    for each in found:
        case = {"work": f"specialized: {each['work']}", "size": each["size"], "how": each["how"]}
        report.add(case, {"us": each["us"], "error": each["error"], "differ": each["differ"]})
        if each["error"] > MOST_ERROR or each["differ"]:
            report.warn(f"wrong, or replays differ: {case}")
        else:
            times.setdefault((each["work"], each["how"]), {})[each["size"]] = each["us"]
    tiles = [tile for tile in TILES if _is_faster(times, "prompt", str(tile), "paged", LENGTHS[:4])]
    best = min(tiles, key=lambda tile: times["prompt", str(tile)][LENGTHS[1]], default=0)
    is_inside = _is_faster(times, "gates", "inside", "cuBLAS", ROWS)
    return replace(tuning, whole_prompt_tile=best, gated_prompts=int(is_inside))


def _is_faster(
    times: dict[tuple[str, str], dict[int, float]], work: str, new: str, old: str, sizes: Sequence[int]
) -> bool:
    fast, slow = times.get((work, new), {}), times.get((work, old), {})
    return all(size in fast and size in slow and fast[size] < (1 - GAIN) * slow[size] for size in sizes)


if __name__ == "__main__":
    main(sys.argv[1:])
