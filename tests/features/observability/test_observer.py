"""Counts and times of requests, by a clock that passes only in steps and between them: every value is known."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.messages import StepPlan
from nanoengine.core.sequence import Request
from nanoengine.features.observability.metrics import RequestMetrics
from nanoengine.features.observability.observer import kv_usage
from tests.core.lives import check_lives
from tests.core.toys import VOCAB, ToyModel, make_engine, run
from tests.features.speculation.toys import Drafted, ToyDrafter

from .test_kv_events import Router
from .test_view import look
from .toys import Observed, SlowModel

OF_THE_ENDED = (
    *("latency", "queue_time", "prefill_time", "decode_time", "inference_time", "time_per_token", "prompt_length"),
    *("computed_prompt_length", "generated_length", "max_tokens", "num_preemptions"),
)

# ---- one request


def test_the_times_of_a_request_are_those_between_its_events() -> None:
    observed = Observed()
    request = observed.add([1, 2, 3])
    observed.clock.now += 3.0
    run(observed.engine, [])
    observed.check(
        queue_time=(1, 3.0),
        prefill_time=(1, 0.25),
        decode_time=(1, 1.0),
        inference_time=(1, 1.25),
        latency=(1, 4.25),
        time_per_token=(1, 0.25),
        prompt_length=(1, 3),
        computed_prompt_length=(1, 3),
        generated_length=(1, 5),
        max_tokens=(1, 5),
        num_preemptions=(1, 0),
    )
    observed.check(
        time_to_first_token=(1, 3.25),
        inter_token_latency=(4, 1.0),
        tokens_of_step=(5, 3 + 5),
        num_completions=(1, 1),
        longest_generated=(1, 5),
    )
    assert (observed.times.num_prompt_tokens, observed.times.num_generated_tokens) == (3, 5)
    assert request.output().metrics == RequestMetrics(ttft=3.25, tpot=0.25, latency=4.25, num_preemptions=0)


def test_a_request_may_have_come_before_it_is_submitted() -> None:
    observed = Observed()
    request = observed.engine.make_request([1])
    request.arrival_time = observed.clock()
    observed.clock.now += 2.0
    run(observed.engine, [request])
    observed.check(queue_time=(1, 2.0), time_to_first_token=(1, 2.25))


def test_a_single_token_has_no_time_after_it() -> None:
    observed = Observed()
    request = observed.add([1], 1)
    run(observed.engine, [])
    observed.check(time_per_token=(1, 0.0), decode_time=(1, 0.0), inter_token_latency=(0, 0.0))
    assert request.metrics == RequestMetrics(ttft=0.25, tpot=None, latency=0.25)


def test_metrics_of_a_request_before_its_end() -> None:
    observed = Observed()
    request = observed.add([1, 2], 4, n=2)
    assert request.output().metrics == RequestMetrics()
    observed.engine.step()
    running = request.output()
    assert running.metrics == RequestMetrics(ttft=0.25)
    run(observed.engine, [])
    assert running.metrics == RequestMetrics(ttft=0.25), "an output does not change any more"


def test_without_max_tokens_the_room_in_the_model_is_what_was_asked_for() -> None:
    observed = Observed(max_model_len=40)
    observed.add([1, 2, 3, 4], None)
    run(observed.engine, [])
    observed.check(max_tokens=(1, 36), generated_length=(1, 36))


def test_all_chunks_of_a_prompt_are_its_prefill_and_each_counts_in_its_step() -> None:
    observed = Observed(max_num_batched_tokens=4)
    observed.add(list(range(10)), 2)
    run(observed.engine, [])
    observed.check(
        queue_time=(1, 0.0), prefill_time=(1, 0.75), time_to_first_token=(1, 0.75), tokens_of_step=(4, 10 + 2)
    )


def test_cached_tokens_are_no_work_but_part_of_the_prompt() -> None:
    observed = Observed()
    for _ in range(2):
        run(observed.engine, [observed.add(list(range(10)), 1)][:0])
    times = observed.times
    assert (times.num_prompt_tokens, times.num_cached_prompt_tokens) == (20, 8)
    observed.check(prompt_length=(2, 20), computed_prompt_length=(2, 12), tokens_of_step=(2, 12 + 2))
    cache = observed.snapshot().cache
    assert (cache.num_queried_tokens, cache.num_hit_tokens, cache.hit_rate) == (20, 8, 0.4)


@pytest.mark.parametrize("kind", ["caching is off", "it must compute all of its prompt"])
def test_a_sequence_that_does_not_look_into_the_cache_does_not_count(kind: str) -> None:
    observed = Observed(enable_prefix_caching=kind != "caching is off")
    request = observed.add([1] * 9, 1)
    request.sequences[0].reads_cache = kind == "caching is off"
    run(observed.engine, [])
    assert observed.snapshot().cache.hit_rate is None


# ---- several


def test_a_sequence_that_finds_no_room_waits_in_the_queue() -> None:
    observed = Observed(max_num_seqs=1)
    for token in (1, 2):
        observed.add([token], 4)
    run(observed.engine, [])
    observed.check(
        queue_time=(2, 1.0), prefill_time=(2, 0.5), latency=(2, 1.0 + 2.0), time_to_first_token=(2, 0.25 + 1.25)
    )


def test_a_preemption_prolongs_a_phase_and_is_no_second_wait_in_the_queue() -> None:
    observed = Observed(num_blocks=4, max_model_len=16)
    requests = [observed.add([token] * 6, 9) for token in (1, 2)]
    run(observed.engine, [])
    observed.check(
        queue_time=(2, 0.0),
        prefill_time=(2, 0.5),
        num_preemptions=(2, 1),
        generated_length=(2, 18),
        prompt_length=(2, 12),
    )
    first, second = (request.output().metrics for request in requests)
    assert second.latency > first.latency == 9 * 0.25
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    observed.check(latency=(2, first.latency + second.latency))
    assert observed.times.num_prompt_tokens == 12, "they count once"
    cache = observed.snapshot().cache
    assert (cache.num_queried_tokens, cache.num_hit_tokens) == (12, 0)
    assert cache.num_resumed_queried_tokens > 6


def drafted(tokens: list[int], stop: str = "") -> tuple[Observed, Any]:
    """A request whose drafts are right: they come several at a time."""
    drafter = ToyDrafter({0: tokens}, random.Random(0))
    observed = Observed(parts=[drafter])
    return observed, observed.add(tokens[:3], len(tokens) - 3, stop=stop)


def test_tokens_that_come_at_once_come_as_one_and_those_behind_a_stop_string_never_came() -> None:
    engine = make_engine()
    plain = engine.make_request([1, 2, 3], Observed().add([1, 2, 3], 30).params)
    run(engine, [plain])
    tokens = plain.sequences[0].token_ids
    for end in range(5, 30):
        stop = engine.tokenizer.decode(tokens[end - 2 : end])
        observed, request = drafted(tokens, stop)
        run(observed.engine, [])
        (output,) = request.output().outputs
        observed_times, steps = observed.times, observed.snapshot().steps
        assert len(output.token_ids) <= end - 3
        assert observed_times.num_generated_tokens == len(output.token_ids) == observed_times.generated_length.sum
        assert steps.decode_tokens == len(output.token_ids) - 1
        assert observed_times.tokens_of_step.sum == 3 + len(output.token_ids)
        assert observed_times.inter_token_latency.count == steps.num_decode_steps


# ---- ends that nobody wished for


def test_events_that_a_failed_step_prevented_count_as_happening_at_the_end() -> None:
    observed = Observed(model=SlowModel(failing=[3]))
    request = observed.add([1, 2, 3], 9)
    observed.engine.step()
    observed.engine.step()
    observed.clock.now += 1.0
    observed.engine.step()
    assert observed.snapshot().finished == {"error": 1}
    observed.check(
        latency=(1, 0.5 + 1.25),
        prefill_time=(1, 0.25),
        decode_time=(1, 0.25),
        inference_time=(1, 0.5),
        generated_length=(1, 2),
        tokens_of_step=(2, 3 + 2),
    )
    assert request.metrics.latency == 0.5
    observed = Observed(model=SlowModel(failing=[1]))
    observed.add([1, 2, 3], 9)
    observed.clock.now += 2.0
    observed.engine.step()
    observed.check(queue_time=(1, 2.0), prefill_time=(1, 0.25), decode_time=(1, 0.0), time_to_first_token=(0, 0.0))


# ---- the snapshot


@pytest.mark.parametrize(("num_groups", "longest", "expected"), [(1, None, 1.5), (2, None, 0.75), (2, 20, 1.2)])
def test_a_snapshot_says_what_the_pool_holds(num_groups: int, longest: int | None, expected: float) -> None:
    observed = Observed(num_blocks=24, max_model_len=64, num_groups=num_groups, blocks_of_longest=longest)
    metrics = observed.snapshot()
    assert (metrics.num_blocks, metrics.block_size, metrics.max_model_len) == (24, 4, 64)
    assert metrics.max_concurrency == expected


def test_a_snapshot_does_not_change_with_the_engine() -> None:
    observed = Observed()
    observed.add([1, 2, 3], 3, n=2)
    observed.engine.step()
    before = observed.snapshot()
    observed.add([4, 5], 1)
    run(observed.engine, [])
    after = observed.snapshot()
    assert (before.steps.decode_tokens, before.finished, before.cache.num_queried_tokens) == (0, {}, 6)
    assert (after.steps.decode_tokens, after.finished, after.cache.num_queried_tokens) == (4, {"length": 3}, 8)
    assert (before.times.num_generated_tokens, before.times.latency.count) == (2, 0)
    assert (after.times.num_generated_tokens, after.times.latency.count) == (7, 3)


def test_progress_says_rates_since_a_moment() -> None:
    observed = Observed()
    observed.add([1] * 50, 9)
    before = observed.snapshot().steps
    observed.engine.step()
    observed.engine.step()
    usage = kv_usage(observed.engine.scheduler.blocks)
    expected = f"prefill 200 tok/s, decode 4 tok/s, KV {usage:.0%}, running 1, waiting 0"
    assert observed.observer.progress(observed.engine, before) == expected


def test_the_time_of_steps_that_overlap_is_counted_once() -> None:
    class Late(SlowModel):
        def launch(self, plan: StepPlan) -> Any:
            result, clock = ToyModel.launch(self, plan), self.clock

            def late() -> Any:
                assert clock is not None
                clock.now += 0.25
                return result()

            return late

    observed = Observed(model=Late(), depth=2)
    start = observed.clock()
    observed.add([1, 2, 3], 20)
    run(observed.engine, [])
    steps = observed.snapshot().steps
    assert steps.prefill_time + steps.decode_time == observed.clock() - start


# ---- all together


class Watched(Drafted):
    """In a life the view is sound after every step, a listener always knows what is cached, and the sums agree in the end."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.num_groups = 1 + seed % 2
        self.broken = [(self.rng.randrange(VOCAB), self.rng.randrange(12)) for _ in range(20)]

    def plain_engine(self) -> LLMEngine:
        return Observed(model=SlowModel(broken=self.broken), num_blocks=900, num_groups=self.num_groups).engine

    def engine(self, way: dict[str, Any], failing: list[int]) -> LLMEngine:
        model, num_blocks = SlowModel(failing=failing, broken=self.broken), way.pop("num_blocks") * self.num_groups
        self.observed = Observed(
            model=model, parts=self.parts(), num_groups=self.num_groups, num_blocks=num_blocks, **way
        )
        self.router = Router(self.observed)
        return self.observed.engine

    def after_step(self, engine: LLMEngine) -> None:
        super().after_step(engine)
        self.observed.clock.now += 0.5 * (self.rng.random() < 0.2)
        look(self.observed)
        if not engine.scheduler.in_flight:
            self.router.check()

    def after_round(self, engine: LLMEngine, requests: list[Request]) -> None:
        metrics = self.observed.snapshot()
        seen = metrics.times
        outputs = [output for request in requests for output in request.output().outputs]
        ended = [output for output in outputs if output.finish_reason != "abort"]
        lengths = [len(output.token_ids) for output in outputs]
        assert {name: getattr(seen, name).count for name in OF_THE_ENDED} == dict.fromkeys(OF_THE_ENDED, len(ended))
        assert metrics.finished == Counter(output.finish_reason for output in outputs)
        assert seen.num_generated_tokens == sum(lengths)
        assert seen.generated_length.sum == sum(len(output.token_ids) for output in ended)
        assert seen.time_to_first_token.count == sum(map(bool, lengths))
        assert metrics.steps.decode_tokens + seen.time_to_first_token.count <= sum(lengths) + metrics.num_preemptions
        assert seen.num_preemptions.sum <= metrics.num_preemptions
        assert seen.inference_time.sum == seen.prefill_time.sum + seen.decode_time.sum
        assert seen.latency.sum >= seen.queue_time.sum + seen.inference_time.sum
        assert seen.inter_token_latency.count <= sum(max(length - 1, 0) for length in lengths)
        if not self.drafter.num_drafts:
            assert seen.inter_token_latency.count == sum(max(length - 1, 0) for length in lengths)
        assert not self.observed.observer._starts


@pytest.mark.parametrize("seed", range(2))
def test_the_sums_agree_whatever_happens(seed: int) -> None:
    check_lives(Watched(seed), 30)


def test_steps_that_failed_or_were_dropped_count_for_nothing() -> None:
    observed = Observed(model=SlowModel(failing=[2]), depth=2)
    run(observed.engine, [])
    request = observed.add([1, 2, 3], 9)
    run(observed.engine, [])
    steps = observed.snapshot().steps
    assert request.error is not None
    assert (steps.num_prefill_steps, steps.num_decode_steps, steps.decode_tokens) == (1, 0, 0)
