"""Decodes of streams that share the beginning of their text: native attention that reads it once, against once for each stream.

Attention alone, of one step. Both ways are timed in turn on the same K/V, layer after layer as a model does, so that what one
layer has left in the caches of the CPU is of no use to the next.
"""

from __future__ import annotations

import argparse
from itertools import product
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from nanoengine.attention.native import NativeAttention
from nanoengine.core.attention import AttentionSpec, Runs

BLOCK_SIZE = 32


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = {"Qwen3-0.6B": Shape(16, 8, 128), "Gemma 3 270M": Shape(4, 1, 256)}
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


class Step:
    """One step of decodes, over layers of random K/V."""

    def __init__(self, shape: Shape, dtype: torch.dtype, streams: int, shared: int, own: int, layers: int):
        self.backend = NativeAttention(BLOCK_SIZE)
        self.spec = AttentionSpec(shape.head_dim**-0.5)
        num_shared, num_own = shared // BLOCK_SIZE, -(-own // BLOCK_SIZE)
        blocks = torch.randperm(num_shared + streams * num_own, dtype=torch.int32)
        tables = torch.cat((blocks[:num_shared].expand(streams, -1), blocks[num_shared:].view(streams, -1)), 1)
        kv_shape = self.backend.kv_shape(len(blocks), shape.num_kv_heads, shape.head_dim)
        self.layers = [torch.randn(2, *kv_shape).to(dtype) for _ in range(layers)]
        self.q = torch.randn(streams, shape.num_heads, shape.head_dim).to(dtype)
        lens = [num_shared * BLOCK_SIZE + own] * streams
        starts = torch.arange(streams + 1, dtype=torch.int32)
        self.runs = Runs(starts, torch.tensor(lens, dtype=torch.int32), tables.contiguous(), [1] * streams, lens)
        self.shared = num_shared * BLOCK_SIZE

    def seconds(self, num_shared: int) -> float:
        """Of all layers."""
        self.runs.num_shared = num_shared
        start = perf_counter()
        for k_cache, v_cache in self.layers:
            self.backend.decode(self.q, (k_cache, v_cache), self.runs, self.spec)
        return perf_counter() - start

    def both(self, repeat: int) -> tuple[float, float]:
        """Milliseconds of a layer: plain, and with what is shared read once."""
        timed = [(self.seconds(0), self.seconds(self.shared)) for _ in range(repeat + 1)][1:]
        plain, cascade = (1000 * median(column) / len(self.layers) for column in zip(*timed, strict=True))
        return plain, cascade


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--streams", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--shared", type=int, nargs="+", default=[512, 2048], help="tokens that all streams share")
    parser.add_argument("--own", type=int, nargs="+", default=[128], help="tokens of each stream behind those")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, milliseconds of a layer\n")
    print("| shape | dtype | streams | shared | own | plain | cascade | ratio |\n|---|---|--:|--:|--:|--:|--:|--:|")
    for name, dtype, streams, shared, own in product(args.shape, args.dtype, args.streams, args.shared, args.own):
        plain, cascade = Step(SHAPES[name], DTYPES[dtype], streams, shared, own, args.layers).both(args.repeat)
        print(
            f"| {name} | {dtype} | {streams} | {shared} | {own} | {plain:.3f} | {cascade:.3f} | {cascade / plain:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
