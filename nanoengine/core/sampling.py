"""Choosing tokens in torch: temperature, then min_p, top_k and top_p, then a draw by the Gumbel-max trick.

Adding Gumbel noise to logits and taking the maximum draws from their softmax (Gumbel, 1954; Maddison et al., 2014). The noise of
a token is a hash of (key, token id), and the key a hash of (seed, position): a draw does not depend on the rest of its batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.core.messages import NONE_LEFT, UNKNOWN
from nanoengine.core.randomness import GOLDEN_GAMMA, MIX_1, MIX_2

LEAST_TEMPERATURE = 1e-5
"""With less, float32 would overflow; the likeliest token wins anyway."""

FilteredLogits = tuple[Tensor | slice, Tensor, Tensor]  # [m] rows; [m, count] logits and token ids, likeliest first


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """How the tokens of each row are chosen, on the device."""

    temperature: Tensor  # [num_rows] float32; 0 takes the likeliest token, the lowest id of equal ones
    top_k: Tensor  # [num_rows] int32: number of the likeliest tokens to keep; 0 or less keeps all
    top_p: Tensor  # [num_rows] float32: keep the likeliest of the remaining tokens, up to this probability; 1 keeps all
    min_p: Tensor  # [num_rows] float32: keep tokens at least this times as likely as the likeliest; 0 keeps all
    seeds: Tensor  # [num_rows] int64, the 64 bits of each seed
    filtering: set[int] | None = None  # on the host: rows whose filters may drop tokens; None: unknown


def draw_tokens(logits: Tensor, keys: Tensor, temperature: Tensor) -> Tensor:
    """The token with the highest logit / temperature + Gumbel noise, or logit where the temperature is 0; of equal ones the
    lowest id: [n, vocab_size], keys [n], [n] -> [n]. The result is UNKNOWN where the highest is NaN or infinite, and
    NONE_LEFT where all are -inf."""
    token_ids = torch.arange(logits.shape[-1], dtype=torch.int64, device=logits.device)[None]
    tokens = logits.argmax(-1)
    highest = logits.gather(-1, tokens[:, None])[:, 0]
    for row in (temperature > 0).nonzero()[:, 0]:  # one after the other: its noise stays in the cache
        tokens[row] = (logits[row] / temperature[row] + gumbel_noise(keys[row][None], token_ids)[0]).argmax()
    tokens.masked_fill_(highest.isfinite().logical_not_(), UNKNOWN)
    return tokens.masked_fill_(highest == -torch.inf, NONE_LEFT)


def filter_tokens(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Iterator[FilteredLogits]:
    """Logits after the filters of each row: here of all rows at once, [num_rows, vocab_size].

    Logits of dropped tokens are -inf. The likeliest token is never dropped; of equal ones, the lower id comes first.
    """
    values, token_ids = drop_unlikely(logits, min_p).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], dtype=torch.int64, device=logits.device)
    values = values.masked_fill((rank >= top_k[:, None]) & (top_k > 0)[:, None], -torch.inf)
    yield slice(None), keep_probable(values, values.logsumexp(-1), top_p), token_ids


def drop_unlikely(logits: Tensor, min_p: Tensor) -> Tensor:
    """Logits with -inf for tokens that min_p drops; [num_rows, count], the likeliest among them."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + min_p.log()[:, None], -torch.inf)


def keep_probable(values: Tensor, log_total: Tensor, top_p: Tensor) -> Tensor:
    """Logits with -inf for tokens that top_p drops. `values` is [num_rows, count], likeliest first.

    Args:
        log_total: [num_rows], ln of the sum of exp(logit) over all tokens after min_p and top_k.
    """
    probabilities = (values - log_total[:, None]).exp()
    before = probabilities.cumsum(-1) - probabilities  # of the likelier tokens: the token that crosses top_p remains
    dropped = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    dropped[:, 0] = False
    return values.masked_fill(dropped, -torch.inf)


def position_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """The 64-bit key of the token at each position of a sequence: [n] int64 seeds and positions -> [n] keys."""
    return _mix(seeds + (positions + 1) * signed(GOLDEN_GAMMA))


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise for the token ids of each key: [num_keys or 1, count] -> [num_keys, count]. It depends on key and id only.

    The uniform numbers behind it are exact near 0, where the winners are made: u has 40 bits, and -log(1 - u) is computed
    without rounding u away.
    """
    bits = _mix(keys[:, None] + (token_ids + 1) * signed(GOLDEN_GAMMA))
    uniform = ((_shift_right(bits, 24).float() + 0.5) * 2.0**-40).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _mix(x: Tensor) -> Tensor:
    """`randomness.mix` for int64 tensors, whose products wrap around."""
    x = (x ^ _shift_right(x, 30)) * signed(MIX_1)
    x = (x ^ _shift_right(x, 27)) * signed(MIX_2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts the sign in; the mask takes it out


def signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
