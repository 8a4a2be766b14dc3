"""The two messages between policy and tensors: a StepPlan goes down to the runner, a StepResult comes back.

They are plain data (ids, lengths, token ids; no slots and no tensors), so a runner in another process can compute from their
bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from nanoengine.core.sampling_params import CoreSamplingParams

UNKNOWN = -1
"""A token id that is not there. In a plan: only the device has the token. In a result: the logits were not finite."""

NONE_LEFT = -2
"""A token id in a result: no token, because the request forbids every token with a finite logit."""

NULL_BLOCK = 0
"""Pads block tables; it is never written."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How the tokens of a row are sampled."""

    params: CoreSamplingParams
    seed: int  # 64 bits, of the request and the completion: with the position, the address of the randomness
    num_prompt_tokens: int
    stop_token_ids: tuple[int, ...] = ()


class Started(NamedTuple):
    """Start of a sequence in a row of the runner; the state of the row is replaced."""

    row: int
    token_ids: list[int]  # all known tokens
    tables: list[list[int]]  # block ids: a table for each KV group
    sampling: RowSampling


class Entries(NamedTuple):
    """New block ids in the block table of a row, from entry `first` on."""

    row: int
    group: int
    first: int
    block_ids: list[int]


class Run(NamedTuple):
    """New tokens of one row in one step.

    A decode is a run of one token: the last of its row, which sampling has left on the device. With drafts behind it, every
    token of the run samples. A chunk (of a prompt, or of all tokens of a sequence that resumes) takes its tokens from
    `Started.token_ids`, and samples behind its last token or not at all.
    """

    row: int
    start: int  # tokens of the row before them
    num_new: int
    samples: bool
    drafts: tuple[int, ...] = ()  # guessed tokens; UNKNOWN: the runner guesses them


NO_RUNS = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False)
class StepPlan:
    """Plan of one step: changes of rows, and the runs to compute. Decodes, runs with drafts and chunks are in this order."""

    epoch: int = 0  # the executor skips the plans of an epoch behind a failed one
    started: list[Started] = field(default_factory=list)
    tables: list[Entries] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # rows without a sequence from now on
    zeroed: list[int] = field(default_factory=list)  # blocks to overwrite with zeros first: they may hold NaN
    decode_rows: np.ndarray = field(default_factory=lambda: NO_RUNS)  # [n] int32: decodes without drafts, as columns
    decode_starts: np.ndarray = field(default_factory=lambda: NO_RUNS)  # [n] int32: tokens before each
    runs: list[Run] = field(default_factory=list)  # other runs; runs with drafts first
    num_common_blocks: list[int] = field(default_factory=list)  # per KV group: first blocks, the same in all decodes
    needs_hidden: bool = False  # a part of the runner reads the hidden states: the step is not replayed
    extras: dict[str, Any] = field(default_factory=dict)  # values of capabilities for their part of the runner

    @property
    def num_drafted(self) -> int:
        """Runs with drafts."""
        return sum(bool(run.drafts) for run in self.runs) if self.runs else 0

    @property
    def num_tokens(self) -> int:
        return len(self.decode_rows) + (sum(run.num_new for run in self.runs) if self.runs else 0)

    @property
    def num_samples(self) -> int:
        return len(self.decode_rows) + sum(run.num_new if run.drafts else run.samples for run in self.runs)


@dataclass(slots=True)
class StepResult:
    """The results of a plan."""

    token_ids: list[int]  # one for each sample; UNKNOWN or NONE_LEFT where there is none
    num_accepted: list[int] = field(default_factory=list)  # drafts of each run that has any
    extras: dict[str, Any] = field(default_factory=dict)  # values of runner parts for the policy


Launched = Callable[[], StepResult]
"""A function that an executor returns for a plan: it waits until the plan is carried out, and raises the error of the step."""
