"""Launch every kernel of a model's steps once, in many processes, so that Triton's cache holds them when an engine starts.

    python -m benchmarks.gpu.warm --processes 14

Each is launched through the function that engines call: it is compiled for just the arguments that it will meet. With
`--device cpu` and TRITON_INTERPRET=1 nothing is compiled, but all of it is run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from benchmarks.options import positive_int
from benchmarks.random_weights import SHAPES
from nanoengine.attention.triton import TritonAttention
from nanoengine.core.attention import AttentionMetadata, AttentionSpec
from nanoengine.core.sampling import SamplingTable
from nanoengine.kernels.triton_kernels import TritonKernels
from nanoengine.models.architectures import read_model_config
from nanoengine.models.model_config import ModelConfig

BLOCK_SIZE = 16
FEW, MANY = 1, 9
"""Rows of products that are ours and of those that are not."""


class Works:
    """Small pieces of a step on a model's shape; each of `NAMES` is a method without arguments."""

    NAMES = (
        *("few_rows_qkv", "few_rows_out", "few_rows_gate", "few_rows_down", "few_rows_logits"),
        *("norms", "gate", "rotation", "places", "decode", "prefill", "sampling"),
    )

    def __init__(self, model: ModelConfig, device: torch.device, dtype: torch.dtype):
        self.model, self.device, self.dtype = model, device, dtype
        self.kernels, self.backend = TritonKernels(), TritonAttention(BLOCK_SIZE)
        self.qkv_width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        self.norm = torch.randn(model.hidden_size, device=device)  # weights of norms are float32

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def ints(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def few_rows_qkv(self) -> None:
        weight = self.kernels.new_weight(self.qkv_width, self.model.hidden_size, self.dtype, self.device)
        for residual in (None, self.random(FEW, self.model.hidden_size)):
            x = self.random(FEW, self.model.hidden_size)
            self.kernels.norm_linear(x, residual, self.norm, 1e-6, weight, None)

    def few_rows_gate(self) -> None:
        hidden = self.model.hidden_size
        weight = self.kernels.new_weight(2 * self.model.intermediate_size, hidden, self.dtype, self.device)
        x, residual = self.random(FEW, hidden), self.random(FEW, hidden)
        self.kernels.norm_gated_linear(x, residual, self.norm, 1e-6, weight)

    def few_rows_out(self) -> None:
        self._linear(self.model.num_heads * self.model.head_dim)

    def few_rows_down(self) -> None:
        self._linear(self.model.intermediate_size)

    def _linear(self, inputs: int) -> None:
        weight = self.kernels.new_weight(self.model.hidden_size, inputs, self.dtype, self.device)
        self.kernels.linear(self.random(FEW, inputs), weight, None)

    def few_rows_logits(self) -> None:
        model = self.model
        weight = self.kernels.new_weight(model.vocab_size, model.hidden_size, self.dtype, self.device)
        self.kernels.logits(self.random(FEW, model.hidden_size), weight)

    def norms(self) -> None:
        x, residual = self.random(MANY, self.model.hidden_size), self.random(MANY, self.model.hidden_size)
        self.kernels.rms_norm(x, self.norm, 1e-6)
        self.kernels.add_rms_norm(x, residual, self.norm, 1e-6)

    def gate(self) -> None:
        weight = self.kernels.new_weight(2 * self.model.intermediate_size, 16, self.dtype, self.device)
        self.kernels.gated_linear(self.random(MANY, 16), weight)

    def rotation(self) -> None:
        model = self.model
        angles = torch.rand(MANY, 2, model.head_dim // 2, device=self.device)
        cos, sin = angles.split(1, dim=1)
        q_norm, k_norm = torch.randn(2, model.head_dim, device=self.device)
        slots = torch.arange(MANY, device=self.device)
        qkv = self.random(MANY, self.qkv_width)
        self.backend.rotate_and_write(qkv, (q_norm, k_norm, 1e-6, cos, sin), self._caches(), slots)

    def places(self) -> None:
        last_tokens = torch.zeros(MANY, dtype=torch.int64, device=self.device)
        tables = torch.zeros(1, MANY, 8, dtype=torch.int32, device=self.device)
        arguments = self.ints(-1), self.ints(0), self.ints(0, 1), self.ints(3)
        self.kernels.compute_slot_mapping(*arguments, last_tokens, tables, BLOCK_SIZE, 1)

    def decode(self) -> None:
        self._attend(1, [2 * BLOCK_SIZE])

    def prefill(self) -> None:
        self._attend(0, [BLOCK_SIZE])

    def _attend(self, num_decodes: int, lens: list[int]) -> None:
        num_new = 1 if num_decodes else lens[0]
        metadata = AttentionMetadata(
            kv_cache=[self._caches()],
            slot_mapping=torch.zeros(num_new, dtype=torch.int64, device=self.device),
            num_decodes=num_decodes,
            query_start_loc=self.ints(0, num_new),
            seq_lens=self.ints(*lens),
            block_tables=self.ints(1, 2).view(1, 2),
            query_lens_list=[num_new],
            seq_lens_list=lens,
        )
        q = self.random(num_new, self.model.num_heads, self.model.head_dim)
        self.backend.attend(q, metadata.kv_cache[0], metadata, AttentionSpec(self.model.head_dim**-0.5))

    def _caches(self) -> tuple[Tensor, Tensor]:
        shape = self.backend.kv_shape(4, self.model.num_kv_heads, self.model.head_dim)
        return self.random(*shape), self.random(*shape)

    def sampling(self) -> None:
        """All kernels are launched for every row; what they do follows from the table."""
        logits = torch.randn(1, self.model.vocab_size, device=self.device)
        ones = torch.ones(2, device=self.device)
        seeds = torch.zeros(2, dtype=torch.int64, device=self.device)
        table = SamplingTable(ones, self.ints(20, 0), ones, 0 * ones, seeds)
        self.kernels.choose_tokens(logits, table, self.ints(0), self.ints(5), torch.zeros_like(seeds))


@torch.inference_mode()
def run(name: str, shape: str, device: str, dtype: str) -> str:
    """Do one of the works; returns what went wrong, or nothing."""
    try:
        model = read_model_config(SHAPES[shape] | {"dtype": dtype})
        work: Callable[[], None] = getattr(Works(model, torch.device(device), getattr(torch, dtype)), name)
        work()
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception:  # whatever a compiler raises; the others are still worth compiling
        return f"{name}: {traceback.format_exc(limit=-3)}"
    return ""


def main(arguments: Sequence[str]) -> int:
    args = _parser().parse_args(arguments)
    start = perf_counter()
    job = partial(run, shape=args.shape, device=args.device, dtype=args.dtype)
    if args.processes == 1:
        errors = [job(name) for name in Works.NAMES]
    else:
        spawn = multiprocessing.get_context("spawn")  # a forked process has no GPU
        with ProcessPoolExecutor(args.processes, mp_context=spawn) as pool:
            futures = [pool.submit(job, name) for name in Works.NAMES]
            errors = [done.result() for done in as_completed(futures)]
    errors = [error for error in errors if error]
    for error in errors:
        print(f"ERROR {error}")
    print(f"{len(Works.NAMES) - len(errors)} of {len(Works.NAMES)} pieces run: {perf_counter() - start:.1f} s")
    return int(bool(errors))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gpu_warm", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--processes", type=positive_int, default=1, help="that compile side by side (default: 1)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES, help="of the model (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
