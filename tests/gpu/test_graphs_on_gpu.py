"""Recorded decode steps on an NVIDIA GPU: in every size they do what unrecorded ones do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.modes import MODES, Mode, running_in
from nanoengine import LLM, SamplingParams
from nanoengine.core.sequence import Phase, Request
from nanoengine.kernels.recording.buckets import Bucket, decode_buckets, prompt_buckets
from nanoengine.kernels.recording.cuda_recorder import CudaRecorder
from nanoengine.kernels.recording.recorded_steps import RecordedSteps
from tests.e2e.small_engine import assert_idle, submit
from tests.gpu.engines import MAX_LEN, VOCAB_SIZE, generate, open_llm
from tests.gpu.marks import needs_gpu
from tests.support import fill_kv_with_nan, model_runner

pytestmark = needs_gpu

MOST = 21
NEAR = {"float32": 1e-3, "bfloat16": 0.15}
"""Largest difference of two logits, where the logits' standard deviation is 1."""


def recorded(llm: LLM) -> RecordedSteps:
    steps = model_runner(llm).recorder
    assert isinstance(steps, RecordedSteps)
    return steps


class BothWays:
    """Replays every step, and runs it unrecorded too, on the same numbers: the logits must be the same but for rounding.

    Tokens may differ where two logits are nearly equal, since a library may multiply otherwise in a recorded step.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch):
        self.runner, self.steps = model_runner(llm), recorded(llm)
        self.error = dict.fromkeys(self.steps.buckets, -1.0)
        replays = {key: partial(self.compare, key[0], replay) for key, replay in self.steps._replays.items()}
        monkeypatch.setattr(self.steps, "_replays", replays)

    def compare(self, bucket: Bucket, replay: Callable[[], torch.Tensor]) -> torch.Tensor:
        batch, model = self.runner.batch(bucket.shape(self.steps._max_len)), self.runner.model
        hidden = model.forward(batch.input_ids, batch.positions, batch.metadata)
        if bucket.is_prompt:
            hidden = hidden.index_select(0, batch.sampled_tokens)
        unrecorded = model.compute_logits(hidden).double()
        logits = replay()
        error = (logits.double() - unrecorded).abs().amax() / unrecorded.std()
        self.error[bucket] = max(self.error[bucket], float("inf") if error.isnan() else error.item())
        return logits

    def check(self, dtype: str, *, prompts: bool) -> None:
        """Every size was replayed, and right."""
        errors = {bucket: error for bucket, error in self.error.items() if bucket.is_prompt == prompts}
        assert errors
        assert all(0 <= error <= NEAR[dtype] for error in errors.values()), errors


def decode_in_sizes(llm: LLM, sizes: list[int]) -> None:
    """A few decode steps of each size, which descend: so many requests run, and the others are stopped."""
    llm.reset_prefix_cache()
    fill_kv_with_nan(llm)
    engine, scheduler = llm.engine, llm.engine.scheduler
    running: list[Request] = []
    for i in range(sizes[0]):
        length = 1 + 3 * i % (MAX_LEN // 2)
        params = SamplingParams(temperature=0.6 * (i % 2), seed=i, ignore_eos=True, max_tokens=MAX_LEN - length)
        running.append(submit(llm, [(11 * i + j) % VOCAB_SIZE for j in range(length)], params))
    while scheduler.waiting or any(seq.phase is Phase.PREFILLING for seq in scheduler.running):
        engine.step()
    for size in sizes:
        while len(running) > size:
            engine.abort(running.pop().request_id)
        for _ in range(2):
            engine.step()
    for request in running:
        engine.abort(request.request_id)
    assert_idle(llm)


@pytest.mark.parametrize("mode", MODES[:2], ids=str)
@pytest.mark.parametrize(("dtype", "most"), [("float32", MOST), ("bfloat16", 256)])
def test_every_size_replays_what_an_unrecorded_step_does(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, most: int, mode: Mode
) -> None:
    """Whole steps, and those that are filled up with padding."""
    buckets = [bucket.num_runs for bucket in decode_buckets(most)]
    sizes = sorted({*buckets, *(size + 1 for size in buckets[:-1])}, reverse=True)
    options: dict[str, Any] = {"dtype": dtype, "max_num_seqs": most, "num_kv_blocks": most * MAX_LEN // 16}
    with open_llm(checkpoint, kernels="triton", attention_backend="triton", **options) as llm, running_in(llm, mode):
        assert recorded(llm).buckets[: len(buckets)] == decode_buckets(most)
        both = BothWays(llm, monkeypatch)
        decode_in_sizes(llm, sizes)
        both.check(dtype, prompts=False)


@pytest.mark.parametrize("dtype", NEAR)
def test_every_size_of_a_prompt_replays_what_an_unrecorded_step_does(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Prompts that come one by one, and are as long as a recording or shorter."""
    options: dict[str, Any] = {"dtype": dtype, "max_model_len": 512, "max_num_batched_tokens": 512}
    with open_llm(checkpoint, kernels="triton", attention_backend="triton", **options) as llm:
        assert [own for own in recorded(llm).buckets if own.is_prompt] == prompt_buckets(512, 512)
        both = BothWays(llm, monkeypatch)
        for length in (70, 128, 129, 192, 250, 256, 300, 384, 400, 511):
            prompt = [(length + 7 * j) % VOCAB_SIZE for j in range(length)]
            generate(llm, [prompt], [SamplingParams(temperature=0.0, max_tokens=1)])
        both.check(dtype, prompts=True)


def test_all_sizes_have_their_results_in_the_memory_of_the_largest() -> None:
    recorder, ones = CudaRecorder(torch.device("cuda", torch.cuda.current_device())), torch.ones(64, device="cuda")

    def double(size: int) -> torch.Tensor:
        return 2 * ones[:size, None].repeat(1, 1 << 16)

    replays = {64: recorder.record(partial(double, 64))}
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    replays |= {size: recorder.record(partial(double, size)) for size in (48, 32, 8)}
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved
    for size, replay in replays.items():
        found = replay()
        assert found.shape == (size, 1 << 16)
        assert (found == 2).all()
