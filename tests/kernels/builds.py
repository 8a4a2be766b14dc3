"""The kernels compiled in other ways than for this CPU, called through their C functions."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nanoengine.attention.native import NativeAttention, head_dim_of, num_shared
from nanoengine.core.attention import AttentionSpec, Runs
from nanoengine.gguf.blocks import GGMLBlocks
from nanoengine.kernels.addresses import DTYPES
from nanoengine.kernels.c_functions import SIGNATURES
from nanoengine.kernels.compiler import NATIVE, SOURCES, CannotCompile, compile_library, find_compiler
from nanoengine.kernels.compiler import flags_for as kernel_flags
from nanoengine.kernels.gates import ACTIVATIONS
from nanoengine.kernels.native_operations import CACHE_DTYPES, QUANTIZED
from nanoengine.kernels.native_weights import new_segment
from nanoengine.quantization.tensor import Grouped, QuantizedTensor
from tests.kernels.mixtures import Mixture


@cache
def compiler() -> str:
    """Path of the compiler; the test that wants it is skipped where there is none, or it cannot compile the kernels."""
    try:
        path = find_compiler()
    except CannotCompile as error:
        pytest.skip(str(error))
    flags = kernel_flags(NATIVE)
    if not _accepts(path, flags):
        pytest.skip(f"{path} does not take {' '.join(flags)}")
    return path


@cache
def accepts(*flags: str) -> bool:
    """Whether the compiler knows these flags."""
    return _accepts(compiler(), flags)


def _accepts(path: str, flags: tuple[str, ...]) -> bool:
    command = [path, *flags, "-x", "c++", "-fsyntax-only", "-"]
    return subprocess.run(command, input="", capture_output=True, text=True, check=False).returncode == 0


def flags_for(architecture: str, *more: str) -> tuple[str, ...]:
    """The flags that kernels are compiled with, but for another architecture than this CPU's."""
    return *kernel_flags(architecture), *more


def compile_into(folder: Path, flags: tuple[str, ...], names: Sequence[str] = ()) -> Path:
    """Compile all sources, or those of these names and the threads that they need, into a library."""
    sources = SOURCES
    if names:
        sources = folder / "sources"
        sources.mkdir(parents=True)
        for path in SOURCES.iterdir():
            if path.suffix == ".h" or path.stem in (*names, "team"):
                shutil.copy(path, sources)
    return compile_library(sources, compiler(), flags, folder / "libraries")


class QuantizedTable(NamedTuple):
    """The table of a quantized matrix, and what it points to."""

    panels: Tensor
    memory: Tensor
    outputs: int
    inputs: int


