"""ModelRunner: carries out plans, in the order in which they are launched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from nanoengine.core.device import Device, Event
from nanoengine.core.errors import EngineClosed
from nanoengine.core.inputs import InputBatch, Packed, Rows, StepShape, pack, unpack
from nanoengine.core.kernels import Kernels
from nanoengine.core.kv_cache import KVCache
from nanoengine.core.messages import StepPlan, StepResult
from nanoengine.core.qwen3 import Decoder
from nanoengine.core.sampler import Sampler, Samples

Read = Callable[[StepResult], None]


class RunnerPart:
    """The runner's part of a capability. Called in the order of the steps."""

    def begin(self, plan: StepPlan) -> None:
        """Before anything is computed; rows are up to date."""

    def after_forward(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> Read | None:
        """Behind the last layer of a step that is not replayed: `hidden` is [num_tokens, hidden_size]. What is returned is
        called with the result, once the step is over.
        """

    def end(self, result: StepResult) -> None:
        """The step is over: add to `result.extras` what the other part must know."""

    def close(self) -> None:
        """No step comes any more."""


class StepRecorder(Protocol):
    """Replays steps that were recorded: CUDA graphs, CPU step programs."""

    def logits(self, plan: StepPlan) -> tuple[Tensor, Packed] | None:
        """The logits of a recorded step with the numbers of this plan, whose shape may be padded; None for a step that is
        none.
        """
        ...


class LaunchedStep:
    """A plan that was launched."""

    event: Event
    samples: Samples | None = None

    def __init__(self, parts: list[RunnerPart]):
        self.parts = parts
        self.reads: list[Read] = []

    def result(self) -> StepResult:
        """Wait for its end, and raise what went wrong in it."""
        self.event.wait()
        result = StepResult([]) if self.samples is None else self.samples.read()
        for read in self.reads:
            read(result)
        for part in self.parts:
            part.end(result)
        return result


class ModelRunner:
    """`launch` begins a StepPlan, whose `result` is a StepResult.

    Args:
        device: where tensors live.
        kernels: the operations of layers.
        model: the decoder.
        kv_cache: K and V of all layers.
        rows, sampler: what is kept of running sequences.
        block_size: tokens of a block.
        max_num_tokens: most tokens of a step.
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        model: Decoder,
        kv_cache: KVCache,
        rows: Rows,
        sampler: Sampler,
        block_size: int,
        max_num_tokens: int,
    ):
        self.device, self.kernels, self.model, self.kv_cache = device, kernels, model, kv_cache
        self.rows, self.sampler, self.block_size = rows, sampler, block_size
        self.recorder: StepRecorder | None = None
        self.parts: list[RunnerPart] = []
        # Where the numbers of a step arrive. Steps follow one another, so one place is enough, and recordings can read from it.
        runs, tokens = rows.padding_row + 1, max(max_num_tokens, rows.padding_row)
        most = StepShape([1] * runs, [], 0, tokens, tokens, [])
        self.numbers = torch.empty(most.size, dtype=torch.int32, device=device.torch_device)
        self._failed_epoch = -1
        self._is_closed = False

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begin a step: make the changes, compute its tokens, write their K/V, and sample."""
        if self._is_closed:
            raise EngineClosed("the model runner is closed")
        step = LaunchedStep(self.parts)
        self.device.run(partial(self._execute, step, plan))
        step.event = self.device.event()
        return step

    def close(self) -> None:
        """Give the memory of the model and the cache back."""
        if not self._is_closed:
            self._is_closed = True
            for part in self.parts:
                part.close()
            self.parts.clear()  # they and the processors know the runner: without these circles, memory is free at once
            self.sampler.processors.clear()
            del self.model, self.kv_cache, self.rows, self.sampler, self.recorder
            if self.device.torch_device.type == "cuda":
                torch.cuda.empty_cache()

    @torch.inference_mode()
    def _execute(self, step: LaunchedStep, plan: StepPlan) -> None:
        if plan.epoch <= self._failed_epoch:
            return  # the rows are not what this plan was made for, and its result is not wanted
        try:
            if plan.zeroed:
                self.kv_cache.zero(plan.zeroed)
            self.rows.apply(plan)
            self.sampler.apply(plan)
            for part in self.parts:
                part.begin(plan)
            if plan.num_tokens:
                step.samples = self._compute(step, plan)
        except BaseException:
            self._failed_epoch = plan.epoch
            raise

    def _compute(self, step: LaunchedStep, plan: StepPlan) -> Samples | None:
        recorded = None if self.recorder is None or plan.needs_hidden else self.recorder.logits(plan)
        if recorded is not None:
            logits, packed = recorded
            *_, rows, positions = (self.numbers[section] for section in packed.shape.sections)
        else:
            packed = pack(plan, self.rows)
            self.send(packed)
            batch = self.batch(packed.shape)
            if plan.num_drafted and self.sampler.verifier is not None:
                self.sampler.verifier.complete(plan, batch)
            hidden = self.model.forward(batch.input_ids, batch.positions, batch.metadata)
            reads = [part.after_forward(plan, batch, hidden) for part in self.parts]
            step.reads = [read for read in reads if read is not None]
            if not plan.num_samples:
                return None
            if plan.num_samples < len(hidden):
                hidden = hidden.index_select(0, batch.sampled_tokens)
            logits, rows, positions = self.model.compute_logits(hidden), batch.sampled_rows, batch.sampled_positions
        on_host = packed.sampled_rows, packed.sampled_positions
        return self.sampler.sample(plan, logits, *on_host, rows, positions, self.rows.last_tokens)

    def send(self, packed: Packed) -> None:
        """Put the numbers of a step where `batch` reads them."""
        self.numbers[: packed.shape.size].copy_(packed.numbers, non_blocking=True)

    def batch(self, shape: StepShape) -> InputBatch:
        """The tensors of a step whose numbers were sent."""
        return unpack(shape, self.numbers, self.rows, self.kernels, self.kv_cache, self.block_size)
