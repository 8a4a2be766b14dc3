"""Rows of logits, how they are sampled, and which tokens kernels must choose: the contract of `choose_tokens`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.core.kernels import CoreKernels
from nanoengine.core.messages import NONE_LEFT, UNKNOWN
from nanoengine.core.randomness import sequence_seed
from nanoengine.core.sampling import LEAST_TEMPERATURE, SamplingTable, gumbel_noise, position_keys, signed
from tests.kernels.formulas import DEVICE

VOCAB_SIZES = [2, 3, 17, 1000, 4096, 4097, 5003, 9001]
"""Around a tile of Triton's kernels, which has 4096 tokens."""

GREEDY = {"temperature": 0.0}


class Rows:
    """How rows are sampled, as `SamplingParams` and as tables on the device, where their entries are shuffled."""

    def __init__(self, params: Sequence[dict[str, float]], seed: int = 0, device: torch.device = DEVICE):
        rng = random.Random(seed)
        self.device = device
        self.params = [SamplingParams(**p) for p in params]  # type: ignore[arg-type]
        self.seeds = [sequence_seed(seed, i) for i in range(len(params))]
        self.positions = [rng.randint(0, 40_000) for _ in params]
        self.entries = rng.sample(range(len(params) + 3), len(params))

    def table(self) -> SamplingTable:
        return SamplingTable(
            self._table([p.temperature for p in self.params], torch.float32),
            self._table([p.top_k for p in self.params], torch.int32),
            self._table([p.top_p for p in self.params], torch.float32),
            self._table([p.min_p for p in self.params], torch.float32),
            self._table([signed(seed) for seed in self.seeds], torch.int64),
        )

    def choose(self, kernels: CoreKernels, logits: Tensor) -> list[int]:
        """Tokens, which are written into the rows' last tokens, too; the logits stay as they are."""
        table, entries, positions = self.arguments()
        before, last_tokens = logits.clone(), torch.full((len(table.top_k),), 77, device=self.device)
        tokens = kernels.choose_tokens(logits, table, entries, positions, last_tokens)
        assert tokens.dtype == torch.int64
        torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(last_tokens, torch.full_like(last_tokens, 77).index_copy_(0, entries.long(), tokens))
        return tokens.tolist()

    def part(self, first: int, end: int) -> Rows:
        """Some of the rows, at the same places of a table."""
        part = copy(self)
        for name in ("params", "seeds", "positions", "entries"):
            setattr(part, name, getattr(self, name)[first:end])
        return part

    def scores(self, logits: Tensor) -> Tensor:
        """[num_rows, vocab_size]: logits by their temperatures, with the noise of the rows' keys."""
        seeds = torch.tensor([signed(seed) for seed in self.seeds], device=self.device)
        keys = position_keys(seeds, torch.tensor(self.positions, device=self.device))
        temperatures = torch.tensor([max(own.temperature, LEAST_TEMPERATURE) for own in self.params])
        noise = gumbel_noise(keys, torch.arange(logits.shape[1], device=self.device)[None])
        return logits / temperatures[:, None].to(self.device) + noise

    def arguments(self) -> tuple[SamplingTable, Tensor, Tensor]:
        return self.table(), self.rows(), torch.tensor(self.positions, dtype=torch.int64, device=self.device)

    def rows(self) -> Tensor:
        return torch.tensor(self.entries, dtype=torch.int32, device=self.device)

    def _table(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        table = torch.full((max(self.entries, default=0) + 3,), 99, dtype=dtype)
        table[self.entries] = torch.tensor(values, dtype=dtype)
        return table.to(self.device)


def random_logits(kind: str, n: int, vocab_size: int, seed: int, device: torch.device = DEVICE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, vocab_size, generator=generator)
    if kind == "flat":
        logits = torch.full_like(logits, 1.25)
    elif kind == "ties":
        logits = (logits * 2).round()
    elif kind == "peaked":
        logits[:, seed % vocab_size] += 30
    elif kind == "wide":
        logits = logits.sign() * (logits * 20).clamp(max=80).exp()  # a row whose highest logit is infinite keeps all
    elif kind == "banned":
        logits[torch.rand(n, vocab_size, generator=generator) < 0.5] = -torch.inf
        logits[:, seed % vocab_size] = 0.5
    elif kind == "huge":  # the noise is lost in them
        logits = torch.zeros_like(logits).index_fill_(1, torch.randint(vocab_size, (3,), generator=generator), 1e30)
    return logits.to(device)


def random_params(rng: random.Random, vocab_size: int) -> dict[str, float]:
    return {
        "temperature": rng.choice([0.0, 1.0, rng.uniform(0.01, 5.0), 1e-20]),
        "top_k": rng.choice([0, -1, 1, 2, 20, rng.randint(1, vocab_size), vocab_size, vocab_size + 3]),
        "top_p": rng.choice([1.0, 1e-6, rng.uniform(0.01, 0.999), 0.999_99]),
        "min_p": rng.choice([0.0, 0.0, rng.uniform(0.001, 0.9), 1.0]),
    }


KINDS = ["random", "flat", "ties", "peaked", "wide", "banned"]


def kept_exactly(row: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Which tokens are kept, by a stable sort in float64; and which are so near a limit that rounding decides."""
    x, order = row.double().sort(descending=True, stable=True)
    most = params.top_k if params.top_k > 0 else len(x)
    weights = ((x - x[0]) / max(params.temperature, LEAST_TEMPERATURE)).exp()
    close = (weights - params.min_p).abs() <= 1e-4 * params.min_p
    kept = (torch.arange(len(x), device=x.device) < most) & (weights >= params.min_p)
    unsure = (weights * close).sum()  # so near the limit of min_p that rounding decides whether it counts
    weights[~kept] = 0.0
    before = (weights.cumsum(0) - weights) / weights.sum()
    if params.top_p < 1:
        kept &= before < params.top_p
        close |= (before - params.top_p).abs() <= 2e-5 + unsure / weights.sum()
    kept[0] = True
    back = order.argsort()
    return kept[back], close[back]


def check_tokens(kernels: CoreKernels, rows: Rows, logits: Tensor) -> None:
    """Of each row the lowest id of the highest score among what its filters keep, and the same beside others as alone."""
    tokens, scores = rows.choose(kernels, logits), rows.scores(logits)
    middle = len(tokens) // 2
    assert rows.part(middle, middle + 1).choose(kernels, logits[middle : middle + 1]) == tokens[middle : middle + 1]
    for row, of_row, params, token in zip(logits, scores, rows.params, tokens, strict=True):
        if not row.max() < torch.inf:
            assert token == UNKNOWN
        elif row.max() == -torch.inf:
            assert token == NONE_LEFT
        elif params.temperature == 0:
            assert token == int((row == row.max()).nonzero()[0])
        elif of_row.max() == torch.inf:  # a logit by a tiny temperature is none
            assert token == UNKNOWN or of_row[token] == torch.inf
        else:
            kept, close = kept_exactly(row, params)
            assert kept[token] or close[token], params
            others = of_row.masked_fill(~kept | close, -torch.inf)
            most = others.max()
            assert of_row[token] >= most - 4e-6 * most.abs().clamp(min=1), params
            assert not (others[:token] == of_row[token]).any(), params
