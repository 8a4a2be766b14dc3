"""ModelRunner: carries out plans, in the order in which they are launched. What it is made of, startup.py puts together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nanoengine.attention.backend import AttentionBackend
from nanoengine.engine.executor import ExecutorInfo
from nanoengine.engine.messages import UNKNOWN, Decodes, StepPlan, StepResult
from nanoengine.errors import EngineClosed
from nanoengine.kernels.interface import Kernels
from nanoengine.models.decoder import Decoder
from nanoengine.runner.draft_model import DraftModel
from nanoengine.runner.drafts import Drafts
from nanoengine.runner.graphs import Graphs, RecordedSteps, Size
from nanoengine.runner.inputs import (
    InputBatch,
    Layout,
    Packed,
    StepShape,
    pack,
    pack_drafted,
    pack_prompt,
    shape_of,
    unpack,
)
from nanoengine.runner.kv_cache import KVCache
from nanoengine.runner.kv_mover import KVMover
from nanoengine.runner.prompt_logprobs import PromptPart, compute_prompt_logprobs
from nanoengine.runner.rows import Rows
from nanoengine.runner.sampler import Sampler, Samples
from nanoengine.runner.stream import Event, Stream


@dataclass
class Parts:
    """What a runner is made of, all for the same device."""

    stream: Stream
    kernels: Kernels
    backend: AttentionBackend
    model: Decoder
    sampler: Sampler
    rows: Rows
    kv_cache: KVCache
    mover: KVMover
    block_size: int
    max_num_batched_tokens: int
    draft_model: DraftModel | None = None


class Step:
    """A plan that was launched. Its fields are set when the device's work on it is launched too."""

    event: Event
    samples: Samples | None = None
    prompt_logprobs: list[PromptPart]

    def __init__(self, plan: StepPlan, mover: KVMover):
        self.plan = plan
        self.mover = mover
        self.prompt_logprobs = []
        self.kept: list[int] | None = None  # numbers of the samples that were taken, if not all were

    def result(self) -> StepResult:
        """Wait for its end, and raise what went wrong in it."""
        self.event.wait()
        result = StepResult([])
        if self.samples is not None:
            result.token_ids, result.logprobs, result.error = self.samples.read()
            result.num_accepted = self.samples.num_accepted
        if self.kept is not None:
            _fill_up(result, self.plan, self.kept)
        result.prompt_logprobs = [part.read() for part in self.prompt_logprobs]
        result.files = self.mover.finished(wait=self.plan.wait)
        return result


