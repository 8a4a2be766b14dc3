"""Rows to sample from, and what the processors make of logits, worked out slowly from all of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.device import Device
from nanoengine.core.kernels import CoreKernels, SamplingTable
from nanoengine.core.messages import RowSampling, Run, Started, StepPlan, StepResult
from nanoengine.core.randomness import sequence_seed
from nanoengine.core.sampler import Sampler
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.features.sampling.runner_part import SamplingPart
from nanoengine.features.sampling.token_logprobs import TokenLogprobs
from nanoengine.features.speculation.verification import DraftVerifier

NUM_PROMPT_TOKENS = 3
GARBAGE = -12345
CPU = torch.device("cpu")


class TestDevice(Device):
    """Host memory begins as garbage; sends are counted."""

    __test__ = False
    num_sent = 0

    def __init__(self) -> None:
        super().__init__(CPU)

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        self.num_sent += 1
        return torch.full((size,), GARBAGE if dtype.is_signed else 0xAB, dtype=dtype)


class WatchedKernels(CoreKernels):
    """Keep the logits that tokens were chosen from."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def choose_tokens(
        self, logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor, last_tokens: Tensor | None = None
    ) -> Tensor:
        self.seen.append(logits.clone())
        return super().choose_tokens(logits, table, rows, positions, last_tokens)


def sampling(
    *,
    seed: int = 1,
    prompt: int = NUM_PROMPT_TOKENS,
    stops: tuple[int, ...] = (),
    **params: Any,
) -> RowSampling:
    return RowSampling(SamplingParams(**params), sequence_seed(seed, 0), prompt, stops)


def begin(row: int, own: RowSampling, token_ids: Sequence[int] | None = None) -> Started:
    return Started(row, list([0] * own.num_prompt_tokens if token_ids is None else token_ids), [[]], own)


def reference(
    logits: Sequence[float], own: RowSampling, token_ids: Sequence[int], mask: set[int] | None = None
) -> list[float]:
    """The logits that the next token is drawn from, before temperature and filters; `token_ids` are all so far."""
    params, output = own.params, list(token_ids[own.num_prompt_tokens :])
    assert isinstance(params, SamplingParams)
    result = []
    for token, logit in enumerate(logits):
        x = logit
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x += -np.inf
        if mask is not None and token not in mask:
            x += -np.inf
        if len(output) < params.min_tokens and token in own.stop_token_ids:
            x += -np.inf
        x += dict(params.logit_bias).get(token, 0.0)
        if token in token_ids:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * output.count(token)
        x -= params.presence_penalty * (token in output)
        result.append(x)
    return result


def sampler_with_part(
    num_rows: int, vocab_size: int, kernels: CoreKernels, device: Device, **runner: Any
) -> tuple[Sampler, SamplingPart]:
    """A sampler with all processors and a verifier; `runner`: what else its part needs of a runner."""
    sampler = Sampler(num_rows, vocab_size, kernels, device)
    sampler.verifier = DraftVerifier(device)
    rows = SimpleNamespace(padding_row=num_rows, token_ids=runner.pop("token_ids", {}))
    fields: Any = SimpleNamespace(rows=rows, sampler=sampler, device=device, parts=[], **runner)
    return sampler, SamplingPart(fields)


class Bench:
    """A sampler with all processors, called as the runner calls it: rows on the host and on the device, and padding."""

    def __init__(
        self, num_rows: int, vocab_size: int, device: Device | None = None, kernels: CoreKernels | None = None
    ):
        self.num_rows, self.vocab_size = num_rows, vocab_size
        self.device = TestDevice() if device is None else device
        self.kernels = kernels or WatchedKernels()
        self.sampler, self.part = sampler_with_part(num_rows, vocab_size, self.kernels, self.device)
        self.last_tokens = torch.full((num_rows + 1,), -1)

    @property
    def seen(self) -> list[Tensor]:
        assert isinstance(self.kernels, WatchedKernels)
        return self.kernels.seen

    def start(self, *started: Started, ended: Sequence[int] = ()) -> None:
        """A plan that changes rows, and computes nothing."""
        plan = StepPlan(started=list(started), ended=list(ended))
        self.sampler.apply(plan)
        self.part.begin(plan)

    def sample(
        self, logits: Tensor, rows: Sequence[int], positions: Sequence[int], runs: Sequence[Run] = (), padding: int = 0
    ) -> StepResult:
        """Tokens of some decodes, and of runs with drafts behind them."""
        plan = StepPlan(
            decode_rows=np.array(rows, np.int32), decode_starts=np.array(positions, np.int32) - 1, runs=list(runs)
        )
        rows = [*rows, *(run.row for run in runs for _ in range(run.num_new))]
        positions = [*positions, *(run.start + 1 + i for run in runs for i in range(run.num_new))]
        read = self.sampler.sample(
            plan,
            torch.cat((logits, torch.full((padding, self.vocab_size), torch.nan))),
            [np.array(own, dtype=np.int32) for own in (rows, positions)],
            [
                torch.tensor([*own, *[fill] * padding], dtype=torch.int32)
                for own, fill in ((rows, self.num_rows), (positions, 0))
            ],
            self.last_tokens,
        )
        result = StepResult([])
        read(result)
        return result


def logprobs_of(result: StepResult) -> dict[int, TokenLogprobs]:
    found: dict[int, TokenLogprobs] = result.extras.get("logprobs", {})
    return found


def run(logits: Tensor, rows: Sequence[RowSampling]) -> StepResult:
    """Sample the first token of every row; the rows of the device are in the opposite order."""
    count, vocab_size = logits.shape
    bench, into = Bench(count, vocab_size), list(range(count))[::-1]
    bench.start(*(begin(row, own) for row, own in zip(into, rows, strict=True)))
    return bench.sample(logits.clone(), into, [own.num_prompt_tokens for own in rows], padding=1)


def check(logits: Tensor, own: RowSampling, token_ids: Sequence[int]) -> Tensor:
    """What one row's processors make of logits [vocab_size], when the slow reference does the same."""
    bench = Bench(4, len(logits))
    bench.start(begin(2, own, token_ids))
    bench.sample(logits[None].clone(), [2], [len(token_ids)])
    expected = torch.tensor(reference(logits.tolist(), own, token_ids))
    torch.testing.assert_close(bench.seen[0][0], expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    return bench.seen[0][0]


def random_logits(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
