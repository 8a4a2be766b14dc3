"""Recorded steps give the same bits as steps that are not recorded, and are used."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from nanoengine.builder import build_engine, read_config
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.kernels.recording.recorded_steps import RecordedSteps
from tests.kernels.marks import needs_kernels

DEMO = str(Path(__file__).parents[3] / "nanoengine" / "demo")
pytestmark = needs_kernels


def build(**options: Any) -> Any:
    return build_engine(read_config(DEMO, {"dtype": "float32", "max_model_len": 100} | options), use_tqdm=False).engine


def answers(**options: Any) -> tuple[list[list[int]], Any, int]:
    engine, rng = build(**options), random.Random(0)
    recorder, num_replays = engine.executor.recorder, 0
    if recorder is not None:
        logits = recorder.logits

        def counted(plan: Any) -> Any:
            nonlocal num_replays
            found = logits(plan)
            num_replays += found is not None
            return found

        recorder.logits = counted
    requests = []
    for number in range(12):
        prompt = [rng.randrange(1, 4096) for _ in range(rng.randint(1, 40))]
        params = CoreSamplingParams(
            temperature=0.9 * (number % 2), seed=number, max_tokens=4 + 2 * number, ignore_eos=True
        )
        requests.append(engine.make_request(prompt, params))
        engine.submit(requests[-1])
        engine.step()
    while engine.has_unfinished:
        engine.step()
    found = [request.output().outputs[0].token_ids for request in requests]
    engine.close()
    return found, recorder, num_replays


@pytest.mark.parametrize(
    "options", [{"quantization": "int8"}, {"max_num_seqs": 3}, {"num_kv_blocks": 9, "async_scheduling": True}], ids=str
)
def test_recorded_steps_change_no_token(options: dict[str, Any]) -> None:
    expected, _, none = answers(enforce_eager=True, **options)
    found, _, num_replays = answers(**options)
    assert found == expected
    assert none == 0
    assert num_replays > 10


@pytest.mark.parametrize(
    "options", [{"kernels": "torch"}, {"attention_backend": "torch"}, {"enforce_eager": True}], ids=str
)
def test_nothing_is_recorded_where_something_cannot_be(options: dict[str, Any]) -> None:
    assert answers(**options)[1] is None


def test_a_step_that_reads_numbers_from_a_tensor_is_not_recorded() -> None:
    expected, _, _ = answers(enforce_eager=True)
    engine = build()
    runner = engine.executor
    forward = runner.model.forward

    def reading(ids: Any, *args: Any) -> Any:
        assert ids.sum().item() >= 0
        return forward(ids, *args)

    runner.model.forward = reading
    rng = random.Random(0)
    prompt = [rng.randrange(1, 4096) for _ in range(rng.randint(1, 40))]
    request = engine.make_request(prompt, CoreSamplingParams(temperature=0.0, seed=0, max_tokens=4, ignore_eos=True))
    engine.submit(request)
    while engine.has_unfinished:
        engine.step()
    assert request.output().outputs[0].token_ids == expected[0]
    assert isinstance(runner.recorder, RecordedSteps)
    assert runner.recorder.buckets == []
    engine.close()


def test_a_sequence_with_drafts_is_replayed_in_a_recording_of_just_its_tokens() -> None:
    prompt, params = [5, 6, 7, 8] * 8, CoreSamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    found, sizes = [], set()
    for eager in (False, True):
        engine = build(speculation="ngram", enforce_eager=eager)
        if (recorder := engine.executor.recorder) is not None:
            logits = recorder.logits

            def noted(plan: Any, logits: Any = logits) -> Any:
                replayed = logits(plan)
                if plan.num_drafted and replayed is not None:
                    sizes.add((plan.num_tokens, len(replayed[0])))
                return replayed

            recorder.logits = noted
        requests = [engine.make_request(prompt, params) for _ in range(2)]
        for request in requests:  # one after the other: the second replays what the first has recorded
            engine.submit(request)
            while engine.has_unfinished:
                engine.step()
        found.append([request.output().outputs[0].token_ids for request in requests])
        engine.close()
    assert found[0] == found[1]
    assert sizes
    assert all(tokens == rows > 1 for tokens, rows in sizes)


def test_steps_are_recorded_beside_speculation() -> None:
    engine = build(speculation="ngram")
    assert len(engine.executor.recorder) > 0
    engine.close()
