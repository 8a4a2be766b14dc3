"""What a GPU does, on a CPU: steps are recorded, as CUDA graphs are, and replayed for every decode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoengine import SamplingParams
from nanoengine.kernels.recording.recorded_steps import RecordedSteps
from tests.e2e.late import late_device
from tests.e2e.small_engine import open_llm
from tests.support import model_runner

PROMPTS = [[(37 * i + 11 * j) % 200 for j in range(1 + 16 * i)] for i in range(3)]


def test_every_decode_step_is_replayed_from_a_recording_whatever_its_sampling_needs(tiny: Path) -> None:
    options: dict[str, Any] = {"async_scheduling": True, "kernels": "torch", "max_num_seqs": 7, "num_kv_blocks": 200}
    with late_device(can_record=True) as device, open_llm(tiny, **options) as llm:
        steps = model_runner(llm).recorder
        assert isinstance(steps, RecordedSteps)
        assert [bucket.num_runs for bucket in steps.buckets if not bucket.is_prompt] == [1, 2, 4, 7]
        plain = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        llm.generate([[i, 5] for i in range(7)], plain, use_tqdm=False)
        replays = [recording.num_replays for recording in device.recordings]
        assert replays == [8, 0, 0, 0], "the largest was recorded first"
        for more in ({}, {"logprobs": 1}, {"presence_penalty": 1.0}, {"logit_bias": {7: 3.0}}, {"min_tokens": 9}):
            llm.generate(PROMPTS, replace(plain, **more), use_tqdm=False)
        assert [recording.num_replays for recording in device.recordings] == [8, 5 * 8, 0, 0]
