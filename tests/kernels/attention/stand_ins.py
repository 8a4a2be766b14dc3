"""Stand-ins for the attention functions of packages, on any device: the same parameters, the same checks, float32 arithmetic.

They know nothing of our backends but where to pretend that there is a GPU. What the real functions do silently, and we must not
ask for (copying a cache that is not contiguous, splitting what is then put together wrongly), is an error here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from nanoengine.kernels import flash_attn, torch_flash

PACKAGES = ("flash_attn", "torch_flash")
MODULES = {"flash_attn": "flash_attn", "torch_flash": "torch.nn.attention.varlen"}

CAPABILITY = (8, 0)
"""Of the GPU that there seems to be."""

HALF = (torch.float16, torch.bfloat16)
EXACT = (*HALF, torch.float32)

Functions = dict[str, Callable[..., Tensor]]


@contextmanager
def installed(
    package: str, *, exact: bool = False, capability: tuple[int, int] | None = CAPABILITY
) -> Iterator[Functions]:
    """Let flash-attn, or torch's copy of it, seem to be there, alone, on a machine whose every device is a GPU that it runs on.

    Args:
        package: one of PACKAGES.
        exact: admit float32 too.
        capability: of the GPU that there seems to be; None: there is none.

    Yields:
        its functions by name.
    """
    dtypes = EXACT if exact else HALF
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attn, "DTYPES", dtypes)
        pretend_gpu(patch, capability)
        patch.setattr(torch_flash, "LEAST", TorchVersion("0"))
        for module in MODULES.values():
            patch.setitem(sys.modules, module, None)  # as if it were not installed
        name, functions = MODULES[package], functions_of(package, dtypes)
        patch.setitem(sys.modules, name, module_of(name, functions))
        yield functions


def module_of(name: str, functions: Functions) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(functions)
    return module


def pretend_gpu(patch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """Let our backends take every device for a GPU of that compute capability, or for none if that is None."""
    patch.setattr(flash_attn, "capability", lambda _: capability)


# flash-attn 2.8: flash_attn/flash_attn_interface.py, csrc/flash_attn/flash_api.cpp
VARLEN_2 = """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None"""
WITH_KVCACHE_2 = """q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1),
    softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"""
# torch 2.13: torch/nn/attention/varlen.py, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp
VARLEN_ATTN = """query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None"""


def functions_of(package: str, dtypes: Sequence[torch.dtype] = HALF) -> Functions:
    # What each of these takes is heeded; any other parameter must stay at its default.
    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, **how):  # type: ignore[no-untyped-def]
        check_pages(k, block_table)
        check_tensors(q, k, v, block_table, dtypes)
        query_lens = lengths(cu_seqlens_q, len(q), len(block_table), max_seqlen_q)
        return attend(
            q, k, v, query_lens, lengths(cu_seqlens_k, None, len(block_table), max_seqlen_k), block_table, **how
        )

    def with_kvcache_2(q, k_cache, v_cache, cache_seqlens, block_table, **how):  # type: ignore[no-untyped-def]
        check_pages(k_cache, block_table)
        return attend_rows(q, k_cache, v_cache, cache_seqlens, block_table, dtypes, **how)

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **how):  # type: ignore[no-untyped-def]
        q, k, v, table, window = query, key, value, how["block_table"], how["window_size"]
        check_pages(k, table)
        check_tensors(q, k, v, table, dtypes)
        check(how["enable_gqa"] or q.shape[1] == k.shape[2], "Expect as many heads of keys as of queries")
        is_split_rightly = max_q == 1 and window == (-1, -1) and q.shape[1] > k.shape[2]
        check(how["num_splits"] == 1 or is_split_rightly, "parts of a sequence may be put into other rows")
        query_lens, seq_lens = lengths(cu_seq_q, len(q), len(table), max_q), integers(how["seqused_k"], len(table))
        integers(cu_seq_k, len(table) + 1)
        check(type(max_k) is int and max_k >= max(seq_lens), f"the longest of {seq_lens} is not {max_k}")
        return attend(q, k, v, query_lens, seq_lens, table, how["scale"], False, window, 0.0)

    found: dict[str, list[tuple[str, str, Callable[..., Tensor]]]] = {
        "flash_attn": [
            ("flash_attn_varlen_func", VARLEN_2, varlen),
            ("flash_attn_with_kvcache", WITH_KVCACHE_2, with_kvcache_2),
        ],
        "torch_flash": [("varlen_attn", VARLEN_ATTN, varlen_attn)],
    }
    return {name: declared(declaration, body, HOW[package]) for name, declaration, body in found[package]}


HOW = {
    "flash_attn": ("softmax_scale", "causal", "window_size", "softcap"),
    "torch_flash": ("scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"),
}


def declared(declaration: str, body: Callable[..., Tensor], how: Sequence[str]) -> Callable[..., Tensor]:
    """`body` as a function with these parameters."""
    signature = inspect.signature(eval("lambda " + " ".join(declaration.split()) + ": None"))
    heeded = {*inspect.signature(body).parameters, *how} - {"how"}

    def call(*arguments: Any, **options: Any) -> Tensor:
        given = signature.bind(*arguments, **options)
        given.apply_defaults()
        for name, value in given.arguments.items():
            default = signature.parameters[name].default
            unset = value is default or (not isinstance(value, Tensor) and value == default)
            check(name in heeded or unset, f"{name} is unsupported")
        return body(**{name: value for name, value in given.arguments.items() if name in heeded})

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


# ---- what they check


def check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def check_pages(cache: Tensor, table: Any) -> None:
    check(table is not None, "K/V without pages are unsupported")
    check(cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")


def bounds(window_size: Any, causal: Any) -> tuple[int, int]:
    """How many keys a query sees before its own and after it; -1 is without end."""
    check(isinstance(window_size, tuple) and [type(size) for size in window_size] == [int, int], "no pair of numbers")
    left, right = window_size
    return left, 0 if causal else right


def check_tensors(q: Tensor, k: Tensor, v: Tensor, table: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Queries [..., num_heads, head_dim], pages [num_blocks, page_size, num_kv_heads, head_dim], a table of pages."""
    check(q.dtype in dtypes, f"FlashAttention only support fp16 and bf16 data type, not {q.dtype}")
    check(k.dtype == v.dtype == q.dtype, "query, key and value must have the same dtype")
    for x in (q, k, v):
        check(x.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        check(x.device == q.device == table.device, "tensors are on several devices")
    dim = q.shape[-1]
    check(k.dim() == 4 and k.shape == v.shape and k.shape[-1] == dim, f"k and v have shapes {k.shape}, {v.shape}")
    check(dim <= 256 and dim % 8 == 0, "head_size must be a multiple of 8 up to 256")
    check(q.shape[-2] % k.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")
    check(table.dtype == torch.int32, "block_table must have dtype torch.int32")
    check(table.dim() == 2 and table.stride(-1) == 1, "block_table must have contiguous last dimension")
    check(len(table) > 0, "batch size must be positive")


def integers(values: Any, count: int) -> list[int]:
    """A length for each sequence."""
    check(isinstance(values, Tensor) and values.dtype == torch.int32, "lengths must have dtype int32")
    check(values.is_contiguous() and values.shape == (count,), f"lengths must be contiguous and of shape ({count},)")
    return values.tolist()


def lengths(starts: Any, total: int | None, count: int, longest: Any) -> list[int]:
    """The lengths of sequences that start where the cumulative ones say."""
    ends = integers(starts, count + 1)
    check(ends[0] == 0 and (total is None or ends[-1] == total), f"cumulative lengths {ends} are not of {total} rows")
    found = [end - start for start, end in pairwise(ends)]
    check(min(found) >= 0, f"cumulative lengths {ends} fall")
    check(type(longest) is int and longest >= max(found), f"the longest of {found} is not {longest}")
    return found


# ---- what they compute


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, seq_lens: Any, table: Tensor, dtypes: Sequence[torch.dtype], **how: Any
) -> Tensor:
    """As many queries for each sequence: q is [num_seqs, num_queries, num_heads, head_dim]."""
    check_tensors(q, k, v, table, dtypes)
    check(q.dim() == 4 and len(q) == len(table), f"q has shape {q.shape}")
    counts, lens = [q.shape[1]] * len(q), integers(seq_lens, len(q))
    return attend(q.flatten(0, 1), k, v, counts, lens, table, **how).view(q.shape)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    table: Tensor,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    sinks: Tensor | None = None,
) -> Tensor:
    """Packed queries [num_tokens, num_heads, head_dim]; the diagonal ends in the bottom right corner, and no key is zero.

    What no query of a sequence sees is not read: it may be NaN, and in any page.
    """
    check(q.dim() == 3, f"q has shape {q.shape}")
    check(isinstance(softmax_scale, float), "the scale is not given")
    check(isinstance(softcap, float), "the soft cap is not a float")
    page, group, window = k.shape[1], q.shape[1] // k.shape[2], bounds(window_size, causal)
    out = torch.zeros_like(q)
    start = 0
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        check(seq_len <= table.shape[1] * page, "a sequence is longer than its pages")
        rows = slice(start, start + query_len)
        start += query_len
        if not seq_len or not query_len:
            continue
        own = torch.arange(seq_len - query_len, seq_len, device=q.device)[:, None]
        left, right = (seq_len if size < 0 else size for size in window)
        positions = torch.arange(max(seq_len - query_len - left, 0), seq_len, device=q.device)
        blocks = table[row].long()[positions // page]
        check(bool((blocks < len(k)).all()), "a page lies outside of the cache")
        keys, values = (x[blocks, positions % page].float().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * softmax_scale
        if softcap > 0:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill((positions < own - left) | (positions > own + right), -torch.inf)
        if sinks is not None:  # one more score for each head, without a value
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, query_len, 1)), 2)
        weights = scores.softmax(-1).nan_to_num(0.0)[..., : len(positions)]  # a query before the first key sees nothing
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out
