"""From logits to tokens without the host: temperature, filters, and the Gumbel-max trick (Gumbel, 1954; Maddison et al., 2014)
with the noise of core/sampling.py.

Parts of the vocabulary, or of the few candidates that filters leave, are looked through at once for their best token, and the
best of those is the row's. A row's token depends neither on the other rows nor on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.core import messages, randomness
from nanoengine.core.sampling import SamplingTable
from nanoengine.kernels.triton.candidates import (
    LEAST_TEMPERATURE,
    MOST_PARTS,
    NUM_WARPS,
    TILE,
    load_logits,
    row_stride,
    size_of_parts,
)
from nanoengine.kernels.triton.filters import find_limits
from nanoengine.kernels.triton.launch import num_multiprocessors

GOLDEN_GAMMA = tl.constexpr(randomness.GOLDEN_GAMMA)
MIX_1 = tl.constexpr(randomness.MIX_1)
MIX_2 = tl.constexpr(randomness.MIX_2)
NOT_FINITE = tl.constexpr(messages.UNKNOWN)
NONE_LEFT = tl.constexpr(messages.NONE_LEFT)

NO_TOKEN = tl.constexpr(2**31 - 1)
"""Above all ids."""

MOST_NOISE = tl.constexpr(28.5)
"""Above all Gumbel noise: the least uniform number is 2^-41, and -log(-log(1 - 2^-41)) = 28.42; the rest is for rounding."""


@triton.jit
def _mix(x):
    """`randomness.mix`; shifts of unsigned numbers bring in zeros."""
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def _gumbel_noise(key, token):
    """`gumbel_noise`."""
    return _noise_of(_mix(key + (token + 1).to(tl.uint64) * GOLDEN_GAMMA))


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
def _best_of(logits, ids, first, end, size, key, temperature, value, last, HAS_IDS: tl.constexpr, TILE: tl.constexpr):
    """The best score at the places from `first` to `end`, its token, and the highest logit. A place is the id if there are none.

    Scores do not fall where logits rise: a tile is passed over if the most noise would leave its highest logit below the best.
    """
    divisor = tl.where(temperature > 0, tl.maximum(temperature, LEAST_TEMPERATURE), 1.0)
    most_noise = tl.where(temperature > 0, MOST_NOISE, 0.0)
    best = tl.full([TILE], -float("inf"), tl.float32)
    best_token = tl.full([TILE], NO_TOKEN, tl.int32)
    highest, top = best, tl.full([], -float("inf"), tl.float32)
    for start in range(first, end, TILE):
        place = start + tl.arange(0, TILE)
        token = tl.load(ids + place, mask=place < size, other=NO_TOKEN) if HAS_IDS else place
        x = load_logits(logits, place, size)
        highest = tl.maximum(highest, x)
        x = tl.where((x > value) | ((x == value) & (token <= last)), x, -float("inf"))
        peak = tl.max(x)
        if (peak > -float("inf")) & (tl.div_rn(peak, divisor) + most_noise >= top):
            score = tl.div_rn(x, divisor)
            if temperature > 0:
                score += _gumbel_noise(key, token)
            best_token = tl.where(score > best, token, best_token)
            best = tl.maximum(best, score)
            top = tl.max(best)
    return top, tl.min(tl.where(best == top, best_token, NO_TOKEN)), tl.max(highest)


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
    candidates_stride,
    part_size,
    TILE: tl.constexpr,
):
    """Program (i, j): the best score of part j of row i, or of its candidates; its token, and the highest logit."""
    i = tl.program_id(0)
    entry = tl.load(rows + i)
    temperature = tl.load(temperatures + entry)
    position = tl.load(positions + i)
    key = _mix(tl.load(seeds + entry).to(tl.uint64) + (position + 1).to(tl.uint64) * GOLDEN_GAMMA)
    value, last, count = tl.load(lowest + i), tl.load(last_ids + i), tl.load(counts + i)
    first = tl.program_id(1) * part_size
    if count > 0:
        end = tl.minimum(first + part_size, count)  # nothing is in the later parts
        listed = i.to(tl.int64) * candidates_stride
        score, token, raw = _best_of(
            candidates + listed, candidate_ids + listed, first, end, count, key, temperature, value, last, True, TILE
        )
    else:
        row = logits + i.to(tl.int64) * logits_stride
        end = tl.minimum(first + part_size, vocab_size)
        score, token, raw = _best_of(
            row, candidate_ids, first, end, vocab_size, key, temperature, value, last, False, TILE
        )
    out = i * tl.num_programs(1) + tl.program_id(1)
    tl.store(scores + out, score)
    tl.store(tokens + out, token)
    tl.store(highest + out, raw)


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["rows"])
def _choose_best_kernel(
    scores, tokens, highest, chosen, last_tokens, rows, parts, MOST_PARTS: tl.constexpr, KEEP: tl.constexpr
):
    """Row i: the token of the best of its parts, or NOT_FINITE or NONE_LEFT; with KEEP into its row of `last_tokens`, too."""
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
    found = (tl.abs(raw) < float("inf")) & (best != NO_TOKEN)
    token = tl.where(found, best, none).to(tl.int64)
    tl.store(chosen + i, token)
    if KEEP:
        tl.store(last_tokens + tl.load(rows + i), token)


def choose_tokens(
    logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor, last_tokens: Tensor | None = None
) -> Tensor:
    """`Kernels.choose_tokens`; rows of logits may have gaps between them."""
    n, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    chosen = torch.empty(n, dtype=torch.int64, device=logits.device)
    if not n:
        return chosen
    limits = find_limits(logits, table, rows)
    part_size = size_of_parts(n, vocab_size, num_multiprocessors(logits.device, interpreted=1))
    parts = triton.cdiv(vocab_size, part_size)
    scores = torch.empty(n, parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(n, parts, dtype=torch.int32, device=logits.device)
    highest = torch.empty_like(scores)
    _draw_kernel[(n, parts)](
        logits,
        table.temperature,
        table.seeds,
        rows,
        positions,
        *limits,
        scores,
        tokens,
        highest,
        vocab_size,
        row_stride(logits),
        limits.candidates.shape[1],
        part_size,
        TILE=TILE,
        num_warps=NUM_WARPS,
    )
    keep = last_tokens is not None
    sources = scores, tokens, highest
    _choose_best_kernel[(n,)](*sources, chosen, last_tokens, rows, parts, MOST_PARTS=MOST_PARTS, KEEP=keep, num_warps=1)
    return chosen
