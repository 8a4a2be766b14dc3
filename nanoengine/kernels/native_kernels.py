"""The native kernels as torch operations, `torch.ops.nanoengine.*`, and as an implementation of the Kernels protocol."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from nanoengine.kernels.compiler import CannotCompile, load_libraries
from nanoengine.kernels.interface import Weight
from nanoengine.kernels.memory import keep_freed_memory, zeros_in_huge_pages
from nanoengine.kernels.sampling import choose_tokens
from nanoengine.kernels.torch_kernels import place_tokens

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Dtypes that the kernels compute with, as simd.h numbers them."""

PANEL = 32
"""Outputs of a weight that lie together (linear.cpp)."""

POINTER, SIZE, INT, FLOAT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_float

SIGNATURES: dict[str, tuple[str, list[type]]] = {
    "packed_size": ("linear", [INT, SIZE, SIZE]),
    "pack": ("linear", [INT, POINTER, POINTER, SIZE, SIZE, SIZE]),
    "linear": ("linear", [INT, INT, POINTER, POINTER, POINTER, POINTER, SIZE, SIZE, SIZE]),
    "gated_linear": ("linear", [INT, POINTER, POINTER, POINTER, SIZE, SIZE, SIZE]),
    "embed": ("linear", [INT, POINTER, POINTER, POINTER, SIZE, SIZE]),
    "rms_norm": ("norm", [INT, POINTER, POINTER, POINTER, POINTER, SIZE, SIZE, FLOAT]),
    "draw_tokens": ("sampling", [POINTER, POINTER, POINTER, SIZE, SIZE]),
    "attention_write": ("attention_write", [INT, *[POINTER] * 3, FLOAT, *[POINTER] * 6, *[SIZE] * 6]),
    "attention_decode": ("attention_decode", [INT, *[POINTER] * 4, SIZE, POINTER, POINTER, *[SIZE] * 6, FLOAT]),
    "attention_prefill": ("attention_prefill", [INT, *[POINTER] * 4, SIZE, *[POINTER] * 3, *[SIZE] * 6, FLOAT]),
}
"""Name of each C function -> the library that holds it, and the types of its arguments."""

