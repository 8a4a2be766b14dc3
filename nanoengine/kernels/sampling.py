"""Choosing tokens in plain torch: the reference, and what CPUs run with a faster `draw`.

The order is fixed: temperature, top_k, top_p, min_p; then the Gumbel-max trick (Gumbel, 1954; Maddison et al., 2014), see
gumbel.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.kernels.filters import keep_likeliest
from nanoengine.kernels.gumbel import gumbel_noise, position_keys

BLOCK = 128
"""Tokens in a block of `likeliest`."""

LEAST_TEMPERATURE = 1e-5
"""Below it float32 would overflow; the likeliest token wins anyway."""

NOT_FINITE = -1
"""In place of a token where the highest logit of a row is NaN or infinite."""

NONE_LEFT = -2
"""In place of a token where all logits of a row are -inf."""

Draw = Callable[[Tensor, Tensor], Tensor]
"""(logits [n, vocab_size], keys [n]) -> [n]: the highest of logit + Gumbel noise."""


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """How the tokens of each row are chosen, on the device."""

    temperature: Tensor  # [num_rows] float32; 0 takes the likeliest token, the lowest id of equal ones
    top_k: Tensor  # [num_rows] int32: so many are kept; all if it is 0 or less
    top_p: Tensor  # [num_rows] float32: of what top_k leaves, the likeliest with that probability, and the one that reaches it
    min_p: Tensor  # [num_rows] float32: as likely as the likeliest times this; 0 keeps all
    seeds: Tensor  # [num_rows] int64, the 64 bits of each seed


def choose_tokens(
    draw: Draw,
    logits: Tensor,
    table: SamplingTable,
    rows: Tensor,
    positions: Tensor,
    last_tokens: Tensor | None = None,
) -> Tensor:
    """`Kernels.choose_tokens`, with a given `draw` for rows that no filter narrows."""
    highest, tokens = likeliest(logits)
    entries = rows.long()
    columns = (table.temperature, table.top_k, table.top_p, table.min_p)
    temperature, top_k, top_p, min_p = (column.index_select(0, entries) for column in columns)
    random = temperature > 0
    filtered = random & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    plain = random ^ filtered
    keys = position_keys(table.seeds.index_select(0, entries), positions.long())
    if plain.all():  # no row has to be picked out
        tokens = draw(logits / temperature.clamp(min=LEAST_TEMPERATURE)[:, None], keys)
    elif random.any():
        for group in (index.nonzero()[:, 0] for index in (filtered, plain) if index.any()):
            scaled = logits[group] / temperature[group].clamp(min=LEAST_TEMPERATURE)[:, None]
            if plain[group[0]]:
                tokens[group] = draw(scaled, keys[group])
                continue
            kept, token_ids = keep_likeliest(scaled, top_k[group], top_p[group], min_p[group])
            noise = gumbel_noise(keys[group], token_ids)
            tokens[group] = token_ids.gather(-1, (kept + noise).argmax(-1, keepdim=True))[:, 0]
    tokens.masked_fill_(highest.isfinite().logical_not_(), NOT_FINITE)
    tokens.masked_fill_(highest == -torch.inf, NONE_LEFT)
    if last_tokens is not None:
        last_tokens.index_copy_(0, entries, tokens)
    return tokens


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Highest logit of each row, and its token id; NaN counts as the highest, of equal ones the lowest id wins.

    First the block of tokens that holds it, then its place in that: finding a maximum is many times faster than finding where
    it is.
    """
    vocab_size = logits.shape[-1]
    if vocab_size <= BLOCK:
        return logits.max(dim=-1)
    starts = torch.arange(0, vocab_size, BLOCK, device=logits.device)
    starts[-1] = vocab_size - BLOCK  # the last block overlaps the one before
    whole = logits[:, : vocab_size - vocab_size % BLOCK].unflatten(-1, (-1, BLOCK)).amax(-1)
    if vocab_size % BLOCK:
        whole = torch.cat((whole, logits[:, -BLOCK:].amax(-1, keepdim=True)), dim=-1)
    start = starts[whole.argmax(-1)]
    block = logits.gather(-1, start[:, None] + torch.arange(BLOCK, device=logits.device))
    highest, place = block.max(dim=-1)
    return highest, start + place
