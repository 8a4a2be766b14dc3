"""ModelRunner: computes plans, in the order of their launches."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nanoengine.core.errors import EngineClosed
from nanoengine.core.inputs import InputBatch, PackedStep, Rows, pack, unpack
from nanoengine.core.kv_cache import KVCache
from nanoengine.core.messages import Launched, StepPlan, StepResult
from nanoengine.core.qwen3 import DenseDecoder
from nanoengine.core.sampler import Read, Sampler


class RunnerPart:
    """The runner's part of a capability. Calls are in the order of the steps."""

    def begin(self, plan: StepPlan) -> None:
        """Before anything is computed; rows are up to date."""

    def before_forward(self, plan: StepPlan, batch: InputBatch) -> None:
        """Before the forward pass of a step that is not replayed: drafts that are UNKNOWN in the plan may be filled in here."""

    def after_forward(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> Read | None:
        """Behind the last layer of such a step: `hidden` is [num_tokens, hidden_size]."""

    def end(self, result: StepResult) -> None:
        """The step is over: add values for the policy's part to `result.extras`."""

    def close(self) -> None:
        """Last call: free memory and threads."""


class StepRecorder(Protocol):
    """Replays steps that were recorded: CUDA graphs, CPU step programs."""

    def logits(self, plan: StepPlan) -> tuple[Tensor, PackedStep] | None:
        """The logits of a recorded step with the numbers of this plan, which may be padded; None: no such recording."""


class ModelRunner:
    """`launch` begins a StepPlan of at most `max_num_tokens`."""

    recorder: StepRecorder | None = None

    def __init__(
        self, model: DenseDecoder, kv_cache: KVCache, rows: Rows, sampler: Sampler, block_size: int, max_num_tokens: int
    ):
        self.model, self.kv_cache, self.rows, self.sampler = model, kv_cache, rows, sampler
        self.device, self.kernels, self.block_size = sampler.device, sampler.kernels, block_size
        self.parts: list[RunnerPart] = []
        # The numbers of the current step. One buffer is enough, since steps run in order; recordings read from it.
        runs, tokens = rows.padding_row + 1, max(max_num_tokens, rows.padding_row)
        most = PackedStep([1] * runs, [], 0, tokens, tokens)
        self.numbers = torch.empty(most.sections[-1].stop, dtype=torch.int32, device=self.device.torch_device)
        self._failed_epoch = -1
        self._is_closed = False

    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step: make the changes, compute its tokens, write their K/V, and sample."""
        if self._is_closed:
            raise EngineClosed("the model runner is closed")
        parts = self.parts
        reads: list[Read] = []
        wait = self.device.run(lambda: reads.extend(self._execute(plan)))

        def result() -> StepResult:
            wait()
            step_result = StepResult([])
            for read in reads:
                read(step_result)
            for part in parts:
                part.end(step_result)
            return step_result

        return result

    def close(self) -> None:
        """Free the memory of the model and the cache."""
        if not self._is_closed:
            self._is_closed = True
            for part in self.parts:
                part.close()
            self.parts.clear()  # parts and processors refer to the runner: without these cycles, memory is free at once
            self.sampler.processors.clear()
            self.recorder = None
            del self.model, self.kernels, self.kv_cache, self.rows, self.sampler
            if self.device.is_cuda:
                torch.cuda.empty_cache()

    def _execute(self, plan: StepPlan) -> list[Read]:
        if plan.epoch <= self._failed_epoch:
            return []  # the rows do not match this plan, and its result is not used
        try:
            with torch.inference_mode(), torch._C._DisableAutocast():  # the caller's thread may be in any mode of torch
                if plan.zeroed:
                    self.kv_cache.zero(plan.zeroed)
                self.rows.apply(plan)
                self.sampler.apply(plan)
                for part in self.parts:
                    part.begin(plan)
                return self._compute(plan) if plan.num_tokens else []
        except BaseException:
            self._failed_epoch = plan.epoch
            raise

    def _compute(self, plan: StepPlan) -> list[Read]:
        recorded = None if self.recorder is None or plan.needs_hidden else self.recorder.logits(plan)
        reads: list[Read] = []
        if recorded is not None:
            logits, packed = recorded
        else:
            packed = pack(plan, self.rows)
            self.send(packed)
            batch = self.batch(packed)
            for part in self.parts:
                part.before_forward(plan, batch)
            hidden = self.model.forward(batch.input_ids, batch.positions, batch.metadata)
            reads = [read for part in self.parts if (read := part.after_forward(plan, batch, hidden))]
            if not plan.num_samples:
                return reads
            if plan.num_samples < len(hidden):
                hidden = hidden.index_select(0, batch.sampled_tokens)
            logits = self.model.compute_logits(hidden)
        on_device = [self.numbers[section] for section in packed.sections[-2:]]
        return [self.sampler.sample(plan, logits, packed.sampled, on_device, self.rows.last_tokens), *reads]

    def send(self, packed: PackedStep) -> None:
        """Copy the numbers of a step to the buffer that `batch` reads."""
        self.numbers[: packed.numbers.numel()].copy_(packed.numbers, non_blocking=True)

    def batch(self, packed: PackedStep) -> InputBatch:
        """The tensors of a step whose numbers were sent, or will be."""
        return unpack(packed, self.numbers, self.rows, self.kernels, self.kv_cache, self.block_size)