class ModelRunner:
    """`launch` begins a StepPlan, whose `result` is a StepResult.

    Attributes:
        info: what the policy has to know of it.
        graphs: recorded steps, if there are any.
    """

    info: ExecutorInfo
    graphs: Graphs | None = None

    def __init__(self, parts: Parts):
        self.stream, self.kernels, self.backend = parts.stream, parts.kernels, parts.backend
        self.model, self.sampler, self.rows, self.mover = parts.model, parts.sampler, parts.rows, parts.mover
        self.kv_cache: KVCache | None = parts.kv_cache
        self.block_size = parts.block_size
        self.draft_model = parts.draft_model
        # Where a step's numbers arrive. Graphs read them there; steps follow one another, so one place is enough.
        num_rows = self.rows.padding_row
        num_tokens = max(parts.max_num_batched_tokens, num_rows)
        most = max(Layout(num_rows + 1, num_tokens, num_tokens).size, Layout.of_prompt(num_tokens).size)
        self._numbers = torch.empty(most, dtype=torch.int32, device=self.stream.torch_device)
        # Rows whose last plan failed: what the device has of them is anybody's guess, until they are started again.
        self._broken: set[int] = set()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Step:
        """Begin a step: make the changes, write the K/V of its tokens, and sample."""
        if self.kv_cache is None:
            raise EngineClosed("the model runner is closed")
        step = Step(plan, self.mover)
        self.stream.run(partial(self._execute, step))
        step.event = self.stream.event()
        return step

    def close(self) -> None:
        """Finish what is being written, and give the memory of the model and the cache back."""
        if self.kv_cache is None:
            return
        self.mover.close()
        self.kv_cache = self.graphs = None
        # The sampler may keep much for rows with penalties.
        del self.model, self.draft_model, self.mover, self.rows, self.sampler
        if self.stream.torch_device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _execute(self, step: Step) -> None:
        """A step, in its place on the stream. Whatever goes wrong in it leaves its rows broken, and all others as they were."""
        plan = step.plan
        self._broken.difference_update(start.row for start in plan.started)
        if self._broken:
            # What a dropped run was to sample, its forks go without.
            forked = [chunk.samples for chunk in plan.chunks if chunk.row in self._broken]
            plan, step.kept = drop_runs(plan, self._broken)
            self._broken.update(*forked)
        try:
            self.mover.begin(plan)
            self.rows.apply(plan)
            self.sampler.end(plan.ended)
            self.sampler.start(plan.started)
            self.sampler.set_masks(plan.masks)
            if plan.computes:
                self._compute(step, plan)
        except BaseException:
            self._broken.update(_rows_of(step.plan))
            raise

    def _compute(self, step: Step, plan: StepPlan) -> None:
        guesses = None
        if (replayed := self._replay(plan)) is not None:
            logits, packed = replayed
            *_, sampled_rows, positions = (self._numbers[section] for section in packed.layout.sections)
        else:
            packed = pack(plan, self.rows, self.stream)
            self._send(packed)
            if self.draft_model is not None and any(UNKNOWN in run.drafts for run in plan.drafted):
                token_ids = self._numbers[packed.layout.sections[3]]
                guesses = self.draft_model.guess(plan.drafted, len(plan.decodes.rows), token_ids)
            inputs = self._inputs(shape_of(plan, packed.layout, self.block_size))
            hidden = self.model.forward(inputs.input_ids, inputs.positions, inputs.metadata)
            if self.draft_model is not None:
                assert self.kv_cache is not None
                self.draft_model.follow(inputs, self.kv_cache.groups)
            step.prompt_logprobs = self._prompt_logprobs(plan, hidden)
            if not plan.num_samples:
                return
            if plan.chunks:  # a step of decodes alone samples from each of its tokens
                hidden = hidden.index_select(0, inputs.sampled_tokens)
            logits = self.model.compute_logits(hidden)
            sampled_rows, positions = inputs.sampled_rows, inputs.sampled_positions
        if plan.num_samples:
            drafts = None
            if plan.drafted:
                drafts = Drafts.of(plan.drafted, len(plan.decodes.rows), len(logits), self.stream, guesses)
            step.samples = self._sample(logits, packed, sampled_rows, positions, drafts)

    def _replay(self, plan: StepPlan) -> tuple[Tensor, Packed] | None:
        """The logits of a step that was recorded, and its numbers; None for any other."""
        if self.graphs is None or (self.backend.reads_shared_once and any(plan.num_common_blocks)):
            return None
        if not self.stream.records_ahead and torch.autograd._profiler_enabled():
            return None  # it is to see the operations, which a replay goes without
        if plan.drafted and not plan.chunks:
            size = len(plan.decodes.rows) + len(plan.drafted), max(run.num_new for run in plan.drafted)
            return self._replay_in(self.graphs.drafted, size, plan, pack_drafted)
        if not plan.chunks:
            return self._replay_in(self.graphs.decodes, len(plan.decodes.rows), plan, pack)
        if self._is_prompt_alone(plan):
            return self._replay_in(self.graphs.prompts, plan.num_new_tokens, plan, pack_prompt)
        return None

    def _replay_in(
        self,
        steps: RecordedSteps[Size],
        size: Size,
        plan: StepPlan,
        pack: Callable[[StepPlan, Rows, Stream, Size], Packed],
    ) -> tuple[Tensor, Packed] | None:
        bucket = steps.bucket_for(size)
        if bucket is None:
            return None
        packed = pack(plan, self.rows, self.stream, bucket)
        self._send(packed)
        logits = steps.replay(bucket)
        return None if logits is None else (logits, packed)

    def _is_prompt_alone(self, plan: StepPlan) -> bool:
        """Whether nothing is computed but a chunk, and nothing is asked for but its logits."""
        chunk = plan.chunks[0]
        asked = self.rows.prompt_logprobs.get(chunk.row) is not None
        return plan.num_new_tokens == chunk.num_new and len(chunk.samples) <= 1 and not asked

    def _send(self, packed: Packed) -> None:
        self._numbers[: packed.layout.size].copy_(packed.numbers, non_blocking=True)

    def _sample(
        self, logits: Tensor, packed: Packed, rows: Tensor, positions: Tensor, drafts: Drafts | None
    ) -> Samples:
        on_host, kept = (packed.sampled_rows, packed.sampled_positions), self.rows.last_tokens
        return self.sampler.sample(logits, *on_host, rows, positions, kept, drafts)

    def _inputs(self, shape: StepShape) -> InputBatch:
        """The tensors of a step whose numbers have arrived."""
        assert self.kv_cache is not None
        return unpack(shape, self._numbers, self.rows, self.kernels, self.kv_cache, self.block_size)

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> list[PromptPart]:
        """Of the chunks of prompts that asked for them."""
        parts = []
        first = plan.num_decode_tokens
        for chunk in plan.chunks:
            start, end = chunk.num_computed + 1, chunk.num_computed + chunk.num_new + 1
            count = self.rows.prompt_logprobs.get(chunk.row)
            tokens = self.rows.token_ids[chunk.row][start:end]
            if count is not None and tokens:
                before = hidden[first : first + len(tokens)]
                logits_of = self.model.compute_logits
                parts.append(
                    compute_prompt_logprobs(
                        before, logits_of, tokens, count, row=chunk.row, start=start, stream=self.stream
                    )
                )
            first += chunk.num_new
        return parts

    # ---- what is recorded: steps of some size, on tensors that stay where they are

    @torch.inference_mode()
    def prepare_decodes(self, size: int) -> None:
        """Put the numbers of a decode step that is all padding where a recorded step reads them."""
        self._send(pack(StepPlan(), self.rows, self.stream, size))

    @torch.inference_mode()
    def prepare_drafted(self, size: tuple[int, int]) -> None:
        """The same for a step with drafts, of (runs, tokens of each)."""
        self._send(pack_drafted(StepPlan(), self.rows, self.stream, size))

    @torch.inference_mode()
    def prepare_prompt(self, size: int) -> None:
        """The same for a prompt of some tokens."""
        self._send(pack_prompt(StepPlan(), self.rows, self.stream, size))

    @torch.inference_mode()
    def decode_logits(self, size: int) -> Tensor:
        """A decode step of some size, from its numbers to its logits."""
        inputs = self._inputs(self._longest_shape(Layout.of_decodes(size), size, [1] * size))
        return self.model.compute_logits(self.model.forward(inputs.input_ids, inputs.positions, inputs.metadata))

    @torch.inference_mode()
    def drafted_logits(self, size: tuple[int, int]) -> Tensor:
        """Up to so many runs of up to so many tokens and one of padding, from their numbers to the logits of all tokens."""
        num_runs, num_tokens = size[0] + 1, size[1]
        shape = self._longest_shape(Layout.of_drafted(*size), num_runs, [num_tokens] * num_runs)
        shape.longest_run = size[0] * num_tokens
        inputs = self._inputs(shape)
        return self.model.compute_logits(self.model.forward(inputs.input_ids, inputs.positions, inputs.metadata))

    @torch.inference_mode()
    def prompt_logits(self, size: int) -> Tensor:
        """A chunk of up to so many tokens and a run of padding behind it, from their numbers to the logits of the last."""
        inputs = self._inputs(self._longest_shape(Layout.of_prompt(size), 0, [size, size]))
        hidden = self.model.forward(inputs.input_ids, inputs.positions, inputs.metadata)
        return self.model.compute_logits(hidden.index_select(0, inputs.sampled_tokens))

    def _longest_shape(self, layout: Layout, num_decodes: int, query_lens: list[int]) -> StepShape:
        """That of sequences of any length."""
        width = self.rows.tables.shape[2]
        return StepShape(layout, num_decodes, query_lens, [width * self.block_size] * len(query_lens), width)


