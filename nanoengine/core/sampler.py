"""Sampler: logits to tokens, each row by its own SamplingParams, without waiting for the device.

All that sampling knows of a row came with the message that started it; what depends on lengths follows from positions. So the
host need not have seen a token before the next is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.device import Device
from nanoengine.core.kernels import CoreKernels, SamplingTable
from nanoengine.core.messages import NONE_LEFT, UNKNOWN, Started, StepPlan, StepResult

Read = Callable[[StepResult], None]
"""Adds values that the device has sent to a result. It is called once the step is over."""


class LogitsProcessor:
    """Changes the logits of the rows that ask for it, or takes note of their samples. Calls come in the order of the steps.

    `numbers` index the samples of the step; `rows[number]` is the runner's row of a sample.
    """

    pieces: Mapping[int, Any]  # row -> this processor's data for it; while empty, only `start` and `end` are called
    forbids = True
    """Whether it may leave no token of a row: otherwise a row without a finite logit is the model's fault."""

    def start(self, started: Seq[Started]) -> None:
        """Sequences were put into rows; `end` was called for all of these rows."""

    def end(self, rows: list[int]) -> None:
        """No sequence has these rows any more."""

    def find(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Numbers of the samples that it is for; `positions`: where in its sequence each token will stand. Called first in each
        step that samples: what depends on lengths is noted here.
        """
        return np.array([number for number, row in enumerate(rows.tolist()) if row in self.pieces], np.int64)

    def apply(self, logits: Tensor, numbers: np.ndarray, rows: np.ndarray, drafts: Any) -> None:
        """Change the logits [n, vocab_size]; NaN and infinity must stay visible. `drafts`: those of the step, or None."""

    def observe(
        self, logits: Tensor, tokens: Tensor, numbers: np.ndarray, rows: np.ndarray, verified: Any
    ) -> Read | None:
        """Take note of the samples, [n] int64."""


class Verifier(Protocol):
    """The runner's part of speculation: which drafts of a step came true.

    `drafts` are what stands before each sample. `verify` compares them with the samples, writes the last token of each of their
    rows, and returns something with `num_accepted`, a tensor.
    """

    def drafts(self, plan: StepPlan, num_samples: int) -> Any: ...
    def verify(self, drafts: Any, tokens: Tensor, last_tokens: Tensor) -> Any: ...


class Sampler:
    """Chooses tokens for the rows of one engine, below `num_rows`; the row of that number is padding."""

    verifier: Verifier | None = None

    def __init__(self, num_rows: int, vocab_size: int, kernels: CoreKernels, device: Device):
        self.vocab_size, self.kernels, self.device = vocab_size, kernels, device
        self.processors: list[LogitsProcessor] = []  # in this order
        zeros = torch.zeros(num_rows + 1, dtype=torch.float32, device=device.torch_device)
        self.filtering: set[int] = set()  # rows that may keep less than all tokens
        self.table = SamplingTable(zeros, zeros.int(), zeros + 1, zeros.clone(), zeros.long(), self.filtering)

    def apply(self, plan: StepPlan) -> None:
        """Note which rows end, and which get a new sequence."""
        started = plan.started
        if not (started or plan.ended):
            return
        ended = [*plan.ended, *(start.row for start in started)]
        for processor in self.processors:
            processor.end(ended)
            processor.start(started)
        self.filtering.difference_update(ended)
        if not started:
            return
        params = [start.sampling.params for start in started]
        few = (own.temperature > 0 and (own.top_k > 0 or own.top_p < 1 or own.min_p > 0) for own in params)
        self.filtering.update(start.row for start, keeps_few in zip(started, few, strict=True) if keeps_few)
        top_k = [own.top_k if 0 < own.top_k < self.vocab_size else 0 for own in params]
        seeds = np.array([start.sampling.seed for start in started], np.uint64).view(np.int64)
        integers = self.device.send(np.array([[start.row for start in started], top_k, seeds], np.int64))
        floats = self.device.send(np.array([[own.temperature, own.top_p, own.min_p] for own in params], np.float32).T)
        table = self.table
        columns = table.temperature, table.top_p, table.min_p, table.top_k, table.seeds
        for column, values in zip(columns, (*floats, integers[1].to(torch.int32), integers[2]), strict=True):
            column.index_copy_(0, integers[0], values)

    def sample(
        self, plan: StepPlan, logits: Tensor, on_host: Seq[np.ndarray], on_device: Seq[Tensor], last_tokens: Tensor
    ) -> Read:
        """Sample a token for every row of logits.

        Args:
            logits: [n, vocab_size] float32; overwritten. Those behind the samples of the plan are padding.
            on_host: the row that each sample goes into, and where in its sequence the token will stand: [num_samples] each.
            on_device: the same with padding: [n] each.
            last_tokens: [num_rows + 1] int64: each token is written into its row.
        """
        rows, positions = on_host
        asked = [own for own in self.processors if own.pieces]
        bound = [(own, numbers) for own in asked if len(numbers := own.find(rows, positions))]
        drafts = verified = None
        if plan.num_drafted:
            assert self.verifier is not None, "drafts need speculation's part of the runner"
            drafts = self.verifier.drafts(plan, len(logits))
        for processor, numbers in bound:
            processor.apply(logits, numbers, rows, drafts)
        tokens = self.kernels.choose_tokens(logits, self.table, on_device[0], on_device[1], last_tokens)
        if self.verifier is not None and drafts is not None:
            verified = self.verifier.verify(drafts, tokens, last_tokens)
        reads = [own.observe(logits, tokens, numbers, rows, verified) for own, numbers in bound]
        sampled = tokens[: len(rows)].to("cpu", non_blocking=True)
        num_accepted = None if verified is None else verified.num_accepted.to("cpu", non_blocking=True)

        def read(result: StepResult) -> None:
            result.token_ids = sampled.tolist()
            if NONE_LEFT in result.token_ids:  # where no processor has forbidden anything, the logits are broken
                forbidden = {number for own, numbers in bound if own.forbids for number in numbers.tolist()}
                found = enumerate(result.token_ids)
                result.token_ids = [UNKNOWN if own == NONE_LEFT and i not in forbidden else own for i, own in found]
            if num_accepted is not None:
                result.num_accepted = num_accepted.tolist()
            for each in filter(None, reads):
                each(result)

        return read
