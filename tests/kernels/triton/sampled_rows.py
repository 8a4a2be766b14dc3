"""Rows of logits and how they are sampled, for tests of the kernels that choose tokens on the device."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.core.randomness import sequence_seed
from nanoengine.core.sampling import LEAST_TEMPERATURE, SamplingTable
from nanoengine.kernels.reference.operations import TorchKernels
from nanoengine.kernels.triton.draws.candidates import TILE
from nanoengine.kernels.triton.draws.filters import Limits, find_limits
from nanoengine.kernels.triton.draws.sampling import choose_tokens
from tests.kernels.formulas import DEVICE

REFERENCE = TorchKernels()
VOCAB_SIZES = [2, 3, 17, 1000, TILE, TILE + 1, 5003, 9001]
GREEDY = {"temperature": 0.0}


def signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


class Rows:
    """How rows are sampled, as `SamplingParams` and as tables on the device, where their entries are shuffled."""

    def __init__(self, params: Sequence[dict[str, float]], seed: int = 0):
        rng = random.Random(seed)
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

    def choose(self, logits: Tensor) -> list[int]:
        return choose_tokens(logits, *self._arguments()).tolist()

    def expected(self, logits: Tensor) -> list[int]:
        """What the kernels in torch choose."""
        return REFERENCE.choose_tokens(logits.clone(), *self._arguments()).tolist()

    def limits(self, logits: Tensor) -> Limits:
        return find_limits(logits, self.table(), self._rows())

    def kept(self, logits: Tensor) -> Tensor:
        """Whether the thresholds keep each token."""
        lowest, last_ids, *_ = self.limits(logits)
        ids = torch.arange(logits.shape[1], device=DEVICE)
        return (logits > lowest[:, None]) | ((logits == lowest[:, None]) & (ids <= last_ids[:, None]))

    def _arguments(self) -> tuple[SamplingTable, Tensor, Tensor]:
        return self.table(), self._rows(), torch.tensor(self.positions, dtype=torch.int64, device=DEVICE)

    def _rows(self) -> Tensor:
        return torch.tensor(self.entries, dtype=torch.int32, device=DEVICE)

    def _table(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        table = torch.full((len(values) + 3,), 99, dtype=dtype)
        table[self.entries] = torch.tensor(values, dtype=dtype)
        return table.to(DEVICE)


def random_logits(kind: str, n: int, vocab_size: int, seed: int) -> Tensor:
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
    return logits.to(DEVICE)


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
    weights[most:] = 0.0
    before = (weights.cumsum(0) - weights) / weights.sum()
    kept = (torch.arange(len(x), device=x.device) < most) & (weights >= params.min_p)
    close = (weights - params.min_p).abs() <= 1e-4 * params.min_p
    if params.top_p < 1:
        kept &= before < params.top_p
        close |= (before - params.top_p).abs() <= 2e-5
    kept[0] = True
    back = order.argsort()
    return kept[back], close[back]
