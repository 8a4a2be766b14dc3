"""The loop: requests in, text out, with their metrics and seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.messages import StepPlan, StepResult
from nanoengine.engine.metrics import EngineStats
from nanoengine.errors import EngineClosed
from nanoengine.sampling_params import SamplingParams
from tests.engine.engine_toys import EOS, Clock, Script, assert_idle, make_engine, run
from tests.engine.toys import ByteTokenizer, ToyModel, continuation

# ---- the whole loop


def test_a_prompt_becomes_text() -> None:
    engine = make_engine()
    [output] = run(engine, engine.add_request("say:"))
    assert output.finished
    assert (output.prompt, output.prompt_token_ids) == ("say:", list(b"say:"))
    [completion] = output.outputs
    assert completion.text == "hello"
    assert completion.token_ids == [*b"hello", EOS], "the stopping token is a token, but no text"
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "stop", None)
    assert (completion.logprobs, completion.cumulative_logprob) == (None, None)


@pytest.mark.parametrize("prompt", [[65, 66], (65, 66)])
def test_a_prompt_of_token_ids_has_no_text(prompt: Any) -> None:
    engine = make_engine()
    [output] = run(engine, engine.add_request(prompt))
    assert (output.prompt, output.prompt_token_ids) == (None, [65, 66])


def test_a_request_without_params_gets_the_defaults() -> None:
    assert make_engine().add_request("a").params == SamplingParams()


def test_step_without_requests_does_nothing() -> None:
    engine = make_engine()
    assert engine.step() == []
    assert engine.executor.plans == []
    assert engine.stats == EngineStats()


def test_step_returns_the_requests_that_advanced() -> None:
    engine = make_engine(budget=4)
    first, second = engine.add_request("abc"), engine.add_request("abcdefg")
    assert engine.step() == [first]
    assert engine.step() == [], "a chunk in the middle of a prompt brings no token"
    assert engine.step() == [second]
    assert engine.step() == [first, second]


def test_the_output_so_far_can_be_read_at_any_time_and_changes_no_more() -> None:
    engine = make_engine()
    request = engine.add_request("a")
    assert request.output().outputs[0].text == ""
    engine.step()
    engine.step()
    partial = request.output()
    run(engine)
    assert (partial.outputs[0].text, partial.outputs[0].token_ids, partial.finished) == ("he", [*b"he"], False)
    assert request.output().outputs[0].text == "hello"


@pytest.mark.parametrize("options", [{}, {"num_blocks": 5, "max_model_len": 20}, {"budget": 3}, {"caching": False}])
def test_tokens_do_not_depend_on_pool_budget_or_cache(options: dict[str, Any]) -> None:
    engine = make_engine(ToyModel(), eos=(), **options)
    prompts = [[5] * 9, [5] * 9, [6], [5] * 8 + [7], list(range(12))]
    requests = [engine.add_request(prompt, SamplingParams(max_tokens=8)) for prompt in prompts]
    outputs = run(engine, *requests)
    assert [output.outputs[0].token_ids for output in outputs] == [continuation(prompt, 8) for prompt in prompts]


def test_equal_prompts_are_computed_once_and_both_are_right() -> None:
    model = ToyModel()
    engine = make_engine(model, eos=())
    prompt = list(range(14))
    requests = [engine.add_request(prompt, SamplingParams(max_tokens=1)) for _ in range(2)]
    outputs = run(engine, *requests)
    assert [output.outputs[0].token_ids for output in outputs] == [continuation(prompt, 1)] * 2
    assert [output.num_cached_tokens for output in outputs] == [0, 12]
    assert model.num_computed == 14 + 2


def test_results_belong_to_their_requests_whatever_the_order_of_ends() -> None:
    engine = make_engine(ToyModel(), eos=())
    first = {n: engine.add_request([n], SamplingParams(max_tokens=n)) for n in (7, 2, 5)}
    run(engine)
    second = {n: engine.add_request([n], SamplingParams(max_tokens=n)) for n in (3, 6)}
    run(engine)
    for n, request in {**first, **second}.items():
        assert request.output().outputs[0].token_ids == continuation([n], n)
    ids = [request.request_id for request in (*first.values(), *second.values())]
    assert len(set(ids)) == 5


def test_requests_may_arrive_while_others_run() -> None:
    engine = make_engine(ToyModel(), eos=())
    first = engine.add_request([1], SamplingParams(max_tokens=6))
    engine.step()
    engine.step()
    second = engine.add_request([2], SamplingParams(max_tokens=6))
    a, b = run(engine, first, second)
    assert a.outputs[0].token_ids == continuation([1], 6)
    assert b.outputs[0].token_ids == continuation([2], 6)


def test_requests_submitted_in_another_order_than_made_are_served_as_submitted() -> None:
    engine = make_engine(ToyModel(), eos=())
    early, late = (engine.make_request([n], SamplingParams(max_tokens=3)) for n in (1, 2))
    engine.submit(late)
    engine.submit(early)
    outputs = run(engine, early, late)
    assert [output.outputs[0].token_ids for output in outputs] == [continuation([1], 3), continuation([2], 3)]


def test_a_request_that_was_made_but_not_submitted_leaves_no_trace() -> None:
    engine = make_engine()
    engine.make_request("a")
    assert_idle(engine)


# ---- ends


def test_max_tokens_ends_with_length() -> None:
    engine = make_engine()
    [output] = run(engine, engine.add_request("a", SamplingParams(max_tokens=3)))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("hel", "length")


def test_a_stop_token_is_cut_from_the_text_and_named() -> None:
    engine = make_engine()
    [output] = run(engine, engine.add_request("a", SamplingParams(stop_token_ids=[ord("o")])))
    [completion] = output.outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("hell", "stop", ord("o"))
    assert completion.token_ids == [*b"hello"]


def test_a_stop_string_is_cut_from_the_text_and_named() -> None:
    engine = make_engine(Script("one two three"))
    request = engine.add_request("a", SamplingParams(stop=["two", "zzz"]))
    texts = []
    while engine.has_unfinished:
        engine.step()
        texts.append(request.output().outputs[0].text)
    assert_idle(engine)
    [completion] = request.output().outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("one ", "stop", "two")
    assert completion.token_ids == [*b"one two"]
    assert all("one ".startswith(text) for text in texts), "nothing of the stop leaked on the way"


def test_what_ended_the_text_stays_in_it_if_asked_for() -> None:
    for stop, text in (({"stop_token_ids": [ord("l")]}, "hel"), ({"stop": ["x", "el"]}, "hel"), ({}, "hello\0")):
        engine = make_engine()
        params = SamplingParams(include_stop_str_in_output=True, **stop)  # type: ignore[arg-type]
        [output] = run(engine, engine.add_request("a", params))
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == (text, "stop")


def test_a_stop_string_that_the_text_of_a_stop_token_completes_is_what_ended_it() -> None:
    engine = make_engine()
    params = SamplingParams(stop="el", stop_token_ids=[ord("l")], include_stop_str_in_output=True)
    [output] = run(engine, engine.add_request("a", params))
    [completion] = output.outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("hel", "stop", "el")


class NamedControls(ByteTokenizer):
    """Control characters are special tokens."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        names = [b"" if skip_special_tokens else b"<%d>" % token for token in range(32)]
        return b"".join(names[i] if i < 32 else bytes([i]) for i in token_ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "abc"),
        ({"skip_special_tokens": False}, "a<1>b<31>c"),
        ({"include_stop_str_in_output": True}, "abc"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "a<1>b<31>c<0>"),
        ({"stop": "<31>"}, "abc"),
        ({"skip_special_tokens": False, "stop": "<31>"}, "a<1>b"),
        ({"skip_special_tokens": False, "stop": "<31>", "include_stop_str_in_output": True}, "a<1>b<31>"),
        ({"skip_special_tokens": False, "stop_token_ids": [1]}, "a"),
        ({"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 7}, "a<1>b<31>c<0><0>"),
    ],
    ids=str,
)
def test_special_tokens_have_a_text_for_those_who_ask(params: dict[str, Any], text: str) -> None:
    engine = make_engine(Script("a\x01b\x1fc"))
    engine.tokenizer = NamedControls()
    request = engine.add_request("a", SamplingParams(**params))
    pieces: list[str] = []
    while engine.has_unfinished:
        engine.step()
        pieces.append(request.completions[0].detokenizer.text_from(sum(map(len, pieces))))
    assert request.output().outputs[0].text == "".join(pieces) == text


