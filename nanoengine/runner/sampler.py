"""Sampler: logits to tokens, each row by its own SamplingParams.

The order is fixed: tokens banned by min_tokens, temperature, top_k, top_p, min_p; then the Gumbel-max trick (Gumbel, 1954;
Maddison et al., 2014), see kernels/gumbel.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.engine.messages import SampledBatch, SamplingRow
from nanoengine.engine.randomness import position_key
from nanoengine.errors import NotFiniteLogits
from nanoengine.kernels.gumbel import gumbel_noise, key_tensor
from nanoengine.kernels.interface import Kernels
from nanoengine.outputs import TokenLogprob, TokenLogprobs
from nanoengine.runner.filters import keep_likeliest

BLOCK = 128
"""Tokens in a block of `likeliest`."""


class Sampler:
    """Chooses one token per row. It keeps no state but the kernels it uses."""

    def __init__(self, kernels: Kernels):
        self.kernels = kernels

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

        highest, tokens = likeliest(logits)
        if not torch.isfinite(highest).all():
            bad = [i for i, value in enumerate(highest.tolist()) if value != value or abs(value) == float("inf")]
            raise NotFiniteLogits(
                f"{len(bad)} of {len(rows)} rows have no finite highest logit: broken weights, or a dtype too narrow for them"
            )
        random = [i for i, row in enumerate(rows) if not row.params.greedy]
        if random:
            index = torch.tensor(random, device=logits.device)
            keys = [position_key(rows[i].seed, positions[i]) for i in random]
            tokens[index] = draw(logits[index], [rows[i] for i in random], keys, self.kernels)
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


def draw(logits: Tensor, rows: list[SamplingRow], keys: list[int], kernels: Kernels) -> Tensor:
    """Draw one token per row from softmax(logits / temperature), filtered. logits is [num_rows, vocab_size]."""
    temperature = _column([row.params.temperature for row in rows], logits)
    scaled = logits / temperature.clamp(min=1e-5)  # below that, float32 would overflow; the likeliest token wins anyway
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    filtered = [i for i, row in enumerate(rows) if row.params.top_k > 0 or row.params.top_p < 1 or row.params.min_p > 0]
    if filtered:
        index = torch.tensor(filtered, device=logits.device)
        kept, token_ids = keep_likeliest(scaled[index], [rows[i] for i in filtered])
        noise = gumbel_noise(key_tensor([keys[i] for i in filtered], logits.device), token_ids)
        tokens[index] = token_ids.gather(-1, (kept + noise).argmax(-1, keepdim=True))[:, 0]
    plain = sorted(set(range(len(rows))) - set(filtered))
    if plain:
        index = torch.tensor(plain, device=logits.device)
        tokens[index] = kernels.draw_tokens(scaled[index], key_tensor([keys[i] for i in plain], logits.device))
    return tokens


def _column(values: list[float] | list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
