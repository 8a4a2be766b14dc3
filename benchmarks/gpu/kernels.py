"""The kernels of the CUDA path one by one, each beside the least time in which the device could move its bytes or multiply.

    python -m benchmarks.gpu.kernels --save kernels.json

Times are medians, of the device alone, and with its cache flushed before each. On a CPU it runs the CPU's kernels, so that
the program itself can be tried; the figures mean little there.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.clock import Clock, Rates, device_facts, measure_rates
from benchmarks.gpu.parts import kept_going
from benchmarks.options import positive_int
from benchmarks.random_weights import SHAPES
from benchmarks.report import Report
from nanoengine.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec, choose_backend
from nanoengine.config import ModelConfig
from nanoengine.errors import InvalidConfig
from nanoengine.kernels.interface import Kernels, choose_kernels
from nanoengine.kernels.sampling import SamplingTable
from nanoengine.layers.attention import Attention
from nanoengine.layers.factory import Factory
from nanoengine.layers.norm import RMSNorm
from nanoengine.layers.rotary import RotaryEmbedding

BACKENDS = {"cuda": ("triton", "flash_attn", "torch_varlen"), "cpu": ("torch", "native")}
PACKAGE_BLOCK = 256
"""FlashAttention-2 reads pages of so many tokens."""

SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "draw": {"temperature": 0.6},
    "top_k + top_p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
}


@dataclass
class Bench:
    """What all parts share."""

    args: argparse.Namespace
    report: Report
    device: torch.device
    dtype: torch.dtype
    model: ModelConfig
    kernels: Kernels
    clock: Clock
    rates: Rates

    def add(self, case: dict[str, Any], work: Callable[[], object], num_bytes: float, flop: float = 0.0) -> None:
        """Time one kernel, and compare it with its bytes at the device's bandwidth and its operations at its rate."""
        seconds = self.clock.seconds(work)
        figures = {
            "us": 1e6 * seconds,
            "gb_s": num_bytes / seconds / 1e9,
            "bandwidth_share": num_bytes / seconds / self.rates.bytes_s,
            "limit_share": max(num_bytes / self.rates.bytes_s, flop / self.rates.flop_s) / seconds,
        }
        if flop:
            figures["tflop_s"] = flop / seconds / 1e12
        self.report.add(case, figures)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    @property
    def qkv_width(self) -> int:
        return (self.model.num_heads + 2 * self.model.num_kv_heads) * self.model.head_dim


def main(arguments: Sequence[str]) -> int:
    args = _parser().parse_args(arguments)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    report = Report("gpu_kernels", device_facts(device))
    torch.manual_seed(0)
    clock = Clock(device, args.repeat)
    rates = measure_rates(clock, dtype)
    report.add({"kernel": "(device)"}, rates.figures)
    model = ModelConfig.from_hf(SHAPES[args.shape] | {"dtype": args.dtype})
    kernels = choose_kernels("auto" if device.type == "cuda" else "torch", device, dtype)
    bench = Bench(args, report, device, dtype, model, kernels, clock, rates)
    for part in (decode_attention, prefill_attention, rotate_and_write, rows_of_a_layer, products, placing, sampling):
        with torch.inference_mode(), kept_going(report, part.__name__):
            part(bench)
        if args.save:
            report.save(args.save)  # after each part, so that whoever stops it loses no more than one
    report.show()
    return 1 if "failed" in report.facts else 0


# ---- attention


@contextmanager
def memory_for(bench: Bench, num_tokens: int) -> Iterator[Tensor]:
    """Random K and V of so many tokens of one layer: [2, elements], in whatever order a backend wants them."""
    numbers = num_tokens * bench.model.num_kv_heads * bench.model.head_dim
    memory = torch.empty(2, numbers, dtype=bench.dtype, device=bench.device)
    for piece in memory.view(-1).split(1 << 28):
        piece.normal_()
    try:
        yield memory
    finally:
        del memory
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def backends(bench: Bench) -> Iterator[tuple[AttentionBackend, int]]:
    """The backends that run here, each with a block size that it takes; of the others the report says why they do not."""
    for name in BACKENDS[bench.device.type]:
        reasons = []
        for block_size in (bench.args.block_size, PACKAGE_BLOCK):
            try:
                yield choose_backend(name, bench.device, bench.dtype, bench.model, block_size)[0], block_size
            except InvalidConfig as error:
                reasons.append(str(error))
            else:
                break
        else:
            bench.report.warn(f"left out: {reasons[-1]}")