def test_a_stop_string_wins_over_the_length_limit_of_the_same_token() -> None:
    engine = make_engine()
    [output] = run(engine, engine.add_request("a", SamplingParams(stop="lo", max_tokens=5)))
    [completion] = output.outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("hel", "stop", "lo")


def test_text_held_back_for_a_stop_is_released_at_the_end() -> None:
    engine = make_engine()
    [output] = run(engine, engine.add_request("a", SamplingParams(stop="o!")))
    assert output.outputs[0].text == "hello"


@pytest.mark.parametrize("min_tokens", [3, 4])
def test_min_tokens_holds_for_stop_strings(min_tokens: int) -> None:
    engine = make_engine(Script("xaxaxa"))
    [output] = run(engine, engine.add_request("a", SamplingParams(stop="a", min_tokens=min_tokens)))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("xax", "a")


def test_an_ignored_end_of_text_is_an_ordinary_token() -> None:
    engine = make_engine(Script("hi"))
    [output] = run(engine, engine.add_request("a", SamplingParams(ignore_eos=True, max_tokens=4)))
    assert output.outputs[0].text == "hi\0\0"
    assert output.outputs[0].finish_reason == "length"


def test_characters_split_over_tokens_come_whole() -> None:
    engine = make_engine(Script("né😀"))
    request = engine.add_request("a")
    texts = set()
    while engine.has_unfinished:
        engine.step()
        texts.add(request.output().outputs[0].text)
    assert texts == {"", "n", "né", "né😀"} - {""}