class Build:
    """The functions of a compiled library, given tensors that are each in one piece."""

    def __init__(self, path: Path):
        library = ctypes.CDLL(str(path))
        self.functions: dict[str, Callable[..., Any]] = {}
        for name, arguments in SIGNATURES.items():
            if hasattr(library, name):  # not all are compiled for every test
                function = getattr(library, name)
                function.argtypes = arguments
                function.restype = ctypes.c_size_t if name.endswith("_size") else None
                self.functions[name] = function

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function; tensors become addresses."""
        for argument in arguments:
            assert not isinstance(argument, Tensor) or argument.is_contiguous()
        return self.functions[name](*(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))

    def pack(self, weight: Tensor) -> Tensor:
        code = DTYPES[weight.dtype]
        packed = torch.zeros(self.call("packed_size", code, *weight.shape), dtype=torch.int32)
        self.call("pack", code, weight, packed, 0, *weight.shape)
        return packed

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: torch.dtype | None = None) -> Tensor:
        result = torch.empty(len(x), len(weight), dtype=out or x.dtype)
        codes = DTYPES[x.dtype], DTYPES[result.dtype]
        self.call("linear", *codes, x, None, None, 0.0, self.pack(weight), bias, result, len(x), *weight.shape)
        return result

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        result = torch.empty(len(ids), weight.shape[1], dtype=weight.dtype)
        self.call("embed", DTYPES[weight.dtype], ids, self.pack(weight), result, *result.shape)
        return result

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        result = torch.empty_like(x)
        self.call("rms_norm", DTYPES[x.dtype], x, residual, weight, result, *x.shape, eps)
        return result

    def gated_linear(self, x: Tensor, weight: Tensor, activation: str = "silu") -> Tensor:
        size, inputs = len(weight) // 2, weight.shape[1]
        result = torch.empty(len(x), size, dtype=x.dtype)
        codes = DTYPES[x.dtype], ACTIVATIONS.index(activation)
        self.call("gated_linear", *codes, x, None, None, 0.0, self.pack(weight), result, len(x), size, inputs)
        return result

    def experts(self, given: Mixture) -> Tensor:
        result = torch.empty_like(given.x)
        codes = DTYPES[given.x.dtype], ACTIVATIONS.index(given.activation)
        weights = [torch.cat([self.pack(one) for one in values]) for values in (given.gate, given.up, given.down)]
        sizes = *given.chosen.shape, *given.gate.shape
        biases = given.biases or (None,) * 3
        self.call("experts", *codes, given.x, *weights, *biases, given.chosen, given.factors, result, *sizes)
        return result

    def quantized(self, source: QuantizedTensor) -> QuantizedTable:
        """A matrix in panels as this build cuts them."""
        (outputs, inputs), width = source.shape, self.call("packed_size", DTYPES[torch.float32], 1, 1)
        segment = new_segment(source)
        assert segment is not None
        memory = torch.zeros(self.call("quantized_size", segment.code, outputs, inputs), dtype=torch.uint8)
        if isinstance(source, GGMLBlocks):
            self.call("quantized_pack_blocks", QUANTIZED.index(source.type), source.data, memory, outputs, inputs)
        else:
            assert isinstance(source, Grouped)
            numbers = source.numbers, source.scales, source.zeros
            self.call("quantized_pack_groups", segment.code, *numbers, memory, outputs, inputs)
        size = self.call("quantized_size", segment.code, width, inputs)
        panels = [
            (memory.data_ptr() + first // width * size, segment.code, first, min(width, outputs - first))
            for first in range(0, outputs, width)
        ]
        return QuantizedTable(torch.tensor(panels), memory, outputs, inputs)

    def quantized_linear(self, x: Tensor, weight: QuantizedTable, exact: bool) -> Tensor:
        """In float32."""
        result = torch.empty(len(x), weight.outputs)
        codes, panels = (DTYPES[x.dtype], DTYPES[torch.float32], exact), (weight.panels, len(weight.panels))
        sizes = len(x), weight.outputs, weight.inputs
        self.call("quantized_linear", *codes, x, None, None, 0.0, *panels, None, result, *sizes)
        return result

    def quantized_gated_linear(self, x: Tensor, weight: QuantizedTable, exact: bool) -> Tensor:
        """Of a weight whose halves match."""
        size = weight.outputs // 2
        result = torch.empty(len(x), size, dtype=x.dtype)
        arguments = x, None, None, 0.0, weight.panels, len(weight.panels), result, len(x), size, weight.inputs
        self.call("quantized_gated_linear", DTYPES[x.dtype], exact, ACTIVATIONS.index("silu"), *arguments)
        return result

    def quantized_embed(self, ids: Tensor, weight: QuantizedTable, dtype: torch.dtype) -> Tensor:
        result = torch.empty(len(ids), weight.inputs, dtype=dtype)
        panels = weight.panels, len(weight.panels)
        self.call("quantized_embed", DTYPES[dtype], ids, *panels, result, *result.shape)
        return result

    def quantized_experts(self, given: Mixture, weights: Sequence[Sequence[QuantizedTable]], exact: bool) -> Tensor:
        """With the gates, ups and downs of all experts in the place of the mixture's weights; without biases."""
        result, codes = torch.empty_like(given.x), (DTYPES[given.x.dtype], exact, ACTIVATIONS.index(given.activation))
        tables = [torch.cat([one.panels for one in values]) for values in weights]
        inner = given.x, *tables, None, None, None, given.chosen, given.factors, result
        sizes = *given.chosen.shape, len(weights[0]), weights[0][0].outputs, weights[0][0].inputs
        self.call("quantized_experts", *codes, *inner, *sizes)
        return result

    def draw_tokens(self, logits: Tensor, keys: Tensor, temperature: float = 1.0) -> Tensor:
        tokens, temperatures = torch.empty_like(keys), torch.full((len(keys),), temperature)
        self.call("draw_tokens", logits, keys, temperatures, tokens, *logits.shape)
        return tokens

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        result = torch.empty(len(logits))
        self.call("log_sum_exp", logits, result, *logits.shape)
        return result


