"""From logits to tokens without the host: temperature, filters, and the Gumbel-max trick (Gumbel, 1954; Maddison et al., 2014)
with the noise of core/sampling.py.

Parts of the vocabulary, or of the few candidates that filters leave, are looked through at once for their best token, and the
best of those is the row's. A row's token depends neither on the other rows nor on the device. Noise takes a hundred instructions,
and its random bits a quarter of that: they tell of most tokens that they cannot win.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.core import messages, randomness
from nanoengine.core.sampling import SamplingTable
from nanoengine.kernels.triton import dependent
from nanoengine.kernels.triton.dependent import LAUNCH_PLAIN
from nanoengine.kernels.triton.draws.candidates import (
    GROUP,
    LEAST_TEMPERATURE,
    MOST_GROUPS,
    MOST_PARTS,
    NUM_WARPS,
    TILE,
    row_stride,
    size_of_parts,
)
from nanoengine.kernels.triton.draws.filters import Limits, find_limits
from nanoengine.kernels.triton.launch import num_multiprocessors
from nanoengine.kernels.triton.prepared import Launch, launch_once

GOLDEN_GAMMA = tl.constexpr(randomness.GOLDEN_GAMMA)
MIX_1 = tl.constexpr(randomness.MIX_1)
MIX_2 = tl.constexpr(randomness.MIX_2)
NOT_FINITE = tl.constexpr(messages.UNKNOWN)
NONE_LEFT = tl.constexpr(messages.NONE_LEFT)

NO_TOKEN = tl.constexpr(2**31 - 1)
"""Above all ids."""

MOST_NOISE = tl.constexpr(28.5)
"""Above all Gumbel noise: the least uniform number is 2^-41, and -log(-log(1 - 2^-41)) = 28.42; the rest is for rounding."""

SLACK = tl.constexpr(2.0**-4)
"""Noise that is thought of as possible beyond what was computed: more than all rounding of noise, which is less than 2^-16."""

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _mix(x):
    """`randomness.mix`; shifts of unsigned numbers bring in zeros."""
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def _bits_of(key, token):
    """64 random bits. Ids have 31 bits: without a sign, their product takes half the instructions."""
    return _mix(key + (token + 1).to(tl.uint32).to(tl.uint64) * GOLDEN_GAMMA)


@triton.jit
def _gumbel_noise(key, token):
    """`gumbel_noise`."""
    return _noise_of(_bits_of(key, token))


@triton.jit
def _noise_of(bits):
    """Gumbel noise for 64 random bits."""
    uniform = tl.minimum(((bits >> 24).to(tl.int64).to(tl.float32) + 0.5) * 2.0**-40, 1 - 2.0**-24)
    # -log(1 - u) without the rounding of 1 - u (Kahan): log(1 - u) / u changes slowly.
    rest = 1.0 - uniform
    rounded = 1.0 - rest
    exact = tl.where(rounded == 0.0, uniform, -tl.log(rest) * (uniform / tl.where(rounded == 0.0, 1.0, rounded)))
    return -tl.log(exact)


@triton.jit
def _just_below(top):
    """A bound below a score, by more than rounding adds to a score or to what is compared with the bound; NaN below infinity. It
    is so low that `_may_reach` can multiply it: an infinite product would be far above every logit.
    """
    bound = top - (SLACK + tl.abs(top) * 2.0**-20)
    return tl.where(bound > 2e38, 2e38, bound)


@triton.jit
def _may_reach(bound, x, inverse, bits):
    """Whether logits may score above a bound with noise of these bits, without a logarithm; True where it is uncertain (NaN).

    Noise of g is that of the uniform number 1 - exp(-exp(-g)), which is less than exp(-g): a larger one makes less noise. Of the
    uniform number 23 bits are looked at, the others taken for 0.
    """
    uniform = ((bits >> 41).to(tl.int32) | 0x3F800000).to(tl.float32, bitcast=True)  # 1 more than that
    most = tl.exp2(x * (inverse * LOG2_E) - bound * LOG2_E)
    return (uniform > most + (1 + 2.0**-22)) == 0


@triton.jit
def _load_tile(logits, first, end, size, TILE: tl.constexpr):
    """The tile of a row that begins at an index before `end`, all of -inf for another; nothing is read from it yet. That the mask
    depends on `size` alone makes loads wide.
    """
    index = first + tl.arange(0, TILE)
    return tl.load(logits + index, mask=index < tl.where(first < end, size, 0), other=-float("inf"))


@triton.jit
def _best_of(
    logits,
    ids,
    first,
    end,
    size,
    key,
    temperature,
    value,
    last,
    HAS_IDS: tl.constexpr,
    FILTERED: tl.constexpr,
    TILE: tl.constexpr,
):
    """The best score at the indices from `first` to `end`, its token, and the highest logit. Without ids, an index is the token.

    Scores do not fall where logits rise: a tile is passed over if the most noise would leave its highest logit below the best,
    and no noise is computed where its bits show that it is too little.
    """
    divisor = tl.where(temperature > 0, tl.maximum(temperature, LEAST_TEMPERATURE), 1.0)
    inverse = 1.0 / divisor
    most_noise = tl.where(temperature > 0, MOST_NOISE, 0.0)
    best = tl.full([TILE], -float("inf"), tl.float32)
    best_token = tl.full([TILE], NO_TOKEN, tl.int32)
    top = tl.full([], -float("inf"), tl.float32)
    highest = top
    offset = tl.arange(0, TILE)
    ahead = _load_tile(logits, first, end, size, TILE)
    for start in range(first, end, TILE):
        x = ahead
        ahead = _load_tile(logits, start + TILE, end, size, TILE)  # it is on its way while this one is looked at
        x = tl.where(x == x, x, float("inf"))
        peak = tl.max(x)
        highest = tl.maximum(highest, peak)
        bound = _just_below(top)
        missing = bound - peak * inverse
        if (peak > -float("inf")) & (peak >= value) & ((missing <= most_noise) | (missing != missing)):
            token = start + offset
            if HAS_IDS:
                token = tl.load(ids + token, mask=token < size, other=NO_TOKEN)
            if FILTERED:
                x = tl.where((x > value) | ((x == value) & (token <= last)), x, -float("inf"))
            may_win = tl.full([], 1, tl.int32)
            if (temperature > 0) & (top > -float("inf")):
                may_win = tl.max(_may_reach(bound, x, inverse, _bits_of(key, token)).to(tl.int32))
            if may_win > 0:
                score = tl.div_rn(x, divisor)
                if temperature > 0:
                    score += _gumbel_noise(key, token)
                best_token = tl.where(score > best, token, best_token)
                best = tl.maximum(best, score)
                top = tl.max(best)
    return top, tl.min(tl.where(best == top, best_token, NO_TOKEN)), highest


@triton.jit(do_not_specialize=["part_size"], do_not_specialize_on_alignment=["rows", "positions"])
def _draw_kernel(
    logits,
    temperatures,
    seeds,
    rows,
    positions,
    lowest,
    last_ids,
    counts,
    candidates,
    candidate_ids,
    scores,
    tokens,
    highest,
    vocab_size,
    logits_stride,
    part_size,
    FILTERED: tl.constexpr,
    LAUNCH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (i, j): the best score of part j of row i, or of its candidates; its token, and the highest logit.

    Without FILTERED there are no limits: no row has filters.
    """
    dependent.start(LAUNCH)
    dependent.wait(LAUNCH)
    i = tl.program_id(0)
    entry = tl.load(rows + i)
    temperature = tl.load(temperatures + entry)
    position = tl.load(positions + i)
    key = _mix(tl.load(seeds + entry).to(tl.uint64) + (position + 1).to(tl.uint64) * GOLDEN_GAMMA)
    first = tl.multiple_of(tl.program_id(1) * part_size, TILE)
    end = tl.minimum(first + part_size, vocab_size)
    row = logits + i.to(tl.int64) * logits_stride
    if FILTERED:
        value, last, count = tl.load(lowest + i), tl.load(last_ids + i), tl.load(counts + i)
        if count > 0:
            end = tl.minimum(end, count)  # nothing is in the later parts
            listed = i.to(tl.int64) * (MOST_GROUPS * GROUP)
            row, ids = candidates + listed, candidate_ids + listed
            score, token, raw = _best_of(row, ids, first, end, count, key, temperature, value, last, True, True, TILE)
        else:
            score, token, raw = _best_of(
                row, candidate_ids, first, end, vocab_size, key, temperature, value, last, False, True, TILE
            )
    else:
        value, last = tl.full([], -float("inf"), tl.float32), tl.full([], 0, tl.int32)
        score, token, raw = _best_of(
            row, row, first, end, vocab_size, key, temperature, value, last, False, False, TILE
        )
    out = i * tl.num_programs(1) + tl.program_id(1)
    tl.store(scores + out, score)
    tl.store(tokens + out, token)
    tl.store(highest + out, raw)


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["rows"])
def _choose_best_kernel(
    scores,
    tokens,
    highest,
    chosen,
    last_tokens,
    rows,
    parts,
    MOST_PARTS: tl.constexpr,
    KEEP: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Row i: the token of the best of its parts, or NOT_FINITE or NONE_LEFT; with KEEP into its row of `last_tokens`, too."""
    dependent.start(LAUNCH)
    dependent.wait(LAUNCH)
    i = tl.program_id(0)
    part = tl.arange(0, MOST_PARTS)
    mask = part < parts
    source = i * parts + part
    score = tl.load(scores + source, mask=mask, other=-float("inf"))
    token = tl.load(tokens + source, mask=mask, other=NO_TOKEN)
    raw = tl.max(tl.load(highest + source, mask=mask, other=-float("inf")))
    best = tl.min(tl.where(score == tl.max(score), token, NO_TOKEN))
    none = tl.where(raw == -float("inf"), NONE_LEFT, NOT_FINITE)
    # A tiny temperature may have made -inf of the scores of a row whose logits are finite.
    has_token = (tl.abs(raw) < float("inf")) & (best != NO_TOKEN)
    token = tl.where(has_token, best, none).to(tl.int64)
    tl.store(chosen + i, token)
    if KEEP:
        tl.store(last_tokens + tl.load(rows + i), token)


def is_filtered(table: SamplingTable) -> bool:
    """Whether any row of a table may keep less than all tokens."""
    return table.filtering is None or bool(table.filtering)


def choose_tokens(
    logits: Tensor,
    table: SamplingTable,
    rows: Tensor,
    positions: Tensor,
    last_tokens: Tensor | None = None,
    launch: int = LAUNCH_PLAIN,
    start: Launch = launch_once,
) -> Tensor:
    """`Kernels.choose_tokens`; rows of logits may have gaps between them. Where no row of the table has filters, two launches do.

    Args:
        launch: plain or dependent (`dependent.py`).
        start: launches each kernel.
    """
    n, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    chosen = torch.empty(n, dtype=torch.int64, device=logits.device)
    if not n:
        return chosen
    filtered = is_filtered(table)
    limits = find_limits(logits, table, rows, launch, start) if filtered else [None] * len(Limits._fields)
    part_size = size_of_parts(n, vocab_size, num_multiprocessors(logits.device, interpreted=1))
    parts = triton.cdiv(vocab_size, part_size)
    scores = torch.empty(n, parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(n, parts, dtype=torch.int32, device=logits.device)
    highest = torch.empty_like(scores)
    sizes = vocab_size, row_stride(logits), part_size
    dependence = dependent.options(launch)
    start(
        _draw_kernel,
        (n, parts),
        (logits, table.temperature, table.seeds, rows, positions, *limits, scores, tokens, highest, *sizes),
        {"FILTERED": filtered, "LAUNCH": launch, "TILE": TILE, "num_warps": NUM_WARPS, **dependence},
    )
    start(
        _choose_best_kernel,
        (n,),
        (scores, tokens, highest, chosen, last_tokens, rows, parts),
        {"MOST_PARTS": MOST_PARTS, "KEEP": last_tokens is not None, "LAUNCH": launch, "num_warps": 1, **dependence},
    )
    return chosen
