"""GrammarMaskProcessor: sets the logits of tokens outside of the masks of a step to -inf."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from nanoengine.core.device import Device
from nanoengine.core.messages import StepPlan
from nanoengine.core.model_runner import ModelRunner, RunnerPart
from nanoengine.core.sampler import LogitsProcessor
from nanoengine.features.sampling.token_masks import apply_masks
from nanoengine.features.structured.mask_filling import MASKS, StepMasks


class GrammarMaskProcessor(LogitsProcessor):
    """The processor of grammar masks. It waits for them behind the forward pass."""

    def __init__(self, device: Device):
        self.device = device
        self.pieces: dict[int, int] = {}  # row -> number of its masks
        self.masks: StepMasks | None = None  # of the current step

    def apply(self, logits: Tensor, numbers: np.ndarray, rows: np.ndarray, drafts: Any) -> None:
        assert self.masks is not None
        apply_masks(logits, self.device.send(numbers.astype(np.int64)), self.device.send(self.masks.wait()))


class MaskPart(RunnerPart):
    """The runner's part of masks: it passes those of a plan to the processor."""

    def __init__(self, runner: ModelRunner):
        self.processor = GrammarMaskProcessor(runner.device)
        runner.sampler.processors.append(self.processor)
        runner.parts.append(self)

    def begin(self, plan: StepPlan) -> None:
        masks: StepMasks | None = plan.extras.get(MASKS)
        self.processor.masks, self.processor.pieces = masks, {} if masks is None else dict(masks.rows)
