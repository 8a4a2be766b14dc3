"""Recorded steps give the same bits as steps that are not recorded, and are used."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from nanoengine.builder import build_engine, read_config
from nanoengine.core.inputs import pack
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.kernels.recording.buckets import Bucket, pad
from nanoengine.kernels.recording.recorded_steps import RecordedSteps
from tests.kernels.marks import needs_kernels

DEMO = str(Path(__file__).parents[3] / "nanoengine" / "demo")
pytestmark = needs_kernels


def build(**options: Any) -> Any:
    return build_engine(read_config(DEMO, {"dtype": "float32", "max_model_len": 100} | options), use_tqdm=False).engine


def watch(engine: Any) -> list[tuple[Any, Any]]:
    """What is replayed from here on: plans and what their steps return."""
    recorder, replays = engine.executor.recorder, list[tuple[Any, Any]]()
    if recorder is not None:
        logits = recorder.logits

        def watched(plan: Any) -> Any:
            if (found := logits(plan)) is not None:
                replays.append((plan, found))
            return found

        recorder.logits = watched
    return replays


def answer(engine: Any, given: Iterable[tuple[list[int], CoreSamplingParams]], *, together: bool) -> list[list[int]]:
    """Tokens for each prompt: one comes a step, or when the one before it has ended. The engine is closed then."""
    requests = []
    for prompt, params in given:
        requests.append(engine.make_request(prompt, params))
        engine.submit(requests[-1])
        engine.step()
        while engine.has_unfinished and not together:
            engine.step()
    while engine.has_unfinished:
        engine.step()
    found = [request.output().outputs[0].token_ids for request in requests]
    engine.close()
    return found


def mixed() -> list[tuple[list[int], CoreSamplingParams]]:
    rng = random.Random(0)
    prompts = [[rng.randrange(1, 4096) for _ in range(rng.randint(1, 40))] for _ in range(12)]
    hows = [{"temperature": 0.9 * (i % 2), "seed": i, "max_tokens": 4 + 2 * i, "ignore_eos": True} for i in range(12)]
    return [(prompt, CoreSamplingParams(**how)) for prompt, how in zip(prompts, hows, strict=True)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"quantization": "int8", "max_num_seqs": 3}, {"num_kv_blocks": 9, "async_scheduling": True}], ids=str
)
def test_recorded_steps_change_no_token(options: dict[str, Any]) -> None:
    recording, eager = build(**options), build(enforce_eager=True, **options)
    replays = watch(recording)
    assert answer(recording, mixed(), together=True) == answer(eager, mixed(), together=True)
    assert len(replays) > 10


def test_a_step_one_further_has_the_numbers_of_one_that_is_packed() -> None:
    """Requests of drawn lengths: steps with the same rows as the one before them, and others; in each, all numbers."""
    engine = build(max_num_seqs=5, async_scheduling=True)
    steps, runner = engine.executor.recorder, engine.executor
    steps.buckets = [Bucket(False, size, 1) for size in (2, 5)]  # most steps are padded
    one_further, seen = steps._one_further, list[int]()

    def numbers(packed: Any) -> Any:
        used = [packed.numbers.numpy()[section].tolist() for section in packed.sections]
        return used, [own.tolist() for own in packed.sampled]

    def compared(last: Any, plan: Any) -> Any:
        logits, packed = one_further(last, plan)
        seen.append(len(plan.decode_rows))
        given = pack(plan, runner.rows)
        shape = Bucket(False, len(packed.query_lens), 1).shape(steps._max_len)
        assert numbers(packed) == numbers(pad(given, shape, runner.rows))
        return logits, packed

    steps._one_further = compared
    answer(engine, mixed(), together=True)
    assert len(seen) > 20
    assert len(set(seen)) > 3


@pytest.mark.parametrize(
    "options", [{"kernels": "torch"}, {"attention_backend": "torch"}, {"enforce_eager": True}], ids=str
)
def test_nothing_is_recorded_where_something_cannot_be(options: dict[str, Any]) -> None:
    engine = build(**options)
    assert engine.executor.recorder is None
    engine.close()


def test_a_step_that_reads_numbers_from_a_tensor_is_not_recorded() -> None:
    reading, eager = build(), build(enforce_eager=True)
    runner, recorder = reading.executor, reading.executor.recorder
    forward = runner.model.forward

    def watched(ids: Any, *args: Any) -> Any:
        assert ids.sum().item() >= 0
        return forward(ids, *args)

    runner.model.forward = watched
    assert answer(reading, mixed()[:1], together=True) == answer(eager, mixed()[:1], together=True)
    assert isinstance(recorder, RecordedSteps)
    assert recorder.buckets == []


def test_a_sequence_with_drafts_is_replayed_in_a_recording_of_just_its_tokens() -> None:
    """One request after the other: the second replays what the first has recorded."""
    given = [([5, 6, 7, 8] * 8, CoreSamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))] * 2
    recording, eager = build(speculation="ngram"), build(speculation="ngram", enforce_eager=True)
    replays = watch(recording)
    assert answer(recording, given, together=False) == answer(eager, given, together=False)
    sizes = {(plan.num_tokens, len(logits)) for plan, (logits, *_) in replays if plan.num_drafted}
    assert sizes
    assert all(tokens == rows > 1 for tokens, rows in sizes)