SCHEMAS = {
    "linear": "(Tensor x, Tensor packed, Tensor? bias, int outputs, bool to_float) -> Tensor",
    "gated_linear": "(Tensor x, Tensor packed, int size) -> Tensor",
    "embed": "(Tensor token_ids, Tensor packed, int inputs, ScalarType dtype) -> Tensor",
    "rms_norm": "(Tensor x, Tensor weight, float eps) -> Tensor",
    "add_rms_norm": "(Tensor x, Tensor(a!) residual, Tensor weight, float eps) -> Tensor",
    "draw_tokens": "(Tensor logits, Tensor keys) -> Tensor",
    "attention_write": "(Tensor qkv, Tensor q_weight, Tensor k_weight, float eps, Tensor cos, Tensor sin, Tensor slots, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache, int kv_heads, int head_dim, int block_size) -> Tensor",
    "attention_decode": "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, int kv_heads, "
    "int block_size, float scale) -> Tensor",
    "attention_prefill": "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor query_start, "
    "Tensor seq_lens, int kv_heads, int block_size, float scale) -> Tensor",
}


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason that native kernels cannot run here; None if they can. Compiles them at the first call."""
    if device.type != "cpu":
        return f"they are for the CPU, not for {device.type}"
    if dtype not in DTYPES:
        return f"they compute in float32 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    try:
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
    functions = c_functions()
    library = Library("nanoengine", "DEF")
    for name, implementation in _implementations(functions).items():
        library.define(name + SCHEMAS[name])
        library.impl(name, implementation, "CPU")
    return library


@cache
def c_functions() -> dict[str, Callable[..., int]]:
    """The functions of the compiled libraries, by name, with their argument types set."""
    libraries = load_libraries()
    functions = {}
    for name, (library, arguments) in SIGNATURES.items():
        function = getattr(libraries[library], name)
        function.argtypes = arguments
        function.restype = SIZE if name == "packed_size" else None
        functions[name] = function
    return functions


def _implementations(functions: dict[str, Callable[..., int]]) -> dict[str, Callable[..., Tensor]]:
    """The operations of SCHEMAS. They allocate results; addresses and sizes are all that C sees."""
    c_linear, c_gated, c_embed = functions["linear"], functions["gated_linear"], functions["embed"]
    c_norm, c_draw, c_write = functions["rms_norm"], functions["draw_tokens"], functions["attention_write"]
    c_decode, c_prefill = functions["attention_decode"], functions["attention_prefill"]

    def linear(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int, to_float: bool) -> Tensor:
        x = x.contiguous()
        rows, inputs = x.shape
        code = DTYPES[x.dtype]
        out = torch.empty(rows, outputs, dtype=torch.float32 if to_float else x.dtype)
        bias_address = None if bias is None else bias.data_ptr()
        c_linear(
            code,
            DTYPES[out.dtype],
            x.data_ptr(),
            packed.data_ptr(),
            bias_address,
            out.data_ptr(),
            rows,
            outputs,
            inputs,
        )
        return out

    def gated_linear(x: Tensor, packed: Tensor, size: int) -> Tensor:
        x = x.contiguous()
        rows, inputs = x.shape
        out = torch.empty(rows, size, dtype=x.dtype)
        c_gated(DTYPES[x.dtype], x.data_ptr(), packed.data_ptr(), out.data_ptr(), rows, size, inputs)
        return out

    def embed(token_ids: Tensor, packed: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
        token_ids = token_ids.contiguous()
        out = torch.empty(len(token_ids), inputs, dtype=dtype)
        c_embed(DTYPES[dtype], token_ids.data_ptr(), packed.data_ptr(), out.data_ptr(), len(token_ids), inputs)
        return out

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, size = torch.empty_like(x), x.shape[-1]
        c_norm(DTYPES[x.dtype], x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps)
        return out

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        assert residual.is_contiguous()
        out, size, residual_address = torch.empty_like(x), x.shape[-1], residual.data_ptr()
        c_norm(
            DTYPES[x.dtype],
            x.data_ptr(),
            residual_address,
            weight.data_ptr(),
            out.data_ptr(),
            x.numel() // size,
            size,
            eps,
        )
        return out

    def draw_tokens(logits: Tensor, keys: Tensor) -> Tensor:
        logits, keys = logits.contiguous(), keys.contiguous()
        tokens = torch.empty_like(keys)
        c_draw(logits.data_ptr(), keys.data_ptr(), tokens.data_ptr(), *logits.shape)
        return tokens

    def attention_write(
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_heads: int,
        head_dim: int,
        block_size: int,
    ) -> Tensor:
        tokens = len(qkv)
        q_heads = qkv.shape[1] // head_dim - 2 * kv_heads
        q = torch.empty(tokens, q_heads, head_dim, dtype=qkv.dtype)
        qkv, cos, sin, slots = qkv.contiguous(), cos.contiguous(), sin.contiguous(), slots.contiguous()
        inputs = qkv.data_ptr(), q_weight.data_ptr(), k_weight.data_ptr(), eps, cos.data_ptr(), sin.data_ptr()
        outputs = slots.data_ptr(), q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()
        sizes = tokens, q_heads, kv_heads, head_dim, block_size, k_cache.stride(0)
        c_write(DTYPES[qkv.dtype], *inputs, *outputs, *sizes)
        return q

    def attention_decode(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        kv_heads: int,
        block_size: int,
        scale: float,
    ) -> Tensor:
        q, block_tables, seq_lens = q.contiguous(), block_tables.contiguous(), seq_lens.contiguous()
        out = torch.empty_like(q)
        sequences, q_heads, head_dim = q.shape
        inputs = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_tables.data_ptr(), block_tables.shape[1]
        sizes = sequences, q_heads, kv_heads, head_dim, block_size, k_cache.stride(0)
        c_decode(DTYPES[q.dtype], *inputs, seq_lens.data_ptr(), out.data_ptr(), *sizes, scale)
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
    ) -> Tensor:
        q, block_tables = q.contiguous(), block_tables.contiguous()
        query_start, seq_lens = query_start.contiguous(), seq_lens.contiguous()
        out = torch.empty_like(q)
        _, q_heads, head_dim = q.shape
        inputs = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_tables.data_ptr(), block_tables.shape[1]
        lengths = query_start.data_ptr(), seq_lens.data_ptr()
        sizes = len(seq_lens), q_heads, kv_heads, head_dim, block_size, k_cache.stride(0)
        c_prefill(DTYPES[q.dtype], *inputs, *lengths, out.data_ptr(), *sizes, scale)
        return out

    of_layers = linear, gated_linear, embed, rms_norm, add_rms_norm, draw_tokens
    of_attention = attention_write, attention_decode, attention_prefill
    return {function.__name__: function for function in (*of_layers, *of_attention)}


class Packed:
    """A weight in the order in which `linear` reads it (linear.cpp), filled row by row from a checkpoint."""

    def __init__(self, outputs: int, inputs: int):
        self.shape = torch.Size((outputs, inputs))
        self.dtype = torch.get_default_dtype()
        self.dwords = zeros_in_huge_pages(
            [c_functions()["packed_size"](DTYPES[self.dtype], outputs, inputs)], torch.int32
        )

    def rows(self, first: int, count: int) -> PackedRows:
        assert first + count <= self.shape[0]
        return PackedRows(self, first, count)


class PackedRows:
    """Rows [first, first + count) of a packed weight: `copy_` packs what it is given."""

    def __init__(self, weight: Packed, first: int, count: int):
        self.weight, self.first = weight, first
        self.shape = torch.Size((count, weight.shape[1]))

    def copy_(self, source: Tensor) -> None:
        assert source.shape == self.shape
        source = source.to(self.weight.dtype).contiguous()
        c_functions()["pack"](
            DTYPES[source.dtype], source.data_ptr(), self.weight.dwords.data_ptr(), self.first, *self.shape
        )


class NativeKernels:
    """The operations above. Results are new tensors, except that `add_rms_norm` overwrites the residual."""

    name = "native"
    description = "compiled for this CPU"
    capturable = False

    def __init__(self) -> None:
        operations()
        keep_freed_memory()
        ops = torch.ops.nanoengine
        self._linear, self._gated_linear, self._embed = ops.linear.default, ops.gated_linear.default, ops.embed.default
        self._rms_norm, self._add_rms_norm = ops.rms_norm.default, ops.add_rms_norm.default
        self._draw_tokens = ops.draw_tokens.default
        self.place_tokens = place_tokens

    def new_weight(self, outputs: int, inputs: int) -> Packed:
        return Packed(outputs, inputs)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, Packed)
        assert x.shape[1] == weight.shape[1]
        return self._linear(x, weight.dwords, bias, weight.shape[0], False)

    def gated_linear(self, x: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, Packed)
        assert x.shape[1] == weight.shape[1]
        size = weight.shape[0] // 2
        if size % PANEL:  # the halves share a panel
            gate, up = self.linear(x, weight, None).chunk(2, dim=-1)
            return F.silu(gate) * up
        return self._gated_linear(x, weight.dwords, size)

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, Packed)
        assert hidden.shape[1] == weight.shape[1]
        return self._linear(hidden, weight.dwords, None, weight.shape[0], True)

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, Packed)
        return self._embed(token_ids, weight.dwords, weight.shape[1], weight.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._add_rms_norm(x, residual, weight, eps), residual

    def choose_tokens(self, logits: Tensor, *how: Tensor) -> Tensor:
        return choose_tokens(self._draw_tokens, logits, *how)
