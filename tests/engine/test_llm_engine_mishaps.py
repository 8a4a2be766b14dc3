"""Aborts, steps that fail, and requests that are refused."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from nanoengine.engine.metrics import EngineStats
from nanoengine.errors import InvalidPrompt, InvalidRequest, InvalidSamplingParams
from nanoengine.sampling_params import SamplingParams
from tests.engine.engine_toys import Script, assert_idle, make_engine, run
from tests.engine.toys import ToyModel, continuation

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
    executor.num_said[request.completions[0].seq.seed] = 5  # it ends at once
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


def test_a_failed_step_ends_only_its_own_requests() -> None:
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
def test_ctrl_c_while_a_plan_is_carried_out_ends_its_requests_and_leaves_the_engine_usable() -> None:
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
    engine = make_engine()
    request = engine.add_request("a")
    engine.step()
    original = engine.scheduler.update
    # Between the scheduler's books and the texts is the middle of the bookkeeping.
    engine.scheduler.update = lambda *args: (original(*args), signal.raise_signal(signal.SIGINT))[0]
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
    with pytest.raises(InvalidSamplingParams, match="stop_token_ids holds 256: the vocabulary has 256 tokens"):
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
