"""However tokens are guessed ahead, requests get what each gets alone and without guesses: tokens, text, ends, log probabilities.

Requests are drawn once, and run one by one in an engine that guesses nothing. Then engines and guessers are drawn: those of the
engine, one who has read the answers and errs now and then, and some who mean harm. K/V that nobody wrote is NaN.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nanoengine import RequestOutput, SamplingParams
from nanoengine.core.messages import StepPlan
from nanoengine.core.sampler import Read
from nanoengine.errors import StepFailed
from tests.e2e.late import late_device
from tests.e2e.small_engine import Broken, assert_idle, open_llm
from tests.e2e.speculating import (
    FEW,
    GUESSERS,
    MAX_LEN,
    NEAR,
    NUM_REQUESTS,
    REQUESTS,
    assert_same,
    draw_speculating,
    note,
    run,
    teach,
)
from tests.support import fill_kv_with_nan, model_runner, tiny_checkpoint

# ---- one model


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads that native attention can compute."""
    return tiny_checkpoint(tmp_path_factory.mktemp("native"), head_dim=32)


BARE: dict[str, Any] = {"max_num_seqs": 4, "enable_prefix_caching": False, "async_scheduling": False}


class Alone(NamedTuple):
    """What each gets that runs one at a time, with nothing shared and nothing guessed."""

    requests: list[RequestOutput]
    beams: list[RequestOutput]  # for the first prompts


def each_alone(folder: Path, **options: Any) -> Alone:
    with open_llm(folder, max_model_len=MAX_LEN, num_kv_blocks=90, **BARE, **options) as llm:
        requests = [run(llm, [request])[0] for request in REQUESTS]
        return Alone(requests, [run(llm, [], [prompt])[0] for prompt, _ in REQUESTS[: len(GUESSERS)]])


@pytest.fixture(scope="module")
def alone(native: Path) -> Alone:
    return each_alone(native)


@pytest.fixture(scope="module")
def alone_in_8_bits(native: Path) -> Alone:
    return each_alone(native, kv_cache_dtype="int8")


@pytest.mark.parametrize("guesser", GUESSERS)
def test_guesses_change_nothing_that_is_said(
    native: Path, tmp_path: Path, alone: Alone, alone_in_8_bits: Alone, guesser: str
) -> None:
    seen: Counter[str] = Counter()
    number = 4 * GUESSERS.index(guesser)
    for i in range(number, number + 4):
        chosen = random.Random(i).sample(range(NUM_REQUESTS), 8)
        options = draw_speculating(i, guesser, tmp_path)
        those = alone_in_8_bits if options["kv_cache_dtype"] == "int8" else alone
        requests, right = [REQUESTS[n] for n in chosen], [those.requests[n] for n in chosen]
        beams = those.beams[i // 4 : i // 4 + 1] if i % 4 < 2 else []
        with ExitStack() as stack:
            if i % 2:
                device = stack.enter_context(late_device(can_record=options["kernels"] == "torch", seed=i))
            llm = stack.enter_context(open_llm(native, max_model_len=MAX_LEN, **options))
            fill_kv_with_nan(llm)
            teach(llm, guesser, those.requests, i // 4)
            for _ in range(2):  # the second time with what the first has left in the cache
                found = run(llm, requests, [output.prompt_token_ids for output in beams])
                for own, expected in zip(found, right + beams, strict=True):
                    assert_same(own, expected, NEAR[options["kv_cache_dtype"]])
            note(seen, llm.metrics)
        seen.update(overlapping=device.num_overlapping if i % 2 else 0, beams=len(beams))
    assert seen["drafts"] > 150
    assert seen["accepted"] > 50
    assert (seen["rejected"] > 30) == (guesser != "knows")
    for happened in ("preemptions", "saved", "hits", "postponed", "overlapping", "beams"):
        assert seen[happened] > 0, happened


def test_the_requests_end_in_every_way(alone: Alone) -> None:
    ends = Counter((o.finish_reason, type(o.stop_reason)) for output in alone.requests for o in output.outputs)
    assert ends[("length", type(None))] > 10
    assert ends[("stop", str)] > 3
    assert ends[("stop", int)] > 3


def test_streams_say_the_same_and_whoever_leaves_early_harms_nobody(native: Path) -> None:
    """Tokens that come together are read one by one: a stop string among them ends the text where it ends it otherwise."""
    wishes: dict[str, Any] = {"allowed_token_ids": FEW, "stop": ["ba", "fed", "cc"], "max_tokens": 20}
    requests = [(prompt, SamplingParams(seed=i, **wishes)) for i, (prompt, _) in enumerate(REQUESTS[:12])]
    with open_llm(native, max_model_len=MAX_LEN, num_kv_blocks=60, speculation="ngram") as llm:
        fill_kv_with_nan(llm)
        expected = run(llm, [(prompt, replace(params, speculate=False)) for prompt, params in requests])
        endless = run(llm, [(prompt, replace(params, speculate=False, stop=())) for prompt, params in requests])
        teach(llm, "knows", endless)
        for (prompt, params), other in zip(requests, expected, strict=True):
            with closing(llm.stream(prompt, params)) as early:
                next(early, None)
            assert "".join(llm.stream(prompt, params)) == other.outputs[0].text
        assert_idle(llm)
        stats = llm.metrics.speculation
    assert sum(isinstance(output.outputs[0].stop_reason, str) for output in expected) > 6
    assert stats is not None
    assert stats.num_accepted > 100


# ---- steps that fail


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_with_drafts_that_fails_ends_those_in_it_alone(
    native: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch, policy: str, overlap: bool
) -> None:
    """Each time another one, until none has failed; then all have what they get alone."""
    requests = REQUESTS[:7]
    options: dict[str, Any] = {"scheduling_policy": policy, "async_scheduling": overlap, "speculation": "ngram"}
    num_ended = 0
    with ExitStack() as stack:
        if overlap:
            stack.enter_context(late_device(seed=1))
        llm = stack.enter_context(open_llm(native, max_model_len=MAX_LEN, num_kv_blocks=60, max_num_seqs=4, **options))
        fill_kv_with_nan(llm)
        teach(llm, "errs", alone.requests)
        runner = model_runner(llm)
        compute = runner._compute
        for fails_at in range(1, 26, 4):
            num_drafted, in_step = 0, set[int]()

            def failing(plan: StepPlan) -> list[Read]:
                nonlocal num_drafted
                reads = compute(plan)
                num_drafted += bool(plan.num_drafted)
                if plan.num_drafted and num_drafted == fails_at:  # noqa: B023
                    in_step.update(rows_of(plan))  # noqa: B023
                    raise Broken("behind a step with drafts")
                return reads

            monkeypatch.setattr(runner, "_compute", failing)
            try:
                outputs = run(llm, requests)
            except StepFailed as failed:
                outputs = failed.outputs
                assert_idle(llm)
            ended = 0
            for found, expected in zip(outputs, alone.requests, strict=False):
                if any(completion.finish_reason == "error" for completion in found.outputs):
                    ended += sum(completion.finish_reason == "error" for completion in found.outputs)
                else:
                    assert_same(found, expected)
            assert ended <= len(in_step)
            assert bool(ended) == bool(in_step)
            num_ended += ended
        monkeypatch.undo()
        for found, expected in zip(run(llm, requests), alone.requests, strict=False):
            assert_same(found, expected)
    assert num_ended > 5


def rows_of(plan: StepPlan) -> set[int]:
    return {*plan.decode_rows.tolist(), *(run.row for run in plan.runs)}