class BuildAttention(NativeAttention):
    """The native backend with the functions of another build."""

    def __init__(self, build: Build, block_size: int):
        self.block_size = block_size
        self.build = build

    def rotate_and_write(
        self,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        cos: Tensor | None,
        sin: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        kv_heads, dim = k_cache.shape[2], head_dim_of(k_cache)
        q = torch.empty(len(qkv), qkv.shape[1] // dim - 2 * kv_heads, dim, dtype=qkv.dtype)
        row, itemsize = qkv.shape[1], qkv.itemsize
        k = qkv.data_ptr() + q.shape[1] * dim * itemsize
        projected = qkv, row, k, row, k + kv_heads * dim * itemsize, row
        angles: tuple[int | None, int | None, int] = (None, None, 0)
        if cos is not None and sin is not None:
            assert cos.stride() == sin.stride()
            angles = cos.data_ptr(), sin.data_ptr(), cos.stride(0)
        inputs = *projected, q_weight, k_weight, eps, *angles, slot_mapping
        caches, sizes = (k_cache.data_ptr(), v_cache.data_ptr()), (len(qkv), q.shape[1], *self._sizes(k_cache))
        self.build.call("attention_write", DTYPES[qkv.dtype], CACHE_DTYPES[k_cache.dtype], *inputs, q, *caches, *sizes)
        return q

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        projected = None, 0, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)
        inputs = *projected, None, None, 0.0, None, None, 0, slot_mapping
        caches, sizes = (k_cache.data_ptr(), v_cache.data_ptr()), (len(k), 0, *self._sizes(k_cache))
        self.build.call("attention_write", DTYPES[k.dtype], CACHE_DTYPES[k_cache.dtype], *inputs, None, *caches, *sizes)

    def prefill(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        runs: Runs,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self._attend("attention_prefill", q, k_cache, v_cache, runs, spec, sinks)

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        runs: Runs,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self._attend("attention_decode", q, k_cache, v_cache, runs, spec, sinks, num_shared(runs, spec))

    def _attend(
        self,
        name: str,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        runs: Runs,
        spec: AttentionSpec,
        sinks: Tensor | None,
        *shared: int,
    ) -> Tensor:
        out, tables, lens = torch.empty_like(q), runs.block_tables, (runs.query_start_loc, runs.seq_lens)
        inputs = q, k_cache.data_ptr(), v_cache.data_ptr(), tables, tables.shape[1], *lens, *shared
        sizes = len(runs.seq_lens), q.shape[1], *self._sizes(k_cache)
        asked = spec.scale, spec.soft_cap or 0.0, spec.window or 0, sinks
        self.build.call(name, DTYPES[q.dtype], CACHE_DTYPES[k_cache.dtype], *inputs, out, *sizes, *asked)
        return out

    def _sizes(self, k_cache: Tensor) -> tuple[int, ...]:
        return k_cache.shape[2], head_dim_of(k_cache), self.block_size, k_cache.stride(0)
