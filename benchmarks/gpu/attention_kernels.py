"""Attention and the write of K/V, each alone: on sequences of one length, and on those of real steps of the workload."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.kernel_bench import Bench, caches, lens_of_workload, memory_for, step, tokens_in_blocks
from nanoengine.attention.backend import AttentionBackend
from nanoengine.core.attention import AttentionSpec
from nanoengine.core.layers import Factory, RMSNorm
from nanoengine.errors import InvalidConfig
from nanoengine.kernels.capability import choose_backend
from nanoengine.layers.attention import Attention
from nanoengine.layers.rotary import RotaryEmbedding

WINDOW = 128
"""Tokens that a layer of gpt-oss sees."""

BACKENDS = {"cuda": ("triton",), "cpu": ("torch", "native")}


def backends(bench: Bench, *specs: AttentionSpec) -> Iterator[AttentionBackend]:
    """The backends that run here, and heed all that is asked for; of the others the report says why they do not."""
    for name in BACKENDS[bench.device.type]:
        try:
            yield choose_backend(name, bench.device, bench.dtype, bench.model, bench.args.block_size, specs)[0]
        except InvalidConfig as error:
            bench.report.warn(f"left out: {error}")


def decode_attention(bench: Bench) -> None:
    """One query for each sequence: K and V of all its tokens are read."""
    for batch in bench.args.batch:
        for context in bench.args.context:
            _decode(bench, {"kernel": "decode attention", "batch": batch, "context": context}, [context] * batch)


def ragged_decode_attention(bench: Bench) -> None:
    """The same for sequences as a step of the workload has them, which all run at once."""
    for batch in bench.args.ragged:
        lens = lens_of_workload(batch, bench.args.scale)
        _decode(bench, {"kernel": "ragged decode attention", "batch": batch, "tokens": sum(lens)}, lens)


def windowed_decode_attention(bench: Bench) -> None:
    """The same where only the last tokens are seen: what came before costs nothing."""
    for batch in bench.args.batch:
        for context in bench.args.context:
            case = {"kernel": "windowed decode attention", "batch": batch, "context": context}
            _decode(bench, case, [context] * batch, WINDOW)


def _decode(bench: Bench, case: dict[str, Any], lens: list[int], window: int | None = None) -> None:
    spec = AttentionSpec(bench.model.head_dim**-0.5, window)
    with memory_for(bench, tokens_in_blocks(bench, lens)) as memory:
        for backend in backends(bench, spec):
            cache = caches(bench, backend, memory)
            metadata = step(bench, cache, [1] * len(lens), lens)
            q = bench.random(len(lens), bench.model.num_heads, bench.model.head_dim)
            work = partial(backend.attend, q, cache, metadata, spec)
            bench.add(case | {"backend": backend.name}, work, bench.decode_bytes([min(n, window or n) for n in lens]))


def prefill_attention(bench: Bench) -> None:
    """All queries of one sequence, each over the tokens up to itself."""
    model = bench.model
    spec = AttentionSpec(model.head_dim**-0.5)
    for length in bench.args.prompt:
        with memory_for(bench, tokens_in_blocks(bench, [length])) as memory:
            for backend in backends(bench):
                cache = caches(bench, backend, memory)
                metadata = step(bench, cache, [length], [length])
                q = bench.random(length, model.num_heads, model.head_dim)
                num_bytes = 2 * length * (model.num_kv_heads + model.num_heads) * model.head_dim * bench.dtype.itemsize
                flop = 4 * model.num_heads * model.head_dim * length * (length + 1) / 2
                case = {"kernel": "prefill attention", "backend": backend.name, "prompt": length}
                bench.add(case, partial(backend.attend, q, cache, metadata, spec), num_bytes, flop)


def rotate_and_write(bench: Bench) -> None:
    """The norms and rotations of q and k, and the write of k and v."""
    model = bench.model
    norms = [_norm(bench, model.head_dim) for _ in range(2)]
    rope = model.layer(0).rope
    assert rope is not None
    rotary = RotaryEmbedding(model.head_dim, rope, bench.device)
    rotary.prepare(max(bench.args.rows))
    with memory_for(bench, tokens_in_blocks(bench, [2 * max(bench.args.rows)])) as memory:
        for backend in backends(bench):
            cache = caches(bench, backend, memory)
            layer = Attention(0, model, AttentionSpec(1.0), backend, *norms)
            num_slots = cache[0].shape[0] * bench.args.block_size
            for rows in bench.args.rows:
                qkv = bench.random(rows, bench.qkv_width)
                angles = rotary(torch.arange(rows, device=bench.device))
                slots = torch.randperm(num_slots, device=bench.device)[:rows]
                case = {"kernel": "rotate_and_write", "backend": backend.name, "rows": rows}
                num_bytes = 2 * qkv.nbytes + 2 * angles[0].nbytes + slots.nbytes
                bench.add_small(case, [partial(layer.write, qkv, angles, cache, slots)], num_bytes)


def _norm(bench: Bench, size: int) -> RMSNorm:
    norm = RMSNorm(Factory(bench.kernels, bench.dtype, bench.device), size, 1e-6)
    norm.weight.fill_(1.0)
    return norm
