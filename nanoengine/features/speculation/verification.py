"""Verification of drafts on the device: the drafts before each sample of a step, and the samples that become tokens.

Verification is ordinary sampling of every position, each with the noise of the position. No probability is compared: a draft is
accepted if it is equal to the sample.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.device import Device
from nanoengine.core.messages import Run, StepPlan
from nanoengine.features.speculation.draft_model import NO_DRAFT, DraftModel


class Verified(NamedTuple):
    """The result of the verification of a step."""

    num_accepted: Tensor  # [num_runs] int64
    is_token: Tensor  # [num_samples] bool: whether the sample is a token of its row


@dataclass
class Drafts:
    """The runs with drafts of one step. Samples are identified by their numbers in the step."""

    rows: Tensor  # [num_runs] int64
    starts: Tensor  # [num_runs] int64: the first sample of each
    tokens: Tensor  # [num_runs, most] int64: drafts, and NO_DRAFT behind them
    run_of: Tensor  # [num_samples] int64; any run for samples of none
    depth: Tensor  # [num_samples] int64: drafts before the sample in its run; 0 without a run

    @classmethod
    def of(cls, runs: Seq[Run], first: int, num_samples: int, device: Device, guesses: Tensor | None = None) -> Drafts:
        """The drafts of a plan.

        Args:
            runs: at least one, each with drafts.
            first: samples before those of these runs.
            num_samples: of the step, padding included.
            guesses: [num_runs, most] int64, the drafts if those of the runs are UNKNOWN.
        """
        counts = [run.num_new for run in runs]
        starts = first + np.cumsum([0, *counts[:-1]])
        tokens = np.full((len(runs), max(counts) - 1), NO_DRAFT, dtype=np.int64)
        for i, run in enumerate(runs):
            tokens[i, : len(run.drafts)] = run.drafts
        run_of, depth = np.zeros((2, num_samples), dtype=np.int64)
        drafted = slice(first, first + sum(counts))
        run_of[drafted] = np.repeat(np.arange(len(runs)), counts)
        depth[drafted] = np.concatenate([np.arange(count) for count in counts])
        parts = [np.array([run.row for run in runs]), starts, tokens.reshape(-1), run_of, depth]
        sent = device.send(np.concatenate(parts).astype(np.int64)).split([part.size for part in parts])
        return cls(sent[0], sent[1], sent[2].view(tokens.shape) if guesses is None else guesses, sent[3], sent[4])

    def before(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The drafts of the runs of m samples, [m, most] int64, and whether each is before the sample, [m, most] bool."""
        drafts = self.tokens.index_select(0, self.run_of.index_select(0, numbers))
        depths = torch.arange(drafts.shape[1], dtype=torch.int64, device=drafts.device)
        return drafts, depths < self.depth.index_select(0, numbers)[:, None]

    def verify(self, tokens: Tensor) -> Verified:
        """Compare drafts with the samples, [num_samples] int64."""
        depths = torch.arange(self.tokens.shape[1], dtype=torch.int64, device=tokens.device)
        numbers = (self.starts[:, None] + depths).clamp(max=len(tokens) - 1)
        counts = (tokens[numbers] == self.tokens).long().cumprod(1).sum(1)
        return Verified(counts, self.depth <= counts.index_select(0, self.run_of))


class DraftVerifier:
    """The sampler's `Verifier`.

    Args:
        model: makes the UNKNOWN drafts of a plan; None: no plan has any.
    """

    def __init__(self, device: Device, model: DraftModel | None = None):
        self.device, self.model = device, model

    def drafts(self, plan: StepPlan, num_samples: int) -> Drafts:
        runs, guesses = plan.runs[: plan.num_drafted], None if self.model is None else self.model.guesses
        return Drafts.of(runs, len(plan.decode_rows), num_samples, self.device, guesses)

    def verify(self, drafts: Drafts, tokens: Tensor, last_tokens: Tensor) -> Verified:
        verified = drafts.verify(tokens)
        last = drafts.starts + verified.num_accepted
        last_tokens.index_copy_(0, drafts.rows, tokens.index_select(0, last))
        return verified
