"""Times of requests, by a clock that passes only in steps and between them: every value is known."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.messages import UNKNOWN, StepPlan, StepResult
from nanoengine.engine.request_times import (
    FIRST_TOKEN_BOUNDS,
    LATENCY_BOUNDS,
    NUM_PREEMPTIONS_BOUNDS,
    TOKEN_BOUNDS,
    Histogram,
    RequestTimes,
    length_bounds,
)
from nanoengine.sampling_params import BeamSearchParams, SamplingParams
from tests.engine.engine_toys import Clock, Script, make_engine, run
from tests.engine.speculation.guessers import by_chance, speculation
from tests.engine.test_beam_search import BeamModel
from tests.engine.toys import FAST, ToyModel, continuation
from tests.engine.workload import Wish, serve, wishes

OF_THE_ENDED = (
    *("latency", "queue_time", "prefill_time", "decode_time", "inference_time", "time_per_token", "prompt_length"),
    *("computed_prompt_length", "generated_length", "max_tokens", "num_preemptions"),
)


class Slow(Script):
    """Each step takes a quarter of a second."""

    def __init__(self, clock: Clock, text: str = "hello, world"):
        super().__init__(text)
        self.clock = clock

    def execute(self, plan: StepPlan) -> StepResult:
        self.clock.now += 0.25
        return super().execute(plan)


class SlowToy(ToyModel):
    """The same for the model of slots."""

    def __init__(self, clock: Clock):
        super().__init__()
        self.clock = clock

    def execute(self, plan: StepPlan) -> StepResult:
        self.clock.now += 0.25
        return super().execute(plan)


def slow_engine(**options: Any) -> tuple[LLMEngine, Slow, Clock]:
    clock = Clock()
    executor = Slow(clock)
    return make_engine(executor, clock=clock, **options), executor, clock


def times(engine: LLMEngine) -> RequestTimes:
    return engine.metrics().times


def shown(engine: LLMEngine, *names: str) -> dict[str, tuple[int, float]]:
    """How many values some histograms have, and their sum."""
    return {name: (getattr(times(engine), name).count, getattr(times(engine), name).sum) for name in names}


# ---- histograms


@FAST
@given(
    bounds=st.lists(st.integers(0, 20), min_size=1, unique=True).map(sorted),
    values=st.lists(st.one_of(st.integers(0, 25), st.floats(0, 25))),
)
def test_a_bucket_holds_what_is_up_to_its_bound(bounds: list[int], values: list[float]) -> None:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    assert histogram.cumulative() == [*(sum(value <= bound for value in values) for bound in bounds), len(values)]
    assert (histogram.count, histogram.sum) == (len(values), pytest.approx(sum(values)))


def test_a_copy_of_a_histogram_changes_no_more() -> None:
    histogram = Histogram((1, 2))
    histogram.observe(1)
    before = histogram.copy()
    histogram.observe(5)
    assert (before.counts, before.sum) == ([1, 0, 0], 1)
    assert (histogram.counts, histogram.sum) == ([1, 0, 1], 6)


@pytest.mark.parametrize(
    ("longest", "bounds"),
    [
        (1, (1,)),
        (4, (1, 2)),
        (5, (1, 2, 5)),
        (64, (1, 2, 5, 10, 20, 50)),
        (100, (1, 2, 5, 10, 20, 50, 100)),
        (2048, (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)),
    ],
)
def test_lengths_are_told_apart_up_to_the_longest(longest: int, bounds: tuple[int, ...]) -> None:
    assert length_bounds(longest) == bounds


@pytest.mark.parametrize("bounds", [LATENCY_BOUNDS, FIRST_TOKEN_BOUNDS, TOKEN_BOUNDS, NUM_PREEMPTIONS_BOUNDS])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert all(a < b for a, b in pairwise(bounds))


# ---- one request


def test_the_times_of_a_request_are_those_between_its_events() -> None:
    engine, _, clock = slow_engine()
    request = engine.add_request("say", SamplingParams(max_tokens=5))
    clock.now += 3.0
    run(engine, request)
    assert shown(engine, *OF_THE_ENDED) == {
        "queue_time": (1, 3.0),
        "prefill_time": (1, 0.25),
        "decode_time": (1, 1.0),
        "inference_time": (1, 1.25),
        "latency": (1, 4.25),
        "time_per_token": (1, 0.25),
        "prompt_length": (1, 3),
        "computed_prompt_length": (1, 3),
        "generated_length": (1, 5),
        "max_tokens": (1, 5),
        "num_preemptions": (1, 0),
    }
    assert shown(engine, "time_to_first_token", "inter_token_latency", "tokens_of_step") == {
        "time_to_first_token": (1, 3.25),
        "inter_token_latency": (4, 1.0),
        "tokens_of_step": (5, 3 + 5),
    }
    assert shown(engine, "num_completions", "longest_generated") == {
        "num_completions": (1, 1),
        "longest_generated": (1, 5),
    }
    assert times(engine).inter_token_latency.counts[bisect_left(TOKEN_BOUNDS, 0.25)] == 4
    assert (times(engine).num_prompt_tokens, times(engine).num_generated_tokens) == (3, 5)


def test_what_passes_between_steps_is_waiting_for_tokens() -> None:
    engine, _, clock = slow_engine()
    engine.add_request("a", SamplingParams(max_tokens=3))
    for _ in range(3):
        clock.now += 1.0
        engine.step()
    assert shown(engine, "queue_time", "inter_token_latency") == {
        "queue_time": (1, 1.0),
        "inter_token_latency": (2, 2.5),
    }


def test_a_request_may_have_come_before_it_is_submitted() -> None:
    engine, _, clock = slow_engine()
    request = engine.make_request("a", SamplingParams(max_tokens=1))
    arrival = clock()
    clock.now += 2.0
    engine.submit(request, arrival_time=arrival)
    run(engine, request)
    assert shown(engine, "queue_time", "time_to_first_token") == {
        "queue_time": (1, 2.0),
        "time_to_first_token": (1, 2.25),
    }


def test_a_single_token_has_no_time_after_it() -> None:
    engine, *_ = slow_engine()
    run(engine, engine.add_request("a", SamplingParams(max_tokens=1)))
    assert shown(engine, "time_per_token", "decode_time", "inter_token_latency") == {
        "time_per_token": (1, 0.0),
        "decode_time": (1, 0.0),
        "inter_token_latency": (0, 0.0),
    }


def test_without_max_tokens_the_room_in_the_model_is_what_was_asked_for() -> None:
    engine, *_ = slow_engine(max_model_len=40)
    run(engine, engine.add_request("abcd", SamplingParams(max_tokens=None)))
    assert shown(engine, "max_tokens", "generated_length") == {
        "max_tokens": (1, 36),
        "generated_length": (1, len("hello, world") + 1),
    }


def test_all_chunks_of_a_prompt_are_its_prefill_and_each_counts_in_its_step() -> None:
    engine, *_ = slow_engine(budget=4)
    run(engine, engine.add_request("abcdefghij", SamplingParams(max_tokens=2)))
    assert shown(engine, "queue_time", "prefill_time", "time_to_first_token", "tokens_of_step") == {
        "queue_time": (1, 0.0),
        "prefill_time": (1, 0.75),
        "time_to_first_token": (1, 0.75),
        "tokens_of_step": (4, 10 + 2),
    }


def test_what_the_cache_has_is_no_work_but_part_of_the_prompt() -> None:
    engine, *_ = slow_engine()
    for _ in range(2):
        run(engine, engine.add_request("abcdefghij", SamplingParams(max_tokens=1)))
    snapshot = times(engine)
    assert (snapshot.num_prompt_tokens, snapshot.num_cached_prompt_tokens) == (20, 8)
    assert shown(engine, "prompt_length", "computed_prompt_length", "tokens_of_step") == {
        "prompt_length": (2, 20),
        "computed_prompt_length": (2, 12),
        "tokens_of_step": (2, 12 + 2),
    }


# ---- several


def test_whoever_finds_no_room_waits_in_the_queue() -> None:
    engine, *_ = slow_engine(max_num_seqs=1)
    requests = [engine.add_request(prompt, SamplingParams(max_tokens=4)) for prompt in "ab"]
    run(engine, *requests)
    assert shown(engine, "queue_time", "prefill_time", "latency", "time_to_first_token") == {
        "queue_time": (2, 1.0),
        "prefill_time": (2, 0.5),
        "latency": (2, 1.0 + 2.0),
        "time_to_first_token": (2, 0.25 + 1.25),
    }


def test_a_preemption_prolongs_what_it_interrupts_and_is_no_second_wait_in_the_queue() -> None:
    clock = Clock()
    engine = make_engine(SlowToy(clock), clock=clock, eos=(), num_blocks=4, max_model_len=16)
    requests = [engine.add_request([n] * 6, SamplingParams(max_tokens=9)) for n in (1, 2)]
    outputs = run(engine, *requests)
    assert shown(engine, "queue_time", "prefill_time", "num_preemptions", "generated_length", "prompt_length") == {
        "queue_time": (2, 0.0),
        "prefill_time": (2, 0.5),
        "num_preemptions": (2, 1),
        "generated_length": (2, 18),
        "prompt_length": (2, 12),
    }
    latencies = [output.metrics.latency for output in outputs]
    assert None not in latencies
    assert latencies[1] > latencies[0] == 9 * 0.25
    assert shown(engine, "latency", "decode_time") == {
        "latency": (2, sum(latencies)),
        "decode_time": (2, sum(latencies) - 0.5),
    }
    assert shown(engine, "inter_token_latency") == {"inter_token_latency": (16, sum(latencies) - 0.5)}
    assert times(engine).num_prompt_tokens == 12, "they are not computed a second time for somebody new"


def test_completions_count_each_and_their_request_once() -> None:
    engine, *_ = slow_engine()
    run(engine, engine.add_request("abcde", SamplingParams(n=2, max_tokens=3)))
    assert shown(engine, "time_to_first_token", "inter_token_latency", "latency", "generated_length") == {
        "time_to_first_token": (2, 0.5),
        "inter_token_latency": (4, 1.0),
        "latency": (2, 1.5),
        "generated_length": (2, 6),
    }
    assert shown(engine, "num_completions", "longest_generated", "max_tokens", "tokens_of_step") == {
        "num_completions": (1, 2),
        "longest_generated": (1, 3),
        "max_tokens": (2, 6),
        "tokens_of_step": (3, 5 + 6),
    }
    snapshot = times(engine)
    assert (snapshot.num_prompt_tokens, snapshot.num_cached_prompt_tokens) == (10, 5), "the second is a fork"


def test_the_longest_completion_is_known_when_the_texts_of_all_are() -> None:
    """Both end in one step, with drafts behind the stop string that they would have had without it."""
    tokens = continuation([1, 1, 1], 14)
    engine = make_engine(ToyModel(), eos=(), speculation=speculation(num_drafts=15))
    params = SamplingParams(n=2, temperature=0.0, max_tokens=14, stop=[f" {tokens[5]} "])
    [output] = run(engine, engine.add_request([1, 1, 1], params))
    assert [completion.token_ids for completion in output.outputs] == [tokens[:6]] * 2
    assert shown(engine, "longest_generated", "generated_length", "inter_token_latency") == {
        "longest_generated": (1, 6),
        "generated_length": (2, 12),
        "inter_token_latency": (2, 0.0),
    }
    assert times(engine).num_generated_tokens == 12


def test_beams_count_as_completions() -> None:
    engine = make_engine(BeamModel(), eos=())
    request = engine.make_beam_request([1, 2], BeamSearchParams(beam_width=3, max_tokens=4))
    engine.submit(request)
    run(engine)
    assert shown(engine, "generated_length", "num_completions", "longest_generated") == {
        "generated_length": (3, 12),
        "num_completions": (1, 3),
        "longest_generated": (1, 4),
    }
    assert times(engine).num_generated_tokens == 12
    assert times(engine).inter_token_latency.count == 9


def test_tokens_that_come_at_once_come_as_one() -> None:
    clock = Clock()
    engine = make_engine(SlowToy(clock), clock=clock, eos=(), speculation=speculation(num_drafts=3))
    run(engine, engine.add_request([1, 2, 3], SamplingParams(max_tokens=9)))
    assert shown(engine, "inter_token_latency", "decode_time", "generated_length", "time_per_token") == {
        "inter_token_latency": (2, 0.5),  # 1 + 4 + 4 tokens
        "decode_time": (1, 0.5),
        "generated_length": (1, 9),
        "time_per_token": (1, 0.5 / 8),
    }
    assert shown(engine, "tokens_of_step") == {"tokens_of_step": (3, 3 + 9)}


# ---- ends that nobody wished for


def test_those_that_were_aborted_are_in_no_histogram_of_the_ended() -> None:
    engine, *_ = slow_engine()
    waiting, running = (engine.add_request(prompt, SamplingParams(n=2, max_tokens=5)) for prompt in "ab")
    engine.abort(waiting.request_id)
    engine.step()
    engine.step()
    engine.abort(running.request_id)
    metrics = engine.metrics()
    assert metrics.finished == {"abort": 4}
    assert {name: getattr(metrics.times, name).count for name in OF_THE_ENDED} == dict.fromkeys(OF_THE_ENDED, 0)
    assert shown(engine, "num_completions", "longest_generated", "time_to_first_token", "inter_token_latency") == {
        "num_completions": (0, 0.0),
        "longest_generated": (0, 0.0),
        "time_to_first_token": (2, 0.5),
        "inter_token_latency": (2, 0.5),
    }
    assert (metrics.times.num_prompt_tokens, metrics.times.num_generated_tokens) == (2, 4)


def test_a_request_of_which_one_completion_was_aborted_does_not_count_as_one_that_ended() -> None:
    engine, *_ = slow_engine(max_num_seqs=1)
    request = engine.add_request("ab", SamplingParams(n=2, max_tokens=2))
    while not request.completions[0].seq.finished:
        engine.step()
    engine.abort(request.request_id)
    assert engine.metrics().finished == {"length": 1, "abort": 1}
    assert shown(engine, "latency", "num_completions") == {"latency": (1, 0.5), "num_completions": (0, 0.0)}


def test_what_a_failed_step_kept_from_coming_counts_as_come_at_the_end() -> None:
    engine, executor, clock = slow_engine()
    engine.add_request("abc", SamplingParams(max_tokens=9))
    engine.step()
    engine.step()
    clock.now += 1.0
    executor.errors = [OSError("broken")]
    engine.step()
    assert engine.metrics().finished == {"error": 1}
    assert shown(engine, "latency", "prefill_time", "decode_time", "inference_time", "generated_length") == {
        "latency": (1, 0.5 + 1.25),
        "prefill_time": (1, 0.25),
        "decode_time": (1, 0.25),
        "inference_time": (1, 0.5),
        "generated_length": (1, 2),
    }
    executor.errors = [OSError("broken")]
    engine.add_request("abc")
    clock.now += 2.0
    engine.step()
    assert shown(engine, "latency", "queue_time", "prefill_time", "decode_time", "inference_time") == {
        "latency": (2, 1.75 + 2.25),
        "queue_time": (2, 2.0),
        "prefill_time": (2, 0.25 + 0.25),
        "decode_time": (2, 0.25),
        "inference_time": (2, 0.5 + 0.25),
    }
    assert shown(engine, "time_to_first_token", "tokens_of_step", "num_completions") == {
        "time_to_first_token": (1, 0.25),
        "tokens_of_step": (2, 3 + 2),
        "num_completions": (2, 2),
    }


def test_a_row_without_a_token_brings_none() -> None:
    class Broken(Slow):
        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            result.token_ids[0], result.error = UNKNOWN, ArithmeticError("NaN")
            return result

    clock = Clock()
    engine = make_engine(Broken(clock), clock=clock)
    for prompt in ("abc", "de"):
        engine.add_request(prompt, SamplingParams(max_tokens=1))
    engine.step()
    assert engine.metrics().finished == {"error": 1, "length": 1}
    assert shown(engine, "tokens_of_step", "generated_length", "time_to_first_token", "prefill_time") == {
        "tokens_of_step": (1, 5 + 1),
        "generated_length": (2, 1),
        "time_to_first_token": (1, 0.25),
        "prefill_time": (2, 0.5),
    }
    assert (times(engine).num_prompt_tokens, times(engine).num_generated_tokens) == (2, 1)


def test_a_completion_that_never_began_waits_until_the_error() -> None:
    """The tokenizer breaks at the first completion, and ends the second with it, which had no room."""
    engine, _, clock = slow_engine(max_num_seqs=1)

    def broken(_: object) -> str:
        raise ValueError("no such token")

    request = engine.add_request("abc", SamplingParams(n=2, max_tokens=1))
    request.completions[0].detokenizer._decode = broken
    clock.now += 1.0
    engine.step()
    assert engine.metrics().finished == {"error": 2}
    assert shown(engine, "latency", "queue_time", "inference_time", "prefill_time", "generated_length") == {
        "latency": (2, 2.5),
        "queue_time": (2, 1.0 + 1.25),
        "inference_time": (2, 0.25),
        "prefill_time": (2, 0.25),
        "generated_length": (2, 1),
    }


def test_a_tokenizer_that_breaks_ends_the_completions_that_have_no_whole_text() -> None:
    """Though all have had their last token: the text of the third was not made yet, that of the first was."""
    engine, *_ = slow_engine()

    def broken(_: object) -> str:
        raise ValueError("no such token")

    request = engine.add_request("abc", SamplingParams(n=3, max_tokens=2))
    engine.step()
    request.completions[1].detokenizer._decode = broken
    engine.step()
    reasons = [completion.finish_reason for completion in request.output().outputs]
    assert reasons == ["length", "error", "error"]
    assert engine.metrics().finished == Counter(reasons)
    assert shown(engine, "latency", "generated_length") == {
        "latency": (3, 1.5),
        "generated_length": (3, sum(len(completion.token_ids) for completion in request.output().outputs)),
    }


# ---- all together


@FAST
@given(
    workload=st.lists(wishes, min_size=1, max_size=6),
    policy=st.sampled_from(["prefill_first", "mixed"]),
    depth=st.integers(1, 2),
    num_blocks=st.sampled_from([10, 64]),
    max_num_seqs=st.integers(1, 6),
    speculates=st.booleans(),
)
def test_the_sums_agree_whatever_happens(workload: list[Wish], speculates: bool, **options: Any) -> None:
    clock = Clock()
    engine = make_engine(
        SlowToy(clock),
        clock=clock,
        eos=(),
        max_model_len=32,
        max_steps_in_flight=options.pop("depth"),
        speculation=speculation(by_chance) if speculates else None,
        **options,
    )
    requests = serve(engine, workload)
    metrics = engine.metrics()
    seen = metrics.times
    outputs = [output for request in requests for output in request.output().outputs]
    ended = [output for output in outputs if output.finish_reason != "abort"]
    assert {name: getattr(seen, name).count for name in OF_THE_ENDED} == dict.fromkeys(OF_THE_ENDED, len(ended))
    assert sum(metrics.finished.values()) == len(outputs)
    assert seen.num_generated_tokens == sum(len(output.token_ids) for output in outputs)
    assert seen.generated_length.sum == sum(len(output.token_ids) for output in ended)
    assert seen.time_to_first_token.count == sum(bool(output.token_ids) for output in outputs)
    assert seen.num_preemptions.sum <= metrics.num_preemptions
    assert seen.inference_time.sum == seen.prefill_time.sum + seen.decode_time.sum
    assert seen.latency.sum == seen.queue_time.sum + seen.inference_time.sum
    after_the_first = sum(max(len(output.token_ids) - 1, 0) for output in outputs)
    if speculates:
        assert seen.inter_token_latency.count <= after_the_first
    else:
        assert seen.inter_token_latency.count == after_the_first
    if len(ended) == len(outputs):
        assert seen.inter_token_latency.sum == seen.decode_time.sum
        assert seen.num_completions.count == len(requests)
        lengths = [[len(output.token_ids) for output in request.output().outputs] for request in requests]
        assert seen.longest_generated.sum == sum(map(max, lengths))
        assert seen.num_prompt_tokens == seen.prompt_length.sum
        assert seen.num_prompt_tokens - seen.num_cached_prompt_tokens == seen.computed_prompt_length.sum


def test_a_snapshot_changes_no_more() -> None:
    engine, *_ = slow_engine()
    engine.add_request("abc", SamplingParams(max_tokens=3))
    engine.step()
    before = times(engine)
    run(engine, engine.add_request("b", SamplingParams(max_tokens=2)))
    assert (before.time_to_first_token.count, before.latency.count, before.num_generated_tokens) == (1, 0, 1)
    assert (before.tokens_of_step.sum, before.inter_token_latency.sum) == (4, 0.0)
    after = times(engine)
    assert (after.time_to_first_token.count, after.latency.count, after.num_generated_tokens) == (2, 2, 5)