def caches(bench: Bench, backend: AttentionBackend, memory: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """K and V in the backend's order."""
    heads, dim = bench.model.num_kv_heads, bench.model.head_dim
    shape = backend.kv_shape(memory.shape[1] // (block_size * heads * dim), heads, dim)
    size = math.prod(shape)
    return memory[0, :size].view(shape), memory[1, :size].view(shape)


def step(
    bench: Bench, cache: tuple[Tensor, Tensor], block_size: int, query_lens: list[int], lens: list[int]
) -> AttentionMetadata:
    """A step of decodes if every sequence has one new token, otherwise of chunks; their blocks lie anywhere in the cache."""
    width = -(-max(lens) // block_size)
    num_blocks = cache[0].shape[0]
    tables = torch.randperm(num_blocks, device=bench.device)[: len(lens) * width].view(len(lens), width)
    starts = list(accumulate(query_lens, initial=0))
    return AttentionMetadata(
        kv_cache=[cache],
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64, device=bench.device),
        num_decodes=len(lens) if max(query_lens) == 1 else 0,
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=bench.device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=bench.device),
        block_tables=tables.to(torch.int32),
        query_lens_list=query_lens,
        seq_lens_list=lens,
    )


def decode_attention(bench: Bench) -> None:
    """One query for each sequence: K and V of all its tokens are read."""
    args, model = bench.args, bench.model
    spec = AttentionSpec(model.head_dim**-0.5)
    with memory_for(bench, max(args.batch) * -(-max(args.context) // PACKAGE_BLOCK) * PACKAGE_BLOCK) as memory:
        for backend, block_size in backends(bench):
            cache = caches(bench, backend, memory, block_size)
            for batch in args.batch:
                for context in args.context:
                    metadata = step(bench, cache, block_size, [1] * batch, [context] * batch)
                    q = bench.random(batch, model.num_heads, model.head_dim)
                    num_bytes = 2 * batch * (context * model.num_kv_heads + model.num_heads) * model.head_dim
                    case = {"kernel": "decode attention", "backend": backend.name, "block_size": block_size}
                    case |= {"batch": batch, "context": context}
                    work = partial(backend.attend, q, *cache, metadata, spec)
                    bench.add(case, work, num_bytes * bench.dtype.itemsize)


def prefill_attention(bench: Bench) -> None:
    """All queries of one sequence, each over the tokens up to itself."""
    args, model = bench.args, bench.model
    spec = AttentionSpec(model.head_dim**-0.5)
    with memory_for(bench, 2 * max(*args.prompt, PACKAGE_BLOCK)) as memory:
        for backend, block_size in backends(bench):
            cache = caches(bench, backend, memory, block_size)
            for length in args.prompt:
                metadata = step(bench, cache, block_size, [length], [length])
                q = bench.random(length, model.num_heads, model.head_dim)
                num_bytes = 2 * length * (model.num_kv_heads + model.num_heads) * model.head_dim * bench.dtype.itemsize
                flop = 4 * model.num_heads * model.head_dim * length * (length + 1) / 2
                case = {"kernel": "prefill attention", "backend": backend.name, "block_size": block_size}
                work = partial(backend.attend, q, *cache, metadata, spec)
                bench.add(case | {"prompt": length}, work, num_bytes, flop)


def rotate_and_write(bench: Bench) -> None:
    """The norms and rotations of q and k, and the write of k and v."""
    model = bench.model
    norms = [_norm(bench, model.head_dim) for _ in range(2)]
    rotary = RotaryEmbedding(model.head_dim, model.rope_theta, bench.device)
    rotary.prepare(model.max_position_embeddings)
    with memory_for(bench, 2 * max(*bench.args.rows, PACKAGE_BLOCK)) as memory:
        for backend, block_size in backends(bench):
            cache = caches(bench, backend, memory, block_size)
            layer = Attention(0, model.num_kv_heads, model.head_dim, AttentionSpec(1.0), backend, *norms)
            num_slots = cache[0].shape[0] * block_size
            for rows in bench.args.rows:
                qkv = bench.random(rows, bench.qkv_width)
                angles = rotary(torch.arange(rows, device=bench.device))
                slots = torch.randperm(num_slots, device=bench.device)[:rows]
                case = {"kernel": "rotate_and_write", "backend": backend.name, "rows": rows}
                num_bytes = 2 * qkv.nbytes + 2 * angles[0].nbytes + slots.nbytes
                bench.add(case, partial(layer.write, qkv, angles, *cache, slots), num_bytes)


# ---- the rest of a layer


def rows_of_a_layer(bench: Bench) -> None:
    """What is done number by number: the norms, and the gate of SwiGLU."""
    hidden, inner = bench.model.hidden_size, bench.model.intermediate_size
    weight = torch.ones(hidden, dtype=bench.dtype, device=bench.device)
    for rows in bench.args.rows:
        x, residual = bench.random(rows, hidden), bench.random(rows, hidden)
        bench.add(
            {"kernel": "add_rms_norm", "rows": rows},
            partial(bench.kernels.add_rms_norm, x, residual, weight, 1e-6),
            4 * x.nbytes + weight.nbytes,
        )
    if bench.kernels.name != "triton":
        bench.report.warn("left out: silu_and_multiply, which is part of a product in the kernels that run here")
        return
    from nanoengine.kernels.triton.activation import silu_and_multiply

    for rows in bench.args.rows:
        gate_up = bench.random(rows, 2 * inner)
        bench.add(
            {"kernel": "silu_and_multiply", "rows": rows},
            partial(silu_and_multiply, gate_up),
            1.5 * gate_up.nbytes,
        )


def products(bench: Bench) -> None:
    """The matrix products of a layer, and the logits."""
    model = bench.model
    hidden, inner = model.hidden_size, model.intermediate_size
    shapes = {
        "q, k, v": (bench.qkv_width, hidden),
        "attention's output": (hidden, model.num_heads * model.head_dim),
        "gate and up": (2 * inner, hidden),
        "down": (hidden, inner),
        "logits": (model.vocab_size, hidden),
    }
    for name, (outputs, inputs) in shapes.items():
        weight = bench.kernels.new_weight(outputs, inputs, bench.dtype, bench.device)
        weight.tensor = bench.random(outputs, inputs)  # type: ignore[attr-defined]
        for rows in bench.args.batch if name == "logits" else bench.args.rows:
            x = bench.random(rows, inputs)
            work: Callable[[], Tensor] = partial(bench.kernels.linear, x, weight, None)
            result_bytes = bench.dtype.itemsize
            if name == "logits":
                work, result_bytes = partial(bench.kernels.logits, x, weight), torch.float32.itemsize
            num_bytes = x.nbytes + inputs * outputs * bench.dtype.itemsize + rows * outputs * result_bytes
            bench.add({"kernel": f"product: {name}", "rows": rows}, work, num_bytes, 2 * rows * inputs * outputs)


# ---- around the model


def placing(bench: Bench) -> None:
    """Positions, slots and tokens of a decode step."""
    block_size = bench.args.block_size
    width = max(bench.args.context) // block_size + 1
    for batch in bench.args.batch:
        rows = torch.arange(batch, dtype=torch.int32, device=bench.device)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=bench.device)
        tables = torch.randint(1, 1000, (batch + 1, width), dtype=torch.int32, device=bench.device)
        last_tokens = torch.zeros(batch + 1, dtype=torch.int64, device=bench.device)
        unknown, computed = torch.full_like(rows, -1), torch.full_like(rows, block_size)
        work = partial(bench.kernels.place_tokens, unknown, rows, starts, computed, last_tokens, tables, block_size, 1)
        num_bytes = batch * (6 * rows.itemsize + 4 * last_tokens.itemsize)  # of a block table one number
        bench.add({"kernel": "place_tokens", "rows": batch}, work, num_bytes)


def sampling(bench: Bench) -> None:
    """One token for each row of logits; the least is to read them once."""
    for kind, params in SAMPLING.items():
        for batch in bench.args.batch:
            logits = 3 * torch.randn(batch, bench.model.vocab_size, device=bench.device)
            table = SamplingTable(
                torch.full((batch,), params["temperature"], device=bench.device),
                torch.full((batch,), int(params.get("top_k", 0)), dtype=torch.int32, device=bench.device),
                torch.full((batch,), params.get("top_p", 1.0), device=bench.device),
                torch.zeros(batch, device=bench.device),
                torch.arange(batch, dtype=torch.int64, device=bench.device),
            )
            rows = torch.arange(batch, dtype=torch.int32, device=bench.device)
            positions = torch.full((batch,), 100, dtype=torch.int64, device=bench.device)
            work = partial(bench.kernels.choose_tokens, logits, table, rows, positions)
            bench.add({"kernel": f"choose_tokens: {kind}", "rows": batch}, work, logits.nbytes)


def _norm(bench: Bench, size: int) -> RMSNorm:
    norm = RMSNorm(Factory(bench.kernels, bench.dtype, bench.device), size, 1e-6)
    norm.weight.fill_(1.0)
    return norm


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gpu_kernels", description=__doc__.split("\n")[0] if __doc__ else None)
    several: dict[str, Any] = {"type": positive_int, "nargs": "+"}
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES, help="of the model (default: %(default)s)")
    parser.add_argument("--batch", **several, default=[1, 64, 256], help="sequences of a decode step")
    parser.add_argument("--context", **several, default=[1024, 2048, 8192, 32768], help="tokens of each of them")
    parser.add_argument("--prompt", **several, default=[1024, 4096, 16384], help="tokens of a prefill")
    parser.add_argument("--rows", **several, default=[1, 256, 8192], help="tokens of a step, for the small kernels")
    parser.add_argument("--block-size", type=positive_int, default=16, help="of the KV cache (default: 16)")
    parser.add_argument("--repeat", type=positive_int, default=30, help="times of each (default: 30)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON here")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
