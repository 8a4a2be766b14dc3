"""Noise for the Gumbel-max trick: adding it to logits and taking the maximum draws from their softmax.

The noise of a token is a hash of (key, token id), and the key one of (seed, position): a draw does not depend on the batch that
it is made in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.engine.randomness import GOLDEN_GAMMA, MIX_1, MIX_2


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
