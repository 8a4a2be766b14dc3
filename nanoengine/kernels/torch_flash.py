"""The two functions of the package flash-attn that attention calls, over torch's copy of its version 2. Both are causal.

That copy (`torch.nn.attention.varlen`) reads K/V in pages since torch 2.12, and since 2.13 it can leave sequences undivided:
where it divides them, the sums of parts may go to wrong rows (https://github.com/pytorch/pytorch/issues/194167).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

LEAST = TorchVersion("2.13")
NO_WINDOW = (-1, -1)


def unsupported_reason() -> str | None:
    """The reason that torch's copy cannot be used; None if it can."""
    return None if torch.__version__ >= LEAST else f"torch {torch.__version__} has no copy of it; {LEAST} has one"


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, seqused_k: Any = None, **how: Any
) -> Tensor:
    """As the package has it. With `seqused_k`, the lengths of sequences, nobody looks at the values of `cu_seqlens_k`."""
    from torch.nn.attention.varlen import varlen_attn  # takes seconds

    window = how.get("window_size", NO_WINDOW)
    is_alone = how["max_seqlen_q"] == 1 and window == NO_WINDOW  # a query that sees all there is
    where = cu_seqlens_q, cu_seqlens_k, how["max_seqlen_q"], how["max_seqlen_k"]
    attended = varlen_attn(
        *(q, k, v, *where),
        scale=how["softmax_scale"],
        window_size=NO_WINDOW if is_alone else (window[0], 0),
        enable_gqa=True,
        seqused_k=cu_seqlens_k.diff() if seqused_k is None else seqused_k,
        block_table=how["block_table"],
        # If nothing is masked, the heads that share K/V become rows of a sequence, whose partial results are combined rightly.
        num_splits=None if is_alone and q.shape[1] > k.shape[2] else 1,
    )
    return cast(Tensor, attended)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, **how: Any) -> Tensor:
    """As the package has it: q and the result are [num_seqs, num_queries, num_heads, head_dim]."""
    count, longest = q.shape[:2]
    starts = torch.arange(0, count * longest + 1, longest, dtype=torch.int32, device=q.device)
    how |= {"max_seqlen_q": longest, "max_seqlen_k": how["block_table"].shape[1] * k_cache.shape[1]}
    how["seqused_k"] = cache_seqlens
    return flash_attn_varlen_func(q.flatten(0, 1), k_cache, v_cache, starts, starts, **how).view(q.shape)
