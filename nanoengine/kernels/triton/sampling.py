"""From logits to tokens without the host: temperature, filters, and the Gumbel-max trick (Gumbel, 1954; Maddison et al., 2014)
with the noise of kernels/gumbel.py.

Parts of the vocabulary are looked through at once for their best token, and the best of those is the row's. A row's token
depends neither on the other rows nor on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.engine import randomness
from nanoengine.kernels import sampling
from nanoengine.kernels.sampling import SamplingTable
from nanoengine.kernels.triton.filters import LEAST_TEMPERATURE, find_thresholds, load_logits
from nanoengine.kernels.triton.launch import Launch, num_multiprocessors

TILE = 1024
NUM_WARPS = 4

PROGRAMS_PER_SM = 4
"""Programs that the rows are split into, at least, for each multiprocessor."""

GOLDEN_GAMMA = tl.constexpr(randomness.GOLDEN_GAMMA)
MIX_1 = tl.constexpr(randomness.MIX_1)
MIX_2 = tl.constexpr(randomness.MIX_2)
NOT_FINITE = tl.constexpr(sampling.NOT_FINITE)
NONE_LEFT = tl.constexpr(sampling.NONE_LEFT)


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """`randomness.mix`; shifts of unsigned numbers bring in zeros."""
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def _gumbel_noise(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """`gumbel.gumbel_noise`."""
    bits = _mix(key + (token + 1).to(tl.uint64) * GOLDEN_GAMMA)
    uniform = tl.minimum(((bits >> 24).to(tl.int64).to(tl.float32) + 0.5) * 2.0**-40, 1 - 2.0**-24)
    # -log(1 - u) without the rounding of 1 - u (Kahan): log(1 - u) / u changes slowly.
    rest = 1.0 - uniform
    rounded = 1.0 - rest
    exact = tl.where(rounded == 0.0, uniform, -tl.log(rest) * (uniform / tl.where(rounded == 0.0, 1.0, rounded)))
    return -tl.log(exact)


@triton.jit
def _draw_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    lowest: tl.tensor,
    last_ids: tl.tensor,
    scores: tl.tensor,
    tokens: tl.tensor,
    highest: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    part_size: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Program (i, j): the best score of part j of row i, its token, and the highest logit."""
    i = tl.program_id(0)
    entry = tl.load(rows + i)
    temperature = tl.load(temperatures + entry)
    position = tl.load(positions + i)
    key = _mix(tl.load(seeds + entry).to(tl.uint64) + (position + 1).to(tl.uint64) * GOLDEN_GAMMA)
    value, last = tl.load(lowest + i), tl.load(last_ids + i)
    row = logits + i.to(tl.int64) * logits_stride

    best = tl.full([TILE], -float("inf"), tl.float32)
    best_token = tl.full([TILE], 2147483647, tl.int32)
    raw = best
    first = tl.program_id(1) * part_size
    for start in range(first, tl.minimum(first + part_size, vocab_size), TILE):
        token = start + tl.arange(0, TILE)
        x = load_logits(row, token, vocab_size)
        raw = tl.maximum(raw, x)
        kept = (x > value) | ((x == value) & (token <= last))
        if tl.max(kept.to(tl.int32)) > 0:
            score = x
            if temperature > 0:
                score = tl.div_rn(x, tl.maximum(temperature, LEAST_TEMPERATURE)) + _gumbel_noise(key, token)
            score = tl.where(kept, score, -float("inf"))
            best_token = tl.where(score > best, token, best_token)
            best = tl.maximum(best, score)

    score = tl.max(best)
    out = i * tl.num_programs(1) + tl.program_id(1)
    tl.store(scores + out, score)
    tl.store(tokens + out, tl.min(tl.where(best == score, best_token, 2147483647)))
    tl.store(highest + out, tl.max(raw))


@triton.jit
def _choose_best_kernel(
    scores: tl.tensor, tokens: tl.tensor, highest: tl.tensor, chosen: tl.tensor, parts: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Row i: the token of the best of its parts, or NOT_FINITE or NONE_LEFT."""
    i = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    mask = part < parts
    source = i * parts + part
    score = tl.load(scores + source, mask=mask, other=-float("inf"))
    token = tl.load(tokens + source, mask=mask, other=2147483647)
    raw = tl.max(tl.load(highest + source, mask=mask, other=-float("inf")))
    best = tl.min(tl.where(score == tl.max(score), token, 2147483647))
    none = tl.where(raw == -float("inf"), NONE_LEFT, NOT_FINITE)
    tl.store(chosen + i, tl.where(tl.abs(raw) < float("inf"), best, none).to(tl.int64))


def choose_tokens(logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor) -> Tensor:
    """`Kernels.choose_tokens`; rows of logits may have gaps between them."""
    n, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    chosen = torch.empty(n, dtype=torch.int64, device=logits.device)
    if not n:
        return chosen
    lowest, last_ids = find_thresholds(logits, table, rows)
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
        lowest,
        last_ids,
        scores,
        tokens,
        highest,
        vocab_size,
        logits.stride(0),
        part_size,
        TILE=TILE,
        num_warps=NUM_WARPS,
    )
    _choose_best_kernel[(n,)](scores, tokens, highest, chosen, parts, BLOCK=triton.next_power_of_2(parts), num_warps=1)
    return chosen


def size_of_parts(n: int, vocab_size: int, num_sms: int) -> int:
    """Tokens of a part of the vocabulary, such that n rows keep every multiprocessor busy."""
    tiles = triton.cdiv(vocab_size, TILE)
    parts = min(tiles, triton.cdiv(PROGRAMS_PER_SM * num_sms, n))
    return triton.cdiv(tiles, parts) * TILE


def launches() -> list[Launch]:
    """The configurations of the kernels."""
    parts = {"scores": "*fp32", "tokens": "*i32", "highest": "*fp32"}
    draw = {
        "logits": "*fp32",
        "temperatures": "*fp32",
        "seeds": "*i64",
        "rows": "*i32",
        "positions": "*i64",
        "lowest": "*fp32",
        "last_ids": "*i32",
        **parts,
        **dict.fromkeys(("vocab_size", "logits_stride", "part_size"), "i32"),
        "TILE": "constexpr",
    }
    choose = {**parts, "chosen": "*i64", "parts": "i32", "BLOCK": "constexpr"}
    return [
        Launch("draw", _draw_kernel, draw, {"TILE": TILE}, NUM_WARPS),
        *(
            Launch(f"choose_best, {block} parts", _choose_best_kernel, choose, {"BLOCK": block}, 1)
            for block in (1, 32, 256)
        ),
    ]
