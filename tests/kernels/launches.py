"""The launches of Triton kernels that are compiled ahead of time: operations called as models call them, with tensors that have a
shape and no numbers.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nanoengine.core.attention import AttentionSpec, Runs
from nanoengine.core.sampling import SamplingTable
from nanoengine.kernels.operations import Norm
from nanoengine.kernels.recurrences import Decay, StateRuns, Stores
from nanoengine.kernels.reference.gates import ACTIVATIONS
from nanoengine.kernels.reference.kv_int8 import SCALE_BYTES
from nanoengine.kernels.triton.attention.kv_int8 import views
from nanoengine.kernels.triton.attention.paged_cache import PagedCache
from nanoengine.kernels.triton.attention.paged_decode import paged_decode
from nanoengine.kernels.triton.attention.paged_prefill import paged_prefill
from nanoengine.kernels.triton.attention.rotate_and_write import rotate_and_write, write_kv
from nanoengine.kernels.triton.attention.whole_prompt import whole_prompt
from nanoengine.kernels.triton.compute_slot_mapping import compute_slot_mapping
from nanoengine.kernels.triton.draws.sampling import choose_tokens
from nanoengine.kernels.triton.products.activation import gate_and_multiply, sigmoid_gate
from nanoengine.kernels.triton.products.experts import sum_of_experts
from nanoengine.kernels.triton.products.few_rows import MANY_OUTPUTS, ROWS, most_rows, product_of_few_rows
from nanoengine.kernels.triton.products.float8 import quantize_rows, scale_sums
from nanoengine.kernels.triton.products.fusion import Fusion
from nanoengine.kernels.triton.products.gated_product import gated_product
from nanoengine.kernels.triton.products.gemv import MOST_ROWS, gemv
from nanoengine.kernels.triton.products.heads import heads_of_product
from nanoengine.kernels.triton.products.mlp import AHEAD, HELD, fitting_sizes, mlp_of_one_row
from nanoengine.kernels.triton.products.norm import add_rms_norm, gated_norm, rms_norm
from nanoengine.kernels.triton.products.packed import PackedWeight
from nanoengine.kernels.triton.products.packed_gemv import packed_gemv
from nanoengine.kernels.triton.products.swap_ab import swap_ab
from nanoengine.kernels.triton.recurrence import delta_rule, mamba2
from nanoengine.kernels.triton.short_conv import short_conv
from nanoengine.kernels.triton.tuning import DEFAULTS, Tuning
from nanoengine.kernels.triton.workspace import Workspace

HALF, FULL = (torch.bfloat16, torch.float16), torch.float32
DTYPES = (*HALF, FULL)
FORMATS = {
    "int8": (8, None, FULL, False),
    "int4": (4, 32, torch.float16, True),
    "int4-128": (4, 128, torch.float16, True),
}
"""Bits, group, type of the scales, and whether there are zeros, of what `models/quantization/at_load.py` makes."""


def some(*shape: int, dtype: torch.dtype = FULL) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def whole(*shape: int) -> Tensor:
    return some(*shape, dtype=torch.int32)


def launch_all() -> None:
    for dtype in DTYPES:
        launch_norms_and_gates(dtype)
        launch_products(dtype)
        launch_packed_gemv(dtype)
        launch_experts(dtype)
        launch_attention(dtype)
        launch_states(dtype)
        for head_dim, block_size in ((16, 16), (64, 16), (128, 64), (96, 16), (256, 256)):
            launch_writes(dtype, head_dim, block_size)
    launch_writes(torch.bfloat16, 128, 64, launch=1)
    launch_steps()


def launch_norms_and_gates(dtype: torch.dtype) -> None:
    for size in (48, 1024, 5120, 12288):
        x, weight = some(9, size, dtype=dtype), some(size)
        rms_norm(x, weight, 1e-6)
        add_rms_norm(x, x, weight, 1e-6, launch=int(size == 1024))
        quantize_rows(x)
        scale_sums(some(9, size), some(9, 1), some(size, 1), None, dtype)
    for activation in ACTIVATIONS:
        gate_and_multiply(some(9, 2 * 3072, dtype=dtype), activation, launch=int(activation == "silu"))


def packed(outputs: int, inputs: int, format: str) -> PackedWeight:
    bits, group, scale, has_zeros = FORMATS[format]
    groups = 1 if group is None else inputs // group
    zeros = some(outputs, groups, dtype=torch.uint8) if has_zeros else None
    return PackedWeight(
        some(outputs, inputs * bits // 8, dtype=torch.uint8), some(outputs, groups, dtype=scale), zeros, bits
    )


def launch_products(dtype: torch.dtype) -> None:
    """Those of a model of 1,024 dimensions, and some of one whose sizes are no powers of two, of numbers and packed."""
    cases: list[tuple[int, int, set[str], dict[str, Any]]] = [
        (1024, 4096, {"residual", "norm"}, {}),
        (1024, 4096, {"norm", "bias"}, {}),
        (2048, 1024, set(), {}),
        (1024, 6144, {"residual", "norm"}, {"activation": "silu"}),
        (640, 4096, {"norm"}, {"activation": "gelu_tanh"}),
        (1024, 6144, set(), {"activation": "silu"}),
        (1024, 151936, set(), {"dtype": FULL}),
        (1000, 2500, {"residual", "norm", "bias"}, {}),
    ]
    for (inputs, outputs, asked, options), format, rows in product(cases, (None, *FORMATS), (ROWS, most_rows(dtype))):
        if (rows > ROWS and (format is None or "norm" in asked)) or (format and inputs == 1000):
            continue
        x = some(rows, inputs, dtype=dtype)
        offered = {"residual": x, "norm": Norm(some(inputs), 1e-6), "bias": some(outputs, dtype=dtype)}
        weight = packed(outputs, inputs, format) if format else some(outputs, inputs, dtype=dtype)
        fusion = Fusion(**{name: offered[name] for name in asked}, **options)  # type: ignore[arg-type]
        product_of_few_rows(x, weight, fusion)
        if dtype is torch.bfloat16 and asked == {"residual", "norm"} and not format:
            product_of_few_rows(x, weight, fusion._replace(launch=2))
        if not format and outputs < MANY_OUTPUTS:
            for count, launch in ((1, 2), (MOST_ROWS, 0)):
                few = some(count, inputs, dtype=dtype)
                residual = None if fusion.residual is None else few
                gemv(few, weight, fusion._replace(residual=residual, launch=launch))
            if dtype is not FULL and "norm" not in asked:
                for count, launch in ((5, 2), (64, 1)):
                    swap_ab(some(count, inputs, dtype=dtype), weight, Fusion(**options, launch=launch), Workspace())
    gemv(some(1, 9728, dtype=dtype), some(2560, 9728, dtype=dtype), Fusion(launch=1))
    one, ahead = some(1, 1024, dtype=dtype), (some(1024, 2048, dtype=dtype), some(6144, 1024, dtype=dtype))
    for launch, how in product((0, 2), (HELD, AHEAD)):
        fusion = Fusion(norm=Norm(some(1024), 1e-6), residual=one, launch=launch)
        gemv(one, some(4096, 1024, dtype=dtype), fusion, ahead[:how])
        if (sizes := fitting_sizes(1024, 3072, dtype.itemsize, one.device, how)) is not None:
            both, down = some(6144, 1024, dtype=dtype), some(1024, 3072, dtype=dtype)
            mlp_of_one_row(one, both, down, fusion._replace(activation="silu"), Workspace(), sizes, how)
        for rows, dim in ((1, 128), (MOST_ROWS, 64)):
            x, angles = some(rows, 1024, dtype=dtype), some(rows, 1, dim // 2)
            changes, slots = (some(dim), some(dim), 1e-6, angles, angles), some(rows, dtype=torch.int64)
            weight, cache = some(32 * dim, 1024, dtype=dtype), cache_of(dtype, 8, dim, 16, int8=False)
            args = Workspace(), changes, cache, slots, ahead[:how]
            heads_of_product(x, weight, fusion._replace(residual=x), *args)
    if dtype is not FULL:
        biased = Fusion(bias=some(2500, dtype=dtype))
        swap_ab(some(32, 1000, dtype=dtype), some(2500, 1000, dtype=dtype), biased, Workspace())
    for format in FORMATS:
        packed(4096, 1024, format).dequantize(dtype)
        packed(4096, 896, format).dequantize(dtype, some(9, dtype=torch.int64))


def launch_packed_gemv(dtype: torch.dtype) -> None:
    """Products of a model of 2,560 dimensions, and of one of 896: their chunks differ in size."""
    shapes = (2560, 6144, False), (2560, 19456, True), (9728, 2560, False), (896, 1152, False)
    formats = FORMATS if dtype is torch.bfloat16 else ("int8",)
    for (inputs, outputs, gates), format, rows in product(shapes, formats, (1, MOST_ROWS)):
        x, weight = some(rows, inputs, dtype=dtype), packed(outputs, inputs, format)
        fusion = Fusion(activation="silu" if gates else None, launch=int(rows == 1))
        if outputs > inputs:
            fusion = fusion._replace(norm=Norm(some(inputs), 1e-6), residual=x)
        packed_gemv(x, weight, fusion)


def launch_experts(dtype: torch.dtype) -> None:
    """A model of 128 small experts, one of 8 large ones, and one with biases whose sizes are no powers of two."""
    models = (
        (128, 8, 2048, 768, "silu", False),
        (8, 2, 4096, 14336, "silu", False),
        (60, 4, 1000, 700, "clamped", True),
    )
    for (count, per_row, hidden, size, activation, has_biases), rows_per_expert in product(models, (1, 64)):
        rows = rows_per_expert * count // per_row
        of_gate, of_down = some(count, size, hidden, dtype=dtype), some(count, hidden, size, dtype=dtype)
        biases = (some(count, size), some(count, size), some(count, hidden)) if has_biases else None
        chosen, factors = some(rows, per_row, dtype=torch.int64), some(rows, per_row)
        sum_of_experts(some(rows, hidden, dtype=dtype), of_gate, of_gate, of_down, chosen, factors, activation, biases)


def cache_of(dtype: torch.dtype, heads: int, head_dim: int, block_size: int, *, int8: bool) -> PagedCache:
    """K and V of a layer that shares blocks with others."""
    if not int8:
        memory = some(9, 2, 2, heads, block_size, head_dim, dtype=dtype)
        return PagedCache(*(memory[:, 1, i].transpose(1, 2) for i in range(2)))
    memory = some(9, 2, 2, heads, block_size * (head_dim + SCALE_BYTES), dtype=torch.int8)
    (k, k_scales), (v, v_scales) = (views(memory[:, 1, i], block_size) for i in range(2))
    return PagedCache(k, v, k_scales, v_scales)


def launch_writes(dtype: torch.dtype, head_dim: int, block_size: int, *, launch: int = 0) -> None:
    tokens, heads = 5, 4
    qkv, slots = some(tokens, 3 * heads * head_dim, dtype=dtype), some(tokens, dtype=torch.int64)
    norms, angles = [some(head_dim)] * 2, [some(tokens, 1, head_dim // 2)] * 2
    parts = product((False, True), repeat=2) if head_dim == 128 and not launch else [(True, True)]
    for (norm, rotate), int8 in product(parts, (False, True)):
        around = (*(norms if norm else (None, None)), 1e-6, *(angles if rotate else (None, None)))
        rotate_and_write(qkv, around, cache_of(dtype, heads, head_dim, block_size, int8=int8), slots, launch)
    k = qkv[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    write_kv(k, k, cache_of(dtype, heads, head_dim, block_size, int8=True), slots)


def attend(
    dtype: torch.dtype,
    head_dim: int,
    group: int = 2,
    queries: int | None = 1,
    tuning: Tuning = DEFAULTS,
    *,
    int8: bool = False,
    **asked: Any,
) -> None:
    """A decode of so many queries of each sequence, or a chunk of prompts, in a layer of such a spec."""
    seqs, kv_heads, spec = 3, 4, AttentionSpec(0.1, **asked)
    heads, longest = kv_heads * group, queries or 100
    q, cache = some(seqs * longest, heads, head_dim, dtype=dtype), cache_of(dtype, kv_heads, head_dim, 16, int8=int8)
    runs = Runs(whole(seqs + 1), whole(seqs), whole(seqs, 256), [longest] * seqs, [longest] * seqs)
    args = q, cache, runs, spec, some(heads) if spec.sinks else None, tuning
    if queries is None:
        paged_prefill(*args)
    else:
        for _ in range(2):  # the second layer finds the plan of the first
            paged_decode(*args, Workspace())


def launch_attention(dtype: torch.dtype) -> None:
    """Heads of the usual sizes, and what Gemma 2, gpt-oss and Llama 4 ask for; several tokens of each sequence fill 16 rows, 32
    or more. For bfloat16 also groups of other sizes, other tiles, and launches that depend on the one before.
    """
    for head_dim, queries, int8 in product((64, 128, 256), (None, 1, 4, 16), (False, True)):
        attend(dtype, head_dim, 2, queries, int8=int8)
    attend(dtype, 96, 1, None)
    attend(dtype, 96, 1, 1)
    for queries in (None, 1, 16):
        attend(dtype, 256, 2, queries, window=4096, soft_cap=50.0)
        attend(dtype, 128, 5, queries, window=8192, chunked=True)
        for int8 in (False, True):
            attend(dtype, 64, 8, queries, window=128, sinks=True, int8=int8)
    if dtype is not torch.bfloat16:
        return
    for group, queries in ((1, 1), (4, 1), (8, 1), (16, 1), (1, 8), (2, 17), (8, 8)):
        attend(dtype, 128, group, queries)
    for (tile, warps, stages), queries, int8 in product(((32, 4, 7), (16, 2, 7)), (1, 8), (False, True)):
        tuning = replace(DEFAULTS, decode_tile=tile, decode_warps=warps, decode_stages=stages)
        attend(dtype, 128, 4, queries, tuning, int8=int8)
    early = replace(DEFAULTS, dependent_launch=2)
    for head_dim, group in ((64, 7), (96, 1), (128, 4)):
        attend(dtype, head_dim, group, tuning=early)
    attend(dtype, 128, queries=8, tuning=early)
    attend(dtype, 128, queries=None, tuning=replace(DEFAULTS, short_prompt=0))
    for head_dim, tile in product((64, 128), (64, 128)):
        qkv = some(300, 32, head_dim, dtype=dtype)
        q, k, v = qkv.split((16, 8, 8), dim=1)
        whole_prompt(q, k, v, 0.1, tile)
    for rows in (200, 1000, 3000):
        gated_product(some(rows, 1024, dtype=dtype), some(2 * 3072, 1024, dtype=dtype), "silu")
    for head_dim, int8 in product((64, 128), (False, True)):
        attend(dtype, head_dim, 8, soft_cap=50.0, int8=int8)
    for tile, count, launch in ((32, 4, 2), (64, 3, 0)):
        tuning = replace(DEFAULTS, int8_pair_tile=tile, int8_programs_per_sm=count, dependent_launch=launch)
        for head_dim in (96, 128, 256):
            attend(dtype, head_dim, 2, tuning=tuning, int8=True)
        attend(dtype, 64, 8, tuning=tuning, int8=True, window=128, sinks=True)
        attend(dtype, 128, 4, tuning=tuning, int8=True, soft_cap=50.0)


def launch_states(dtype: torch.dtype) -> None:
    """Decodes and chunks of LFM2, Qwen3-Next, Qwen3.5 and Granite 4 in their sizes, and heads as large as they may be."""
    runs = StateRuns(whole(3), whole(4))
    stored = runs._replace(stores=Stores(whole(4), whole(5), whole(5)))
    for columns in (1, 2048):
        sigmoid_gate(some(9, 2048, dtype=dtype), some(9, 2 * columns, dtype=dtype)[:, columns:])
    for tokens, own in ((3, runs), (100, stored)):
        for channels, taps, gated in ((2048, 3, True), (8192, 4, False), (3328, 4, False)):
            projected, weight, state = (
                some(tokens, 3 * channels, dtype=dtype),
                some(taps, channels),
                (9, taps - 1, channels),
            )
            x, before, after = projected.chunk(3, dim=1)
            around = {"before": before, "after": after} if gated else {"silu": True}
            short_conv(x, weight, None if gated else some(channels), some(*state), own, **around)
        for heads, sharing, depth, width in ((32, 2, 128, 128), (2, 1, 256, 256), (3, 1, 6, 10)):
            decay, groups = Decay(some(heads), some(heads)), heads // sharing
            size, states = 2 * groups * depth + heads * width, some(9, heads, depth, width)
            x, *ab = some(tokens, size + 2 * heads, dtype=dtype).split((size, heads, heads), dim=1)
            delta_rule(x, *ab, decay, groups, states, own)
            mamba2(x, ab[0], decay, some(heads), groups, states, own)
            x, gate = some(tokens, heads * width), some(tokens, 2 * heads * width, dtype=dtype)[:, heads * width :]
            gated_norm(x, gate, some(width), 1e-6, width, gate_first=False)
            gated_norm(x, gate, some(heads * width), 1e-6, sharing * width, gate_first=True)


def launch_steps() -> None:
    """Where tokens stand, and which are chosen."""
    for groups, block_size in ((1, 16), (1, 256), (6, 16)):
        tokens = whole(9), whole(3), whole(4), whole(3), some(9, dtype=torch.int64)
        compute_slot_mapping(*tokens, whole(groups, 9, 64), block_size, 500)
    for vocab_size in (151_936, 32_001):
        table = SamplingTable(some(9), whole(9), some(9), some(9), some(9, dtype=torch.int64))
        rows = some(3, vocab_size), table, whole(3), whole(3)
        for last_tokens in (None, some(9, dtype=torch.int64)):
            choose_tokens(*rows, last_tokens)
        choose_tokens(rows[0], replace(table, filtering=set()), *rows[2:], last_tokens)
        choose_tokens(rows[0], replace(table, filtering=set()), *rows[2:], last_tokens, launch=1)
        choose_tokens(*rows, last_tokens, launch=1)
