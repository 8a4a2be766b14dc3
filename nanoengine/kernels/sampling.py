"""Choosing tokens in plain torch: the reference, and what CPUs run with a faster `draw`.

The order is fixed: temperature, top_k, top_p, min_p; then the Gumbel-max trick (Gumbel, 1954; Maddison et al., 2014), see
gumbel.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from nanoengine.kernels.filters import keep_likeliest
from nanoengine.kernels.gumbel import gumbel_noise, position_keys

LEAST_TEMPERATURE = 1e-5
"""Below it float32 would overflow; the likeliest token wins anyway."""

NOT_FINITE = -1
"""In place of a token where the highest logit of a row is NaN or infinite."""

NONE_LEFT = -2
"""In place of a token where all logits of a row are -inf."""

Draw = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits [n, vocab_size], keys [n], temperature [n]) -> [n]: the highest of logit / temperature + Gumbel noise, or of the logits
themselves where the temperature is 0; of equal ones the lowest id. NOT_FINITE and NONE_LEFT stand in place of tokens."""

LogSumExp = Callable[[Tensor], Tensor]
"""[n, count] -> [n]: what divides exp(logit) into a probability, as a logarithm."""


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
    log_sum_exp: LogSumExp,
    logits: Tensor,
    table: SamplingTable,
    rows: Tensor,
    positions: Tensor,
    last_tokens: Tensor | None = None,
) -> Tensor:
    """`Kernels.choose_tokens`, with a given `draw` for rows that no filter narrows, and a `log_sum_exp` for filters."""
    entries = rows.long()
    columns = (table.temperature, table.top_k, table.top_p, table.min_p)
    temperature, top_k, top_p, min_p = (column.index_select(0, entries) for column in columns)
    keys = position_keys(table.seeds.index_select(0, entries), positions.long())
    random = temperature > 0
    filtered = random & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    temperature = temperature.clamp(min=LEAST_TEMPERATURE)
    tokens = draw(logits, keys, temperature * (random ^ filtered))
    group = (filtered & (tokens >= 0)).nonzero()[:, 0]
    if len(group):
        scaled = logits[group] / temperature[group, None]
        kept, token_ids = keep_likeliest(scaled, top_k[group], top_p[group], min_p[group], log_sum_exp)
        noise = gumbel_noise(keys[group], token_ids)
        tokens[group] = token_ids.gather(-1, (kept + noise).argmax(-1, keepdim=True))[:, 0]
    if last_tokens is not None:
        last_tokens.index_copy_(0, entries, tokens)
    return tokens
