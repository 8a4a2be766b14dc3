"""Sampler: logits to tokens, each row by its own SamplingParams.

The order is fixed: tokens banned by min_tokens, temperature, top_k, top_p, min_p; then the Gumbel-max trick (Gumbel, 1954;
Maddison et al., 2014): adding Gumbel noise to logits and taking the maximum draws from their softmax. The noise of a token is
a hash of (seed, position, token id), so that a draw does not depend on the batch it is made in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.engine.messages import SampledBatch, SamplingRow
from nanoengine.engine.randomness import GOLDEN_GAMMA, MIX_1, MIX_2, position_key
from nanoengine.errors import NotFiniteLogits
from nanoengine.outputs import TokenLogprob, TokenLogprobs


class Sampler:
    """Chooses one token per row. It keeps no state."""

    def sample(self, logits: Tensor, rows: list[SamplingRow], positions: list[int]) -> SampledBatch:
        """Sample every row.

        Args:
            logits: [num_rows, vocab_size] float32; overwritten.
            rows: how each is sampled.
            positions: where in its sequence each sampled token will stand.

        Raises:
            NotFiniteLogits: a row has NaN or infinite logits.
        """
        raw = logits.clone() if any(row.params.num_logprobs is not None for row in rows) else logits
        for i, row in enumerate(rows):
            if row.banned_token_ids:
                logits[i, list(row.banned_token_ids)] = -torch.inf

        highest, tokens = logits.max(dim=-1)  # NaN counts as the highest
        if not torch.isfinite(highest).all():
            bad = [i for i, value in enumerate(highest.tolist()) if value != value or abs(value) == float("inf")]
            raise NotFiniteLogits(
                f"{len(bad)} of {len(rows)} rows have no finite highest logit: broken weights, or a dtype too narrow for them"
            )
        random = [i for i, row in enumerate(rows) if not row.params.greedy]
        if random:
            index = torch.tensor(random, device=logits.device)
            keys = [position_key(rows[i].seed, positions[i]) for i in random]
            tokens[index] = draw(logits[index], [rows[i] for i in random], keys)
        token_ids = tokens.tolist()
        return SampledBatch(token_ids, self._logprobs(raw, rows, token_ids))

    def _logprobs(
        self, raw: Tensor, rows: list[SamplingRow], token_ids: list[int]
    ) -> list[TokenLogprobs | None] | None:
        """Log probabilities in the model's own distribution, for the rows that ask for them."""
        if all(row.params.num_logprobs is None for row in rows):
            return None
        result: list[TokenLogprobs | None] = [None] * len(rows)
        for i, row in enumerate(rows):
            if row.params.num_logprobs is None:
                continue
            logprobs = raw[i].log_softmax(dim=-1)
            chosen = logprobs[token_ids[i]]
            rank = int((logprobs > chosen).sum()) + 1
            top, ids = logprobs.topk(min(row.params.num_logprobs, len(logprobs)))
            entries = {token_ids[i]: TokenLogprob(float(chosen), rank)}
            for place, (token, logprob) in enumerate(zip(ids.tolist(), top.tolist(), strict=True), start=1):
                entries.setdefault(token, TokenLogprob(logprob, place))
            result[i] = entries
        return result


def draw(logits: Tensor, rows: list[SamplingRow], keys: list[int]) -> Tensor:
    """Draw one token per row from softmax(logits / temperature), filtered. logits is [num_rows, vocab_size]."""
    temperature = _column([row.params.temperature for row in rows], logits)
    scaled = logits / temperature.clamp(min=1e-5)  # below that, float32 would overflow; the likeliest token wins anyway
    noise = gumbel_noise(keys, scaled.shape[-1], scaled.device)
    filtered = [i for i, row in enumerate(rows) if row.params.top_k > 0 or row.params.top_p < 1 or row.params.min_p > 0]
    if filtered:
        index = torch.tensor(filtered, device=logits.device)
        scaled[index] = filter_logits(scaled[index], [rows[i] for i in filtered])
    return (scaled + noise).argmax(dim=-1)


def filter_logits(logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Logits with all but the tokens that top_k, top_p and min_p keep at -inf. The likeliest token is always kept."""
    vocab_size = logits.shape[-1]
    ordered, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab_size, device=logits.device)
    top_k = _column([row.params.top_k if row.params.top_k > 0 else vocab_size for row in rows], logits)
    ordered.masked_fill_(rank >= top_k, -torch.inf)

    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # of the likelier tokens: the one that crosses top_p is kept
    top_p = _column([row.params.top_p for row in rows], logits)
    min_p = _column([row.params.min_p for row in rows], logits)
    dropped = ((before >= top_p) & (top_p < 1)) | (probabilities < min_p * probabilities[:, :1])
    dropped[:, 0] = False
    ordered.masked_fill_(dropped, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, token_ids, ordered)


def gumbel_noise(keys: list[int], vocab_size: int, device: torch.device) -> Tensor:
    """[num_keys, vocab_size] Gumbel noise; an entry depends on its key and its token id only.

    The uniform numbers behind it are exact near 0, where the winners are made: u has 40 bits, and -log(1 - u) is computed
    without rounding u away.
    """
    key = torch.tensor([_signed(key) for key in keys], device=device)[:, None]
    bits = _mix(key + torch.arange(1, vocab_size + 1, device=device) * _signed(GOLDEN_GAMMA))
    uniform = ((_shift_right(bits, 24).float() + 0.5) * 2.0**-40).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _mix(x: Tensor) -> Tensor:
    """`randomness.mix` for int64 tensors, whose products wrap around."""
    x = (x ^ _shift_right(x, 30)) * _signed(MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(MIX_2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts the sign in; the mask takes it out


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _column(values: list[float] | list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