def _fill_up(result: StepResult, plan: StepPlan, kept: list[int]) -> None:
    """Samples of dropped runs have no token, and none of their drafts was accepted."""
    token_ids = [UNKNOWN] * plan.num_samples
    for place, token in zip(kept, result.token_ids, strict=True):
        token_ids[place] = token
    result.token_ids = token_ids
    result.logprobs = {kept[i]: entries for i, entries in result.logprobs.items()}
    first, numbers, accepted = len(plan.decodes.rows), set(kept), iter(result.num_accepted)
    result.num_accepted = []
    for run in plan.drafted:
        result.num_accepted.append(next(accepted) if first in numbers else 0)
        first += run.num_new


def drop_runs(plan: StepPlan, rows: Iterable[int]) -> tuple[StepPlan, list[int]]:
    """A plan without the runs of some rows, and which of its samples are left."""
    gone = set(rows)
    keep = np.array([row not in gone for row in plan.decodes.rows], dtype=bool)
    kept = np.flatnonzero(keep).tolist()
    number = len(keep)
    drafted = []
    for run in plan.drafted:
        if run.row not in gone:
            drafted.append(run)
            kept += range(number, number + run.num_new)
        number += run.num_new
    chunks = []
    for chunk in plan.chunks:
        if chunk.row not in gone:
            chunks.append(chunk)
            kept += range(number, number + len(chunk.samples))
        number += len(chunk.samples)
    decodes = Decodes(plan.decodes.rows[keep], plan.decodes.num_computed[keep])
    return replace(plan, decodes=decodes, drafted=drafted, chunks=chunks), kept


def _rows_of(plan: StepPlan) -> set[int]:
    """All rows that a plan starts, changes or computes."""
    rows = {start.row for start in plan.started} | {entries.row for entries in plan.tables}
    rows |= set(plan.decodes.rows.tolist()) | {run.row for run in plan.drafted}
    return rows.union(*((chunk.row, *chunk.samples) for chunk in plan.chunks))
