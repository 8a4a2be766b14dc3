"""Slots of recurrent states: what the kernels of convolutions and of recurrences read about them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.recurrences import StateRuns

SAME_FOR_ALL = [
    *("rows", "starts", "store_starts", "store_tokens", "store_slots", "has_stores", "out"),
    *("x", "stride", "before", "before_stride", "after", "after_stride"),
    *("query", "key", "value", "fading", "fading_stride", "beta", "beta_stride"),
]
"""Arguments whose alignment Triton must not compile for: a layer has one kernel for all steps, so that all round alike."""


@triton.jit
def stored_state(run, number, last, row, store_starts, store_tokens, store_slots, has_stores):
    """(token, slot) of the `number`-th state that a run stores, up to `last`; token -1: there are no more."""
    begin = tl.load(store_starts + run, mask=has_stores != 0, other=0)
    end = tl.load(store_starts + run + 1, mask=has_stores != 0, other=1)
    is_one = begin + number < end
    is_listed = is_one & (has_stores != 0)
    token = tl.load(store_tokens + begin + number, mask=is_listed, other=0)
    slot = tl.load(store_slots + begin + number, mask=is_listed, other=0)
    token = tl.where(is_listed, token, last - 1)
    return tl.where(is_one, token, -1), tl.where(is_listed, slot, row).to(tl.int64)


def arguments(runs: StateRuns) -> tuple[Tensor | int, ...]:
    """rows, starts, store_starts, store_tokens, store_slots, has_stores."""
    stores = runs.stores or (runs.rows,) * 3  # nobody reads these
    return runs.rows, runs.starts, *stores, int(runs.stores is not None)
