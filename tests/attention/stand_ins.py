"""Stand-ins for the attention functions of packages, on any device: the same parameters, the same checks, float32 arithmetic.

They know nothing of our backends but where to pretend that there is a GPU. What the real functions do silently, and we must not
ask for (copying a cache that is not contiguous, splitting what is then put together wrongly), is an error here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from nanoengine.attention import flash_attn
from nanoengine.core import flash_attention

PACKAGES = ("flash_attn_2", "flash_attn_3")

CAPABILITY = {"flash_attn_2": (8, 0), "flash_attn_3": (9, 0)}
"""Of the GPU that there seems to be."""

HALF = (torch.float16, torch.bfloat16)
EXACT = (*HALF, torch.float32)

Functions = dict[str, Callable[..., Tensor]]


@contextmanager
def installed(
    package: str, *, exact: bool = False, capability: tuple[int, int] | Literal["right"] | None = "right"
) -> Iterator[Functions]:
    """Let a package seem to be installed, alone, on a machine whose every device is a GPU that it runs on.

    Args:
        package: one of PACKAGES.
        exact: admit float32 too.
        capability: of the GPU that there seems to be; None: there is none.

    Yields:
        its functions by name.
    """
    dtypes = EXACT if exact else HALF
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attention, "DTYPES", dtypes)
        pretend_gpu(patch, CAPABILITY[package] if capability == "right" else capability)
        for module in ("flash_attn", "flash_attn_interface"):
            patch.setitem(sys.modules, module, None)  # as if it were not installed
        name = {"flash_attn_2": "flash_attn", "flash_attn_3": "flash_attn_interface"}[package]
        functions = {"flash_attn_2": version_2_functions, "flash_attn_3": version_3_functions}[package](dtypes)
        patch.setitem(sys.modules, name, module_of(name, functions))
        yield functions


def module_of(name: str, functions: Functions) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(functions)
    return module


def pretend_gpu(patch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """Let our backends take every device for a GPU of that compute capability, or for none if that is None."""
    for module in (flash_attention, flash_attn):
        patch.setattr(module, "capability", lambda _: capability)


# ---- flash-attn 2.8: flash_attn/flash_attn_interface.py, csrc/flash_attn/flash_api.cpp


def version_2_functions(dtypes: Sequence[torch.dtype] = HALF) -> Functions:
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: Any = 0.0,
        softmax_scale: Any = None,
        causal: Any = False,
        window_size: Any = (-1, -1),
        softcap: Any = 0.0,
        alibi_slopes: Any = None,
        deterministic: Any = False,
        return_attn_probs: Any = False,
        block_table: Any = None,
    ) -> Tensor:
        unsupported(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
        unsupported(deterministic=deterministic, return_attn_probs=return_attn_probs)
        check(block_table is not None, "K/V without pages are unsupported")
        check(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
        check_tensors(q, k, v, block_table, dtypes)
        query_lens = lengths(cu_seqlens_q, len(q), len(block_table), max_seqlen_q)
        seq_lens = lengths(cu_seqlens_k, None, len(block_table), max_seqlen_k)
        return attend(q, k, v, query_lens, seq_lens, block_table, softmax_scale, bounds(window_size, causal), softcap)

    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Any = None,
        v: Any = None,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        cache_seqlens: Any = None,
        cache_batch_idx: Any = None,
        cache_leftpad: Any = None,
        block_table: Any = None,
        softmax_scale: Any = None,
        causal: Any = False,
        window_size: Any = (-1, -1),
        softcap: Any = 0.0,
        rotary_interleaved: Any = True,
        alibi_slopes: Any = None,
        num_splits: Any = 0,
        return_softmax_lse: Any = False,
    ) -> Tensor:
        unsupported(k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx)
        unsupported(cache_leftpad=cache_leftpad, alibi_slopes=alibi_slopes, num_splits=num_splits)
        unsupported(not_rotary_interleaved=not rotary_interleaved, return_softmax_lse=return_softmax_lse)
        check(block_table is not None, "K/V without pages are unsupported")
        check(k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
        window = bounds(window_size, causal)
        return attend_rows(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, window, softcap, dtypes)

    return {f.__name__: f for f in (flash_attn_varlen_func, flash_attn_with_kvcache)}


# ---- flash-attn 3: hopper/flash_attn_interface.py, hopper/flash_api.cpp


def version_3_functions(dtypes: Sequence[torch.dtype] = HALF) -> Functions:
    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Any = None,
        v: Any = None,
        qv: Any = None,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        cache_seqlens: Any = None,
        cache_batch_idx: Any = None,
        cache_leftpad: Any = None,
        page_table: Any = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_k_new: Any = None,
        max_seqlen_q: Any = None,
        rotary_seqlens: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        softmax_scale: Any = None,
        causal: Any = False,
        window_size: Any = (-1, -1),
        attention_chunk: Any = 0,
        softcap: Any = 0.0,
        rotary_interleaved: Any = True,
        scheduler_metadata: Any = None,
        num_splits: Any = 0,
        pack_gqa: Any = None,
        sm_margin: Any = 0,
        return_softmax_lse: Any = False,
    ) -> Tensor:
        unsupported(k=k, v=v, qv=qv, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx)
        unsupported(cache_leftpad=cache_leftpad, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens)
        unsupported(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
        unsupported(scheduler_metadata=scheduler_metadata, num_splits=num_splits, pack_gqa=pack_gqa)
        unsupported(sm_margin=sm_margin, return_softmax_lse=return_softmax_lse)
        unsupported(not_rotary_interleaved=not rotary_interleaved)
        check(page_table is not None, "K/V without pages are unsupported")
        window = bounds(window_size, causal)
        if cu_seqlens_q is None:
            return attend_rows(q, k_cache, v_cache, cache_seqlens, page_table, softmax_scale, window, softcap, dtypes)
        check(max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided")
        check_tensors(q, k_cache, v_cache, page_table, dtypes)
        query_lens = lengths(cu_seqlens_q, len(q), len(page_table), max_seqlen_q)
        seq_lens = integers(cache_seqlens, len(page_table))
        return attend(q, k_cache, v_cache, query_lens, seq_lens, page_table, softmax_scale, window, softcap)

    return {flash_attn_with_kvcache.__name__: flash_attn_with_kvcache}


# ---- what they check


def check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def unsupported(**options: Any) -> None:
    """Options that stay at their defaults: None, 0 or False."""
    for name, value in options.items():
        check(value is None or (not isinstance(value, Tensor) and value == 0), f"{name} is unsupported")


def bounds(window_size: Any, causal: Any = False) -> tuple[int, int]:
    """How many keys a query sees before its own and after it; -1 is without end."""
    check(isinstance(window_size, tuple) and [type(size) for size in window_size] == [int, int], "no pair of numbers")
    left, right = window_size
    return left, 0 if causal else right


def check_tensors(q: Tensor, k: Tensor, v: Tensor, table: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Queries [..., num_heads, head_dim], pages [num_blocks, page_size, num_kv_heads, head_dim], a table of pages."""
    check(q.dtype in dtypes, f"FlashAttention only support fp16 and bf16 data type, not {q.dtype}")
    check(k.dtype == q.dtype, "query and key must have the same dtype")
    check(v.dtype == q.dtype, "query and value must have the same dtype")
    for x in (q, k, v):
        check(x.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        check(x.device == q.device == table.device, "tensors are on several devices")
    dim = q.shape[-1]
    check(k.dim() == 4 and k.shape == v.shape and k.shape[-1] == dim, f"k and v have shapes {k.shape}, {v.shape}")
    check(dim <= 256, "FlashAttention forward only supports head dimension at most 256")
    check(dim % 8 == 0, "head_size must be a multiple of 8")
    check(q.shape[-2] % k.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")
    check(table.dtype == torch.int32, "block_table must have dtype torch.int32")
    check(table.dim() == 2 and table.stride(-1) == 1, "block_table must have contiguous last dimension")
    check(len(table) > 0, "batch size must be positive")


def integers(values: Any, count: int) -> list[int]:
    """A length for each sequence."""
    check(isinstance(values, Tensor), "lengths must be a tensor")
    check(values.dtype == torch.int32, "lengths must have dtype int32")
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Any,
    table: Tensor,
    scale: Any,
    window: tuple[int, int],
    softcap: Any,
    dtypes: Sequence[torch.dtype],
) -> Tensor:
    """As many queries for each sequence: q is [num_seqs, num_queries, num_heads, head_dim]."""
    check_tensors(q, k, v, table, dtypes)
    check(q.dim() == 4 and len(q) == len(table), f"q has shape {q.shape}")
    counts = [q.shape[1]] * len(q)
    lens = integers(seq_lens, len(q))
    return attend(q.flatten(0, 1), k, v, counts, lens, table, scale, window, softcap).view(q.shape)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    table: Tensor,
    scale: Any,
    window: tuple[int, int],
    softcap: Any = 0.0,
) -> Tensor:
    """Packed queries [num_tokens, num_heads, head_dim]; the diagonal ends in the bottom right corner, and no key is zero.

    What no query of a sequence sees is not read: it may be NaN, and in any page.
    """
    check(q.dim() == 3, f"q has shape {q.shape}")
    check(isinstance(scale, float), "the scale is not given")
    check(isinstance(softcap, float), "the soft cap is not a float")
    page, group = k.shape[1], q.shape[1] // k.shape[2]
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
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * scale
        if softcap > 0:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill((positions < own - left) | (positions > own + right), -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)  # a query before the first key sees nothing
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out
