"""The native kernels as functions of tensors, and as torch operations, `torch.ops.nanoengine.*`, which profilers see."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, infer_schema

from nanoengine.kernels.addresses import DTYPES, address, address_of_floats
from nanoengine.kernels.c_functions import c_functions
from nanoengine.kernels.compiler import CannotCompile
from nanoengine.kernels.libraries import must_compile
from nanoengine.kernels.quantized_operations import quantized_operations
from nanoengine.progress import stage

CACHE_DTYPES = {**DTYPES, torch.int8: 2}
"""Those of K/V caches, as kv_int8.h numbers them."""

QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""Formats of quantized blocks, as dequantize.cpp numbers them."""


def unsupported_reason(device: torch.device, dtype: torch.dtype, *, use_tqdm: bool = False) -> str | None:
    """The reason that native kernels cannot run here; None if they can. Compiles them at the first call, and may show it."""
    if device.type != "cpu":
        return f"they are for the CPU, not for {device.type}"
    if dtype not in DTYPES:
        return f"they compute in float32 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    try:
        with stage("Compiling kernels, once for this CPU", shown=use_tqdm and must_compile()):
            operations()
    except CannotCompile as error:
        return str(error)
    return None


@cache
def operations() -> Library:
    """Define the operations and register their implementations for the CPU.

    Raises:
        CannotCompile: there is no compiler, or it failed.
    """
    implementations = _implementations()
    library = Library("nanoengine", "DEF")
    for function, overwritten in implementations.items():
        schema = infer_schema(function, mutates_args=overwritten).replace("SymInt", "int")  # no shape is symbolic here
        library.define(function.__name__ + schema)
        library.impl(function.__name__, function, "CPU")
    return library


def operation(name: str) -> Callable[..., Any]:
    """The operation of that name, for positional arguments. Only while torch's profiler looks does it go by way of torch, which
    takes as long as the smallest of them.

    Raises:
        CannotCompile: there is no compiler, or it failed.
    """
    operations()
    registered = getattr(torch.ops.nanoengine, name).default
    (function,) = (function for function in _implementations() if function.__name__ == name)
    is_profiled = torch.autograd._profiler_enabled

    def call(*arguments: Any) -> Any:
        return registered(*arguments) if is_profiled() else function(*arguments)

    return call


@cache
def _implementations() -> dict[Callable[..., Tensor | None], tuple[str, ...]]:
    return _operations(c_functions()) | quantized_operations(c_functions())


