"""GrammarMasks: leaves -inf of the logits of tokens that the masks of a step do not hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.device import Device
from nanoengine.core.messages import StepPlan
from nanoengine.core.model_runner import ModelRunner, RunnerPart
from nanoengine.core.sampler import LogitsProcessor
from nanoengine.sampling.row_processor import row_slices
from nanoengine.structured.structured import MASKS, StepMasks


class GrammarMasks(LogitsProcessor):
    """The masks of a step are waited for behind the forward pass."""

    def __init__(self, vocab_size: int, device: Device):
        self.vocab_size, self.device = vocab_size, device
        self.pieces: dict[int, int] = {}  # row -> how many masks it has
        self._masks: StepMasks | None = None
        self._shifts = torch.arange(8, dtype=torch.uint8, device=device.torch_device)

    def take(self, masks: StepMasks | None) -> None:
        """Those of the step that begins."""
        self._masks = masks
        self.pieces = {} if masks is None else dict(masks.rows)

    def find(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return np.flatnonzero(np.isin(rows, list(self.pieces)))

    def apply(self, logits: Tensor, numbers: np.ndarray, rows: np.ndarray, drafts: Any) -> None:
        assert self._masks is not None
        masks, samples = self.device.send(self._masks.wait()), self.device.send(numbers.astype(np.int64))
        for part in row_slices(len(numbers)):
            bits = (masks[part].view(torch.uint8)[:, :, None] >> self._shifts) & 1
            allowed = bits.flatten(1)[:, : self.vocab_size].to(logits.dtype)
            # 0 or -inf, and added: NaN stays what it is. On a CPU a choice between two values would take many times as long.
            logits.index_add_(0, samples[part], 1 - 1 / allowed)


class MaskPart(RunnerPart):
    """Adds the processor to the sampler of a runner, and hands it the masks that come with plans."""

    def __init__(self, runner: ModelRunner):
        self.masks = GrammarMasks(runner.sampler.vocab_size, runner.device)
        runner.sampler.processors.append(self.masks)
        runner.parts.append(self)

    def begin(self, plan: StepPlan) -> None:
        self.masks.take(plan.extras.get(MASKS))
