"""Overlapping steps and recorded decode steps, end to end, on a device on which time passes: tokens are always the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.errors import StepFailed
from nanoengine.recording.recorded_steps import RecordedSteps
from tests.e2e.late import LateDevice, late_device
from tests.e2e.small_engine import POISON, assert_idle, finish, open_llm, raise_on_poison, sabotage, step, submit
from tests.support import fill_kv_with_nan, model_runner

VOCAB = 200
Tokens = list[list[list[int]]]


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with late_device() as device:
        yield device


def overlapping(folder: Path, **options: Any) -> LLM:
    llm = open_llm(folder, **{"async_scheduling": True, "kernels": "torch"} | options)
    fill_kv_with_nan(llm)
    return llm


PROMPTS = [[(37 * i + 11 * j) % VOCAB for j in range(1 + (13 * i) % 29)] for i in range(14)]
SHARED = [PROMPTS[9] + [i] for i in range(4)]
"""Prompts that begin alike."""

PARAMS = [
    SamplingParams(
        temperature=0.8 * (i % 2), top_p=0.9 if i % 4 == 1 else 1.0, top_k=20 * (i % 3), seed=i, max_tokens=5 + i % 9,
        n=1 + (i % 5 == 0), min_tokens=3 * (i % 2), stop_token_ids=list(range(0, VOCAB, 11)),
        logprobs=2 if i == 7 else None,
    )
    for i in range(18)
]  # fmt: skip


@pytest.fixture(scope="module")
def right(tiny: Path) -> Tokens:
    with open_llm(tiny, num_kv_blocks=200, kernels="torch", async_scheduling=False) as llm:
        return generate(llm)


def generate(llm: LLM) -> Tokens:
    outputs = llm.generate(PROMPTS + SHARED, PARAMS, use_tqdm=False)
    assert_idle(llm)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_blocks": 5, "block_size": 16, "max_num_seqs": 8},  # preempts all the time
        {"num_kv_blocks": 30, "block_size": 4, "max_num_batched_tokens": 13},
        {"enable_prefix_caching": False, "max_num_seqs": 5},
    ],
    ids=["plenty", "few blocks", "chunks", "no prefixes"],
)
def test_tokens_are_those_of_one_step_at_a_time(
    tiny: Path, right: Tokens, options: dict[str, Any], graphs: bool, seed: int | None
) -> None:
    with late_device(can_record=graphs, seed=seed) as device, overlapping(tiny, **options) as llm:
        assert generate(llm) == right
        assert generate(llm) == right, "with the prefix cache of the first time"
        assert device.num_overlapping > 0.3 * device.num_done
        if options.get("num_kv_blocks") == 5:
            assert llm.engine.scheduler.num_preemptions > 5
        assert bool(sum(recording.num_replays for recording in device.recordings)) == graphs


def test_one_step_at_a_time_never_overlaps(tiny: Path, right: Tokens, device: LateDevice) -> None:
    with overlapping(tiny, async_scheduling=False) as llm:
        assert generate(llm) == right
    assert device.num_overlapping == 0


def test_every_decode_step_is_replayed_from_a_recording_whatever_its_sampling_needs(
    tiny: Path,
) -> None:
    with late_device(can_record=True) as device, overlapping(tiny, max_num_seqs=7, num_kv_blocks=200) as llm:
        steps = model_runner(llm).recorder
        assert isinstance(steps, RecordedSteps)
        assert [bucket.num_runs for bucket in steps.buckets if not bucket.is_prompt] == [1, 2, 4, 7]
        plain = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        llm.generate(PROMPTS[:7], plain, use_tqdm=False)
        assert [recording.num_replays for recording in device.recordings] == [8, 0, 0, 0], (
            "the largest was recorded first"
        )
        llm.generate(PROMPTS[:3], plain, use_tqdm=False)
        assert [recording.num_replays for recording in device.recordings] == [8, 8, 0, 0]
        for more in ({"logprobs": 1}, {"presence_penalty": 1.0}, {"bad_words": ["a"]}, {"min_tokens": 9}):
            llm.generate(PROMPTS[:3], replace(plain, **more), use_tqdm=False)
        assert [recording.num_replays for recording in device.recordings] == [8, 5 * 8, 0, 0]


def test_eager_means_no_recordings(tiny: Path, right: Tokens, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, logger="nanoengine"),
        late_device(can_record=True) as device,
        overlapping(tiny, enforce_eager=True) as llm,
    ):
        assert "no recorded steps" in caplog.text
        assert generate(llm) == right
    assert not device.recordings


def test_a_prompt_of_max_model_len_beside_short_ones_in_one_recording(tiny: Path) -> None:
    prompts = [[(7 * j) % VOCAB for j in range(63)], [1, 2], [3] * 40]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)

    def run(**options: Any) -> list[list[int]]:
        with overlapping(tiny, **options) as llm:
            outputs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
            return [output.outputs[0].token_ids for outputs in outputs for output in outputs]

    expected = run(async_scheduling=False)
    with late_device(can_record=True):
        assert run() == expected


@pytest.mark.parametrize("abort_after", range(1, 8))
@pytest.mark.usefixtures("device")
def test_aborts_leave_the_others_alone(tiny: Path, right: Tokens, abort_after: int) -> None:
    with overlapping(tiny, num_kv_blocks=12) as llm:
        requests = [submit(llm, prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=False)]
        for _ in range(abort_after):
            llm.engine.step()
        for request in requests[::3]:
            llm.engine.abort(request.request_id)
        finish(llm)
        for i, request in enumerate(requests):
            for completion, tokens in zip(request.output().outputs, right[i], strict=True):
                aborted = completion.finish_reason == "abort"
                assert completion.token_ids == (tokens[: len(completion.token_ids)] if aborted else tokens)


@pytest.mark.usefixtures("device")
def test_a_failing_step_ends_its_own_requests_when_its_results_are_due(
    tiny: Path, right: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    with overlapping(tiny) as llm:
        sabotage(llm, monkeypatch, raise_on_poison)
        good = [submit(llm, prompt, params) for prompt, params in zip(PROMPTS[:3], PARAMS, strict=False)]
        step(llm, 3)
        bad = submit(llm, [POISON] * 20, SamplingParams(max_tokens=9))
        finish(llm)
        assert bad.error is not None
        assert [[c.token_ids for c in request.output().outputs] for request in good] == right[:3]
        with pytest.raises(StepFailed):
            llm.generate([[POISON]], use_tqdm=False)
        assert_idle(llm)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("depth", [True, False])
def test_a_row_of_nan_ends_its_own_request_and_no_other(
    tiny: Path, right: Tokens, monkeypatch: pytest.MonkeyPatch, depth: bool
) -> None:
    with overlapping(tiny, async_scheduling=depth) as llm:
        model = model_runner(llm).model
        compute, calls = model.compute_logits, 0

        def compute_nan(hidden: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            logits = compute(hidden)
            if calls == 3:
                logits[1] = torch.nan
            return logits

        monkeypatch.setattr(model, "compute_logits", compute_nan)
        with pytest.raises(StepFailed, match="1 of 3 requests failed: no logit is finite") as error:
            llm.generate(PROMPTS[4:7], PARAMS[4:7], use_tqdm=False)
        assert_idle(llm)
        outputs = error.value.outputs
        assert [output.outputs[0].finish_reason == "error" for output in outputs] == [False, True, False]
        for i in (0, 2):
            assert [completion.token_ids for completion in outputs[i].outputs] == right[4 + i]
        broken, sound = outputs[1].outputs
        assert broken.token_ids == right[5][0][: len(broken.token_ids)]
        assert sound.token_ids == right[5][1]


def test_the_next_step_does_not_touch_what_the_last_one_has_not_read(tiny: Path, device: LateDevice) -> None:
    """The packed numbers of a step in flight are its own: the device hands each out once, and reads it late."""
    handed_out: list[torch.Tensor] = []
    host_tensor = device.host_tensor

    def noting(size: int, dtype: torch.dtype) -> torch.Tensor:
        handed_out.append(host_tensor(size, dtype))
        return handed_out[-1]

    device.host_tensor = noting  # type: ignore[method-assign]
    with overlapping(tiny) as llm:
        submit(llm, PROMPTS[3], PARAMS[4])
        llm.engine.step()
        packed = [tensor.clone() for tensor in handed_out]
        submit(llm, PROMPTS[5], PARAMS[6])
        llm.engine.step()
        assert all(torch.equal(a, b) for a, b in zip(packed, handed_out, strict=False))


def test_tiers_and_overlap_go_together(tiny: Path) -> None:
    with open_llm(tiny, async_scheduling=True, preemption_mode="swap") as llm:
        assert llm.engine.depth == 2
    with open_llm(tiny, preemption_mode="swap") as llm:
        assert llm.engine.depth == 1, "on the CPU steps overlap only if that is asked for"
