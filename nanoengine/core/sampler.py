"""Sampler: logits to tokens, each row by its own SamplingParams, without waiting for the device.

The parameters of a row come with the message that starts it; values that depend on lengths follow from positions. So the next
token can be sampled before the host knows the last one.
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
"""Callback that adds values from the device to a result. It is called once the step is over."""


class LogitsProcessor:
    """Changes logits of some rows, or records their samples. Calls are in the order of the steps.

    `numbers` index the samples of the step; `rows[number]` is the runner's row of a sample.
    """

    pieces: Mapping[int, Any]  # row -> this processor's data for it; while empty, only `start` and `end` are called
    forbids = True
    """Whether it may forbid all tokens of a row: otherwise a row without a finite logit is an error of the model."""

    def start(self, started: Seq[Started]) -> None:
        """Sequences were put into rows; `end` was called for all of these rows."""

    def end(self, rows: list[int]) -> None:
        """No sequence has these rows any more."""

    def find(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Indices of the samples to process, for tokens at these positions. Called before `apply`, in each step that samples."""
        return np.array([number for number, row in enumerate(rows.tolist()) if row in self.pieces], np.int64)

    def apply(self, logits: Tensor, numbers: np.ndarray, rows: np.ndarray, drafts: Any) -> None:
        """Change the logits [n, vocab_size]; NaN and infinity must stay. `drafts`: of the step, or None."""

    def observe(
        self, logits: Tensor, tokens: Tensor, numbers: np.ndarray, rows: np.ndarray, verified: Any
    ) -> Read | None:
        """Record the samples, [n] int64."""


class Verifier(Protocol):
    """The runner's part of speculation: accepts or rejects the drafts of a step.

    `drafts` returns the tokens before each sample. `verify` compares them with the samples, writes the last token of
    each of their rows, and returns something with `num_accepted`, a tensor.
    """

    def drafts(self, plan: StepPlan, num_samples: int) -> Any: ...
    def verify(self, drafts: Any, tokens: Tensor, last_tokens: Tensor) -> Any: ...


class Sampler:
    """Samples tokens for the rows of one engine; row `num_rows` is padding."""

    verifier: Verifier | None = None

    def __init__(self, num_rows: int, vocab_size: int, kernels: CoreKernels, device: Device):
        self.vocab_size, self.kernels, self.device = vocab_size, kernels, device
        self.processors: list[LogitsProcessor] = []  # in this order
        zeros = torch.zeros(num_rows + 1, dtype=torch.float32, device=device.torch_device)
        self.filtering: set[int] = set()  # rows whose filters may drop tokens
        self.table = SamplingTable(zeros, zeros.int(), zeros + 1, zeros.clone(), zeros.long(), self.filtering)

    def apply(self, plan: StepPlan) -> None:
        """Apply the ended and started rows of a plan."""
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
        filters = (p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params)
        self.filtering.update(start.row for start, is_filtered in zip(started, filters, strict=True) if is_filtered)
        top_k = [p.top_k if 0 < p.top_k < self.vocab_size else 0 for p in params]
        seeds = np.array([start.sampling.seed for start in started], np.uint64).view(np.int64)
        integers = self.device.send(np.array([[start.row for start in started], top_k, seeds], np.int64))
        floats = self.device.send(np.array([[p.temperature, p.top_p, p.min_p] for p in params], np.float32).T)
        table = self.table
        columns = table.temperature, table.top_p, table.min_p, table.top_k, table.seeds
        for column, values in zip(columns, (*floats, integers[1].to(torch.int32), integers[2]), strict=True):
            column.index_copy_(0, integers[0], values)

    def sample(
        self, plan: StepPlan, logits: Tensor, on_host: Seq[np.ndarray], on_device: Seq[Tensor], last_tokens: Tensor
    ) -> Read:
        """Sample a token for every row of logits.

        Args:
            logits: [n, vocab_size] float32; overwritten. Rows behind the samples of the plan are padding.
            on_host: the row of each sample, and the position of its token in the sequence: [num_samples] each.
            on_device: the same with padding: [n] each.
            last_tokens: [num_rows + 1] int64: each token is written into its row.
        """
        rows, positions = on_host
        used = [processor for processor in self.processors if processor.pieces]
        bound = [(processor, numbers) for processor in used if len(numbers := processor.find(rows, positions))]
        drafts = verified = None
        if plan.num_drafted:
            assert self.verifier is not None, "drafts need speculation's part of the runner"
            drafts = self.verifier.drafts(plan, len(logits))
        for processor, numbers in bound:
            processor.apply(logits, numbers, rows, drafts)
        tokens = self.kernels.choose_tokens(logits, self.table, on_device[0], on_device[1], last_tokens)
        if self.verifier is not None and drafts is not None:
            verified = self.verifier.verify(drafts, tokens, last_tokens)
        reads = [processor.observe(logits, tokens, numbers, rows, verified) for processor, numbers in bound]
        sampled = tokens[: len(rows)].to("cpu", non_blocking=True)
        num_accepted = None if verified is None else verified.num_accepted.to("cpu", non_blocking=True)

        def read(result: StepResult) -> None:
            result.token_ids = sampled.tolist()
            if NONE_LEFT in result.token_ids:  # where no processor has forbidden anything, the logits are broken
                forbidden = {number for processor, numbers in bound if processor.forbids for number in numbers.tolist()}
                ids = enumerate(result.token_ids)
                result.token_ids = [UNKNOWN if id == NONE_LEFT and i not in forbidden else id for i, id in ids]
            if num_accepted is not None:
                result.num_accepted = num_accepted.tolist()
            for each in filter(None, reads):
                each(result)

        return read
