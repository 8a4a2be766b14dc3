"""RecordedSteps: a `StepRecorder` of the runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.inputs import PackedStep, pack
from nanoengine.core.messages import StepPlan
from nanoengine.core.model_runner import ModelRunner
from nanoengine.kernels.recording.buckets import Bucket, pad, size_of
from nanoengine.kernels.recording.cpu_recorder import CannotRecord
from nanoengine.progress import stage


class Recorder(Protocol):
    """Records work that launches the same kernels on the same tensors every time."""

    records_ahead: bool
    """Whether all buckets are recorded before the first step; otherwise each when it first comes, which is no more work."""

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Call `work`, and return what replays it; the result is the same tensor each time."""
        ...


class Steady(NamedTuple):
    """A replayed step of decodes alone. The next one mostly has the same rows, each one token further."""

    rows: np.ndarray  # of its plan: where they are the same in the next one, that has this very array
    variant: object
    packed: PackedStep
    computed: slice  # the numbers that change
    positions: slice
    replay: Callable[[], Tensor]


class RecordedSteps:
    """All recordings of one runner, from the numbers of a step to its logits. They share memory: logits are good until the next.

    Args:
        runner: whose steps they are.
        buckets: that are recorded, the smallest first.
        max_len: longest sequence in tokens.
        reads_shared_once: steps whose sequences share blocks run without a recording: attention then reads those once.
    """

    def __init__(
        self,
        runner: ModelRunner,
        recorder: Recorder,
        buckets: list[Bucket],
        max_len: int,
        *,
        reads_shared_once: bool = False,
    ):
        self.buckets, self._runner, self._recorder = buckets, runner, recorder
        self._max_len, self._reads_shared_once = max_len, reads_shared_once
        # The key of a recording beside its bucket, such as which adapters are in use.
        self.variant: Callable[[], object] = lambda: None
        self._last: Steady | None = None
        self._replays: dict[tuple[Bucket, object], Callable[[], Tensor]] = {}

    def __len__(self) -> int:
        return len(self.buckets)

    def record_all(self, *, use_tqdm: bool) -> None:
        """Record every bucket, the largest first: the memory that it takes does for the others."""
        with stage("Recording CUDA graphs", len(self.buckets), "graph", shown=use_tqdm) as advance:
            for bucket in sorted(self.buckets, key=lambda section: section.num_runs * section.num_tokens, reverse=True):
                self.record(bucket)
                advance()

    @torch.inference_mode()
    def record(self, bucket: Bucket) -> None:
        """Record a bucket on numbers that are all padding."""
        shape, runner = bucket.shape(self._max_len), self._runner
        runner.send(pad(pack(StepPlan(), runner.rows), shape, runner.rows))

        def work() -> Tensor:
            batch = runner.batch(shape)
            hidden = runner.model.forward(batch.input_ids, batch.positions, batch.metadata)
            if bucket.is_prompt:
                hidden = hidden.index_select(0, batch.sampled_tokens)
            return runner.model.compute_logits(hidden)

        self._replays[bucket, self.variant()] = self._recorder.record(work)

    def logits(self, plan: StepPlan) -> tuple[Tensor, PackedStep] | None:
        """See `StepRecorder`."""
        if self._reads_shared_once and any(plan.num_common_blocks):
            return None
        if not self._recorder.records_ahead and torch.autograd._profiler_enabled():
            return None  # it is to see the operations, which a replay goes without
        last, variant = self._last, self.variant()
        if last is not None and plan.decode_rows is last.rows and not plan.runs and variant == last.variant:
            return self._one_further(last, plan)
        self._last = None
        size = size_of(plan)
        bucket = None if size is None else next((section for section in self.buckets if section.holds(size)), None)
        if bucket is None:
            return None
        key = bucket, variant
        if key not in self._replays:
            if self._recorder.records_ahead:
                return None
            try:
                self.record(bucket)  # not with the numbers of the step: they would be computed twice, and states go on
            except CannotRecord:
                self.buckets = []  # nor can others
                return None
        packed, runner = pack(plan, self._runner.rows), self._runner
        shape = bucket.shape(self._max_len)
        if (len(packed.query_lens), packed.num_tokens) != (len(shape.query_lens), shape.num_tokens):
            packed = pad(packed, shape, runner.rows)
        runner.send(packed)
        if not plan.runs:
            _, computed, *_, positions = (
                slice(section.start, section.start + len(plan.decode_rows)) for section in packed.sections
            )
            self._last = Steady(plan.decode_rows, variant, packed, computed, positions, self._replays[key])
        return self._replays[key](), packed

    def _one_further(self, last: Steady, plan: StepPlan) -> tuple[Tensor, PackedStep]:
        """The step of `last` with other tokens before it: all but two sections of its numbers are as they were."""
        packed, before = last.packed, last.packed.numbers.numpy()
        packed.numbers = self._runner.device.host_tensor(before.size, torch.int32)
        numbers = packed.numbers.numpy()
        numbers[:] = before
        numbers[last.computed] = plan.decode_starts
        positions = numbers[last.positions]
        np.add(plan.decode_starts, 1, out=positions)
        packed.sampled = [packed.sampled[0], positions]
        self._runner.send(packed)
        return last.replay(), packed