def _operations(c: SimpleNamespace) -> dict[Callable[..., Tensor | None], tuple[str, ...]]:
    """Every operation, and which of its arguments it overwrites.

    Type hints are the schema, and a function's name is that of the operation. Results are new tensors; C sees addresses and
    sizes alone.

    Args:
        c: those of `c_functions`.
    """

    def linear(
        x: Tensor,
        residual: Tensor | None,
        norm: Tensor | None,
        eps: float,
        packed: Tensor,
        bias: Tensor | None,
        outputs: int,
        to_float: bool,
    ) -> Tensor:
        x = x.contiguous()
        rows, inputs = x.shape
        out = torch.empty(rows, outputs, dtype=torch.float32 if to_float else x.dtype)
        inputs_at = x.data_ptr(), address(residual), address_of_floats(norm), eps
        outputs_at = packed.data_ptr(), address(bias), out.data_ptr()
        c.linear(DTYPES[x.dtype], DTYPES[out.dtype], *inputs_at, *outputs_at, rows, outputs, inputs)
        return out

    def gated_linear(
        x: Tensor,
        residual: Tensor | None,
        norm: Tensor | None,
        eps: float,
        packed: Tensor,
        size: int,
        activation: int,
    ) -> Tensor:
        x = x.contiguous()
        rows, inputs = x.shape
        out = torch.empty(rows, size, dtype=x.dtype)
        inputs_at = x.data_ptr(), address(residual), address_of_floats(norm), eps
        c.gated_linear(DTYPES[x.dtype], activation, *inputs_at, packed.data_ptr(), out.data_ptr(), rows, size, inputs)
        return out

    def experts(
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        chosen: Tensor,
        factors: Tensor,
        count: int,
        size: int,
        activation: int,
    ) -> Tensor:
        x, chosen, factors = x.contiguous(), chosen.contiguous(), factors.contiguous()
        out = torch.empty_like(x)
        weights = gate.data_ptr(), up.data_ptr(), down.data_ptr()
        biases = (address_of_floats(bias) for bias in (gate_bias, up_bias, down_bias))
        choices = chosen.data_ptr(), address_of_floats(factors)
        sizes = *chosen.shape, count, size, x.shape[1]
        c.experts(DTYPES[x.dtype], activation, x.data_ptr(), *weights, *biases, *choices, out.data_ptr(), *sizes)
        return out

    def gate(both: Tensor, activation: int) -> Tensor:
        both = both.contiguous()
        rows, size = both.shape[0], both.shape[1] // 2
        out = torch.empty(rows, size, dtype=both.dtype)
        c.gate(DTYPES[both.dtype], activation, both.data_ptr(), out.data_ptr(), rows, size)
        return out

    def embed(token_ids: Tensor, packed: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
        token_ids = token_ids.contiguous()
        out = torch.empty(len(token_ids), inputs, dtype=dtype)
        c.embed(DTYPES[dtype], token_ids.data_ptr(), packed.data_ptr(), out.data_ptr(), len(token_ids), inputs)
        return out

    def dequantize(blocks: Tensor, format: str, values: int, dtype: torch.dtype) -> Tensor:
        blocks = blocks.contiguous()
        out = torch.empty(len(blocks), values, dtype=dtype)
        c.dequantize(QUANTIZED.index(format), DTYPES[dtype], blocks.data_ptr(), out.data_ptr(), len(blocks))
        return out

    def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, size = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // size
        c.rms_norm(
            DTYPES[x.dtype],
            x.data_ptr(),
            address(residual),
            address_of_floats(weight),
            out.data_ptr(),
            rows,
            size,
            eps,
        )
        return out

    def draw_tokens(logits: Tensor, keys: Tensor, temperature: Tensor) -> Tensor:
        logits, keys, temperature = logits.contiguous(), keys.contiguous(), temperature.contiguous()
        tokens = torch.empty_like(keys)
        inputs = logits.data_ptr(), keys.data_ptr(), address_of_floats(temperature)
        c.draw_tokens(*inputs, tokens.data_ptr(), *logits.shape)
        return tokens

    def log_sum_exp(logits: Tensor) -> Tensor:
        logits = logits.contiguous()
        out = torch.empty(len(logits))
        c.log_sum_exp(logits.data_ptr(), out.data_ptr(), *logits.shape)
        return out

    def attention_rotate_and_write(
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        cos: Tensor | None,
        sin: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        kv_heads: int,
        head_dim: int,
        block_size: int,
    ) -> Tensor:
        qkv, slots = qkv.contiguous(), slots.contiguous()
        weights: tuple[int | None, int | None] = (None, None)
        angles: tuple[int | None, int | None, int] = (None, None, 0)
        if q_weight is not None and k_weight is not None:
            weights = address_of_floats(q_weight), address_of_floats(k_weight)
        if cos is not None and sin is not None:
            if cos.stride(-1) != 1 or cos.stride() != sin.stride():
                cos, sin = cos.contiguous(), sin.contiguous()
            angles = cos.data_ptr(), sin.data_ptr(), cos.stride(0)
        tokens, width = qkv.shape
        q_heads = width // head_dim - 2 * kv_heads
        q = torch.empty(tokens, q_heads, head_dim, dtype=qkv.dtype)
        head_bytes, q_start = head_dim * qkv.itemsize, qkv.data_ptr()
        k_start = q_start + q_heads * head_bytes
        projected = q_start, width, k_start, width, k_start + kv_heads * head_bytes, width
        outputs = slots.data_ptr(), q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()
        sizes = tokens, q_heads, kv_heads, head_dim, block_size, k_cache.stride(0)
        dtypes = DTYPES[qkv.dtype], CACHE_DTYPES[k_cache.dtype]
        c.attention_write(*dtypes, *projected, *weights, eps, *angles, *outputs, *sizes)
        return q

    def attention_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, block_size: int) -> None:
        k, v, slots = _heads_in_one_piece(k), _heads_in_one_piece(v), slots.contiguous()
        tokens, kv_heads, head_dim = k.shape
        projected = None, 0, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)
        outputs = None, k_cache.data_ptr(), v_cache.data_ptr()
        sizes = tokens, 0, kv_heads, head_dim, block_size, k_cache.stride(0)
        unchanged = None, None, 0.0, None, None, 0
        dtypes = DTYPES[k.dtype], CACHE_DTYPES[k_cache.dtype]
        c.attention_write(*dtypes, *projected, *unchanged, slots.data_ptr(), *outputs, *sizes)

    def attention_decode(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        num_shared: int,
        kv_heads: int,
        block_size: int,
        scale: float,
        soft_cap: float | None,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        q, block_tables = q.contiguous(), block_tables.contiguous()
        query_start, seq_lens = query_start.contiguous(), seq_lens.contiguous()
        out = torch.empty_like(q)
        _, q_heads, head_dim = q.shape
        inputs = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_tables.data_ptr(), block_tables.shape[1]
        sizes = len(seq_lens), q_heads, kv_heads, head_dim, block_size, k_cache.stride(0)
        asked = scale, soft_cap or 0.0, window or 0, address_of_floats(sinks)
        lengths = query_start.data_ptr(), seq_lens.data_ptr(), num_shared
        dtypes = DTYPES[q.dtype], CACHE_DTYPES[k_cache.dtype]
        c.attention_decode(*dtypes, *inputs, *lengths, out.data_ptr(), *sizes, *asked)
        return out

    def attention_prefill(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        kv_heads: int,
        block_size: int,
        scale: float,
        soft_cap: float | None,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        q, block_tables = q.contiguous(), block_tables.contiguous()
        query_start, seq_lens = query_start.contiguous(), seq_lens.contiguous()
        out = torch.empty_like(q)
        _, q_heads, head_dim = q.shape
        inputs = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_tables.data_ptr(), block_tables.shape[1]
        lengths = query_start.data_ptr(), seq_lens.data_ptr()
        sizes = len(seq_lens), q_heads, kv_heads, head_dim, block_size, k_cache.stride(0)
        asked = scale, soft_cap or 0.0, window or 0, address_of_floats(sinks)
        dtypes = DTYPES[q.dtype], CACHE_DTYPES[k_cache.dtype]
        c.attention_prefill(*dtypes, *inputs, *lengths, out.data_ptr(), *sizes, *asked)
        return out

    pure = experts, gate, embed, dequantize, draw_tokens, log_sum_exp, attention_decode, attention_prefill
    caches = ("k_cache", "v_cache")
    return {
        **dict.fromkeys(pure, ()),
        **dict.fromkeys((linear, gated_linear, rms_norm), ("residual",)),
        attention_rotate_and_write: caches,
        attention_write: caches,
    }


def _heads_in_one_piece(x: Tensor) -> Tensor:
    """[tokens, heads, head_dim] as it is, or if the heads of a token have gaps between them, a copy without."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
