from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.messages import SampledBatch, ScheduledBatch
from nanoengine.engine.request import Request
from nanoengine.engine.stats import EngineStats
from nanoengine.errors import EngineClosed, InvalidPrompt, InvalidRequest, InvalidSamplingParams
from nanoengine.outputs import RequestOutput, TokenLogprob
from nanoengine.sampling_params import SamplingParams
from tests.engine.toys import VOCAB_SIZE, ByteTokenizer, ToyModel, continuation, make_scheduler

EOS = 0


class Script:
    """An executor that says the same text to every sequence, byte by byte, and then end of text."""

    def __init__(self, text: str = "hello", logprobs: bool = False):
        self.bytes = text.encode()
        self.logprobs = logprobs
        self.num_said: dict[int, int] = {}
        self.batches: list[ScheduledBatch] = []
        self.errors: list[BaseException | None] = []  # what the next steps raise
        self.closed = 0

    def execute(self, batch: ScheduledBatch) -> SampledBatch:
        self.batches.append(batch)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        tokens = []
        for row in batch.sampling:
            seq_id = batch.seq_ids[row.row]
            said = self.num_said.get(seq_id, 0)
            self.num_said[seq_id] = said + 1
            tokens.append(self.bytes[said] if said < len(self.bytes) else EOS)
        return SampledBatch(tokens, [{token: TokenLogprob(-0.5, 1)} if self.logprobs else None for token in tokens])

    def close(self) -> None:
        self.closed += 1


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class DigitTokenizer:
    """Decodes any token id."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Any) -> str:
        return "".join(f"{token} " for token in token_ids)


def make_engine(executor: Any = None, *, eos: tuple[int, ...] = (EOS,), seed: int = 0, **options: Any) -> LLMEngine:
    executor = Script() if executor is None else executor
    tokenizer, vocab_size = (DigitTokenizer(), VOCAB_SIZE) if isinstance(executor, ToyModel) else (ByteTokenizer(), 256)
    clock = options.pop("clock", Clock())
    return LLMEngine(
        make_scheduler(**options),
        executor,
        tokenizer,
        vocab_size=vocab_size,
        eos_token_ids=eos,
        seed=seed,
        clock=clock,
    )


def run(engine: LLMEngine, *requests: Request) -> list[RequestOutput]:
    """Step until nothing is left."""
    for _ in range(1000):
        if not engine.has_unfinished:
            assert_idle(engine)
            return [request.output() for request in requests]
        engine.step()
        engine.scheduler.check()
    raise AssertionError("the engine does not come to an end")


def assert_idle(engine: LLMEngine) -> None:
    """Nothing is left: no sequence, no block in use, no request that anyone holds on to."""
    engine.scheduler.check()
    assert not engine.has_unfinished
    assert engine.scheduler.block_manager.pool.usage == 0.0
    assert engine._requests == {}
    assert engine._owner == {}


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
    assert engine.executor.batches == []
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


def test_a_stop_string_wins_over_the_length_limit_of_the_same_token() -> None:
    engine = make_engine()
    [output] = run(engine, engine.add_request("a", SamplingParams(stop="lo", max_tokens=5)))
    [completion] = output.outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("hel", "stop", "lo")


def test_text_held_back_for_a_stop_is_released_at_the_end() -> None:
    engine = make_engine()
    [output] = run(engine, engine.add_request("a", SamplingParams(stop="o!")))
    assert output.outputs[0].text == "hello"


def test_min_tokens_holds_for_stop_strings() -> None:
    engine = make_engine(Script("xaxaxa"))
    [output] = run(engine, engine.add_request("a", SamplingParams(stop="a", min_tokens=3)))
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
    executor.num_said[request.completions[1].seq.seq_id] = 3  # it starts at "lo"
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
    assert executor.batches[0].num_computed_tokens == [0, 12, 12]
    assert len({row.seed for row in executor.batches[0].sampling}) == 3
    assert request.output().num_cached_tokens == 0


# ---- abort


def test_abort_while_waiting() -> None:
    engine = make_engine()
    request = engine.add_request("a")
    assert engine.abort(request.request_id)
    assert request.output().outputs[0].finish_reason == "abort"
    assert_idle(engine)


def test_abort_between_chunks() -> None:
    engine = make_engine(budget=4)
    request = engine.add_request("a long prompt")
    engine.step()
    assert engine.abort(request.request_id)
    assert_idle(engine)


def test_abort_while_running_keeps_the_text_so_far() -> None:
    engine = make_engine()
    request, other = engine.add_request("a", SamplingParams(stop="hex")), engine.add_request("b")
    engine.step()
    engine.step()
    assert engine.abort(request.request_id)
    [aborted, finished] = run(engine, request, other)
    assert (aborted.outputs[0].text, aborted.outputs[0].finish_reason) == ("he", "abort")
    assert (finished.outputs[0].text, finished.outputs[0].finish_reason) == ("hello", "stop")


def test_abort_ends_all_completions_that_still_run() -> None:
    executor = Script()
    engine = make_engine(executor)
    request = engine.add_request("a", SamplingParams(n=2))
    executor.num_said[request.completions[0].seq.seq_id] = 5  # it ends at once
    engine.step()
    assert engine.abort(request.request_id)
    assert [completion.finish_reason for completion in request.output().outputs] == ["stop", "abort"]
    assert_idle(engine)


def test_abort_of_a_finished_or_unknown_request_is_false() -> None:
    engine = make_engine()
    request = engine.add_request("a")
    run(engine)
    assert not engine.abort(request.request_id)
    assert request.output().outputs[0].finish_reason == "stop"
    assert not engine.abort("nobody")


# ---- failing steps


def test_a_failed_step_ends_only_the_requests_of_its_batch() -> None:
    executor = Script()
    engine = make_engine(executor, max_num_seqs=2)
    first, second, waiting = (engine.add_request(prompt) for prompt in ("a", "b", "c"))
    executor.errors = [None, OSError("broken")]
    engine.step()
    assert engine.step() == [first, second]
    assert [request.output().outputs[0].finish_reason for request in (first, second, waiting)] == [
        "error",
        "error",
        None,
    ]
    assert isinstance(first.error, OSError)
    assert first.output().outputs[0].text == "h", "what it had said stays"
    assert waiting.error is None
    [output] = run(engine, waiting)
    assert output.outputs[0].text == "hello"


def test_the_engine_is_usable_after_a_failed_step() -> None:
    model = ToyModel(fail_if=lambda _: True)
    engine = make_engine(model, eos=())
    prompt = list(range(13))
    failed = engine.add_request(prompt)
    engine.step()
    assert failed.finished
    assert_idle(engine)
    model.fail_if = lambda _: False
    again = engine.add_request(prompt, SamplingParams(max_tokens=5))
    [output] = run(engine, again)
    assert output.num_cached_tokens == 0, "what the failed step should have written must not be found"
    assert output.outputs[0].token_ids == continuation(prompt, 5)


def test_a_failed_step_ends_all_completions_of_a_request() -> None:
    executor = Script()
    engine = make_engine(executor)
    request = engine.add_request("a", SamplingParams(n=3))
    executor.errors = [OSError("broken")]
    assert engine.step() == [request]
    assert [completion.finish_reason for completion in request.output().outputs] == ["error"] * 3
    assert_idle(engine)


def test_a_failed_step_is_not_counted() -> None:
    executor = Script()
    engine = make_engine(executor)
    engine.add_request("a")
    executor.errors = [OSError("broken")]
    engine.step()
    assert engine.stats == EngineStats()


@pytest.fixture
def _pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_pythons_own_handler")
def test_ctrl_c_while_a_batch_executes_ends_its_requests_and_leaves_the_engine_usable() -> None:
    executor = Script()
    engine = make_engine(executor, max_num_seqs=1)
    request, waiting = engine.add_request("a"), engine.add_request("b")
    executor.errors = [None, KeyboardInterrupt()]
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.scheduler.check()
    assert request.output().outputs[0].finish_reason == "error"
    [output] = run(engine, waiting)
    assert output.outputs[0].text == "hello"


@pytest.mark.usefixtures("_pythons_own_handler")
def test_ctrl_c_between_two_states_waits_for_the_end_of_the_step() -> None:
    class Interrupting(Clock):
        def __call__(self) -> float:
            if armed:
                armed.pop()
                signal.raise_signal(signal.SIGINT)
            return super().__call__()

    armed: list[bool] = []
    engine = make_engine(clock=Interrupting())
    request = engine.add_request("a")
    engine.step()
    original = engine.scheduler.update
    # The first look at the clock after the results are in is in the middle of the bookkeeping.
    engine.scheduler.update = lambda *args: (armed.append(True), original(*args))[1]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.scheduler.check()
    assert request.output().outputs[0].text == "he", "the step was taken to its end"
    engine.scheduler.update = original
    [output] = run(engine, request)
    assert output.outputs[0].text == "hello"


@pytest.mark.usefixtures("_pythons_own_handler")
def test_ctrl_c_in_an_abort_waits_until_every_completion_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    request = engine.add_request("a long prompt", SamplingParams(n=3))
    engine.step()
    finish = engine.scheduler.finish
    monkeypatch.setattr(engine.scheduler, "finish", lambda *args: (signal.raise_signal(signal.SIGINT), finish(*args)))
    with pytest.raises(KeyboardInterrupt):
        engine.abort(request.request_id)
    assert [completion.finish_reason for completion in request.output().outputs] == ["abort"] * 3
    assert_idle(engine)


# ---- bad requests


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        (None, "not NoneType"),
        (5, "not int"),
        (b"bytes", "not bytes"),
        ({1: 2}, "not dict"),
        ([1, "2"], "holds '2': token ids must be integers"),
        ([1, 2.0], r"holds 2\.0: token ids must be integers"),
        ([True], "holds True: token ids must be integers"),
        ([1, -1], "token id -1: the vocabulary is 0 to 255"),
        ([256], "token id 256: the vocabulary is 0 to 255"),
        ([1] * 16, "has 16 tokens, but max_model_len is 16: at most 15"),
        ("x" * 40, "has 40 tokens, but max_model_len is 16"),
    ],
)
def test_a_bad_prompt_is_refused_and_leaves_nothing_behind(prompt: Any, message: str) -> None:
    engine = make_engine(max_model_len=16)
    with pytest.raises(InvalidPrompt, match=message):
        engine.add_request(prompt)
    assert_idle(engine)


def test_a_prompt_of_one_token_runs() -> None:
    engine = make_engine()
    [output] = run(engine, engine.add_request([65]))
    assert output.outputs[0].text == "hello"


def test_a_stop_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidSamplingParams, match="stop_token_ids holds 256: the vocabulary ends at 255"):
        make_engine().add_request("a", SamplingParams(stop_token_ids=[5, 256]))


def test_params_of_another_type_are_refused() -> None:
    with pytest.raises(InvalidSamplingParams, match="must be SamplingParams"):
        make_engine().add_request("a", {"temperature": 0})


def test_a_request_id_in_use_is_refused_and_the_running_request_goes_on() -> None:
    engine = make_engine()
    request = engine.add_request("a", request_id="mine")
    with pytest.raises(InvalidRequest, match="'mine' is in use"):
        engine.add_request("b", request_id="mine")
    [output] = run(engine, request)
    assert output.request_id == "mine"
    run(engine, engine.add_request("b", request_id="mine"))


def test_a_drawn_request_id_avoids_those_in_use() -> None:
    engine = make_engine()
    taken = engine.add_request("a", request_id="request-0")
    drawn = engine.add_request("b")
    assert drawn.request_id != taken.request_id
    run(engine)


def test_a_finished_request_cannot_be_submitted_again() -> None:
    engine = make_engine()
    request = engine.add_request("a")
    run(engine)
    with pytest.raises(InvalidRequest, match="'request-0' was submitted before"):
        engine.submit(request)
    assert_idle(engine)


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


def test_statistics_count_computed_tokens_and_time_by_phase() -> None:
    class Slow(Script):
        def execute(self, batch: ScheduledBatch) -> SampledBatch:
            clock.now += 0.5
            return super().execute(batch)

    clock = Clock()
    engine = make_engine(Slow(), clock=clock)
    run(engine, engine.add_request("abcd", SamplingParams(max_tokens=3)))
    assert (engine.stats.prefill_tokens, engine.stats.prefill_time) == (4, 0.5)
    assert (engine.stats.decode_tokens, engine.stats.decode_time) == (2, 1.0)
    assert engine.stats.num_decode_steps == 2


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