def test_a_request_that_just_fits_the_model_ends_with_length() -> None:
    engine = make_engine(ToyModel(), eos=(), num_blocks=4, max_model_len=16)
    [output] = run(engine, engine.add_request([1] * 15, SamplingParams(max_tokens=None)))
    assert output.outputs[0].token_ids == continuation([1] * 15, 1)
    assert output.outputs[0].finish_reason == "length"


def test_logprobs_come_with_their_sum() -> None:
    engine = make_engine(Script("hi", logprobs=True))
    [output] = run(engine, engine.add_request("a", SamplingParams(logprobs=0)))
    [completion] = output.outputs
    assert [list(entry) for entry in completion.logprobs or []] == [[ord("h")], [ord("i")], [EOS]]
    assert completion.cumulative_logprob == -1.5


# ---- several completions


def test_all_completions_of_a_request_end_in_the_same_step() -> None:
    engine = make_engine()
    [output] = run(engine, engine.add_request("a", SamplingParams(n=3)))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert [completion.text for completion in output.outputs] == ["hello"] * 3
    assert output.finished


def test_completions_that_end_at_different_times_make_one_request() -> None:
    executor = Script()
    engine = make_engine(executor)
    request = engine.add_request("a", SamplingParams(n=2, max_tokens=20))
    executor.num_said[request.completions[1].seq.seed] = 3  # it starts at "lo"
    engine.step()
    while not request.completions[1].seq.finished:
        engine.step()
    assert not request.finished
    [output] = run(engine, request)
    assert [completion.text for completion in output.outputs] == ["hello", "lo"]


def test_completions_share_the_prompt_and_have_seeds_of_their_own() -> None:
    executor = Script()
    engine = make_engine(executor)
    request = engine.add_request("a long prompt", SamplingParams(n=3))
    engine.step()
    [plan] = executor.plans
    assert [(chunk.num_new, chunk.samples) for chunk in plan.chunks] == [(13, (0, 1, 2))], "the prompt is computed once"
    assert len({start.sampling.seed for start in plan.started}) == 3
    assert request.output().num_cached_tokens == 0


# ---- metrics, seeds, the end


def test_metrics_are_differences_of_the_clock() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    request = engine.add_request("a", SamplingParams(max_tokens=5))
    metrics = request.output().metrics
    assert (metrics.ttft, metrics.tpot, metrics.latency) == (None, None, None)
    clock.now += 2.0
    engine.step()
    metrics = request.output().metrics
    assert (metrics.ttft, metrics.tpot, metrics.latency) == (2.0, None, None)
    for _ in range(4):
        clock.now += 0.5
        engine.step()
    metrics = request.output().metrics
    assert (metrics.ttft, metrics.tpot, metrics.latency) == (2.0, 0.5, 4.0)


def test_arrival_is_the_time_of_submission() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    request = engine.make_request("a")
    clock.now += 5.0
    engine.submit(request)
    clock.now += 1.0
    engine.step()
    assert request.output().metrics.ttft == 1.0


def test_preemptions_are_reported() -> None:
    engine = make_engine(ToyModel(), eos=(), num_blocks=4, max_model_len=16)
    requests = [engine.add_request([n] * 6, SamplingParams(max_tokens=9)) for n in (1, 2)]
    assert [output.metrics.num_preemptions for output in run(engine, *requests)] == [0, 1]


def test_statistics_count_computed_tokens_and_time_of_prompts_and_decodes_apart() -> None:
    class Slow(Script):
        def execute(self, plan: StepPlan) -> StepResult:
            clock.now += 0.5
            return super().execute(plan)

    clock = Clock()
    engine = make_engine(Slow(), clock=clock)
    run(engine, engine.add_request("abcd", SamplingParams(max_tokens=3)))
    assert (engine.stats.prefill_tokens, engine.stats.prefill_time) == (4, 0.5)
    assert (engine.stats.decode_tokens, engine.stats.decode_time) == (2, 1.0)
    assert (engine.stats.num_prefill_steps, engine.stats.num_decode_steps) == (1, 2)


def seeds(engine: LLMEngine, *params: SamplingParams) -> list[int]:
    return [engine.add_request("a", each).completions[0].seq.seed for each in params]


def test_the_seeds_of_an_engine_repeat_with_its_seed() -> None:
    free = [SamplingParams()] * 4
    assert seeds(make_engine(seed=1), *free) == seeds(make_engine(seed=1), *free)
    assert seeds(make_engine(seed=1), *free) != seeds(make_engine(seed=2), *free)
    assert len(set(seeds(make_engine(seed=1), *free))) == 4


def test_a_seed_of_the_request_is_its_own_whatever_else_runs() -> None:
    engine = make_engine(seed=1)
    _, first = seeds(engine, SamplingParams(), SamplingParams(seed=7))
    [second] = seeds(make_engine(seed=2), SamplingParams(seed=7))
    assert first == second


def test_a_request_with_a_seed_does_not_move_the_seeds_of_others() -> None:
    a, _, b = seeds(make_engine(seed=1), SamplingParams(), SamplingParams(seed=7), SamplingParams())
    assert [a, b] == seeds(make_engine(seed=1), SamplingParams(), SamplingParams())


def test_close_aborts_what_runs_and_closes_the_executor_once() -> None:
    executor = Script()
    engine = make_engine(executor)
    request = engine.add_request("a", SamplingParams(n=2))
    engine.step()
    engine.close()
    engine.close()
    assert executor.closed == 1
    assert [completion.finish_reason for completion in request.output().outputs] == ["abort", "abort"]
    assert_idle(engine)


def test_a_closed_engine_says_so() -> None:
    engine = make_engine()
    request = engine.make_request("a")
    engine.close()
    for call in (lambda: engine.add_request("a"), lambda: engine.submit(request), engine.step):
        with pytest.raises(EngineClosed, match="make a new one"):
            call()
    assert not engine.abort("request-0")
    assert not engine.has_unfinished
