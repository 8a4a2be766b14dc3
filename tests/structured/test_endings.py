"""Ends of constrained requests, and what goes wrong in one."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.core.errors import NoTokenLeft
from nanoengine.core.messages import StepPlan
from nanoengine.errors import InvalidSamplingParams, StepFailed
from nanoengine.server.errors import problem_of
from nanoengine.structured import constraint, structured
from nanoengine.structured.structured import MASKS, GrammarTooComplex, Structured
from tests.e2e.small_engine import assert_idle

YES = {"choice": ["yes", "no"]}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_model_len=200, num_kv_blocks=60, use_tqdm=False, device="cpu") as llm:
        yield llm


def part_of(llm: LLM) -> Structured:
    [part] = (part for part in llm.engine.scheduler.parts if isinstance(part, Structured))
    return part


def say(llm: LLM, **params: Any) -> Any:
    return llm.generate("def f", SamplingParams(seed=1, max_tokens=30, **params), use_tqdm=False)[0].outputs[0]


def test_the_end_of_a_grammar_is_the_end_even_if_ends_are_ignored(llm: LLM) -> None:
    plain, ignoring = say(llm, structured_outputs=YES), say(llm, structured_outputs=YES, ignore_eos=True)
    assert plain.text in YES["choice"]
    assert (plain.finish_reason, plain.stop_reason) == ("stop", None)
    assert ignoring == plain


def test_no_request_is_made_of_what_cannot_be_promised(llm: LLM) -> None:
    good, bad = SamplingParams(structured_outputs=YES), SamplingParams(structured_outputs={"json": {"not": {}}})
    steps = llm.engine.scheduler.num_steps
    with pytest.raises(InvalidSamplingParams, match="Unimplemented keys"):
        llm.generate(["a", "b"], [good, bad], use_tqdm=False)
    assert llm.engine.scheduler.num_steps == steps, "nothing has run"


@pytest.mark.parametrize(
    "params",
    [{"min_tokens": 20}, {"allowed_token_ids": [5]}, {"bad_words": ["y", "yes", "n", "no"]}],
    ids=lambda params: next(iter(params)),
)
def test_where_nothing_is_left_only_that_request_ends(llm: LLM, params: dict[str, Any]) -> None:
    asked = [SamplingParams(seed=1, max_tokens=30, structured_outputs=YES, **own) for own in ({}, params)]
    alone = llm.generate("def f", asked[0], use_tqdm=False)[0].outputs[0]
    with pytest.raises(StepFailed) as failed:
        llm.generate(["def f", "def g"], asked, use_tqdm=False)
    assert isinstance(failed.value.__cause__, NoTokenLeft)
    beside, ended = (output.outputs[0] for output in failed.value.outputs)
    assert (beside.token_ids, ended.finish_reason) == (alone.token_ids, "error")
    assert_idle(llm)


def test_a_grammar_that_takes_too_much_ends_its_request_by_name(llm: LLM) -> None:
    part = part_of(llm)
    with pytest.raises(StepFailed) as failed:
        say(llm, structured_outputs={"regex": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"})
    assert isinstance(failed.value.__cause__, GrammarTooComplex)
    assert "too many expressions" in str(failed.value)
    assert not part.constraints
    assert say(llm, structured_outputs=YES).finish_reason == "stop"


def test_a_grammar_that_is_slow_again_and_again_ends_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = SamplingParams(seed=1, max_tokens=30)
    [alone] = llm.generate("def g", beside, use_tqdm=False)
    for module in (constraint, structured):
        monkeypatch.setattr(module, "SLOW", -1)  # any time is too much
    slow = SamplingParams(seed=1, max_tokens=30, structured_outputs={"regex": "[a-z]{9}"})
    with pytest.raises(StepFailed, match="again and again") as failed:
        llm.generate(["def g", "def f"], [beside, slow], use_tqdm=False)
    assert isinstance(failed.value.__cause__, GrammarTooComplex)
    assert failed.value.outputs[0].outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_client_is_told_that_its_grammar_was_too_much() -> None:
    failure = StepFailed("the request failed", [])
    failure.__cause__ = GrammarTooComplex("structured_outputs: too much")
    assert (problem_of(failure).status, problem_of(failure).param) == (400, "structured_outputs")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_masks_that_cannot_be_filled_are_a_failed_step(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_model_len": 200, "num_kv_blocks": 60, "device": "cpu", "async_scheduling": asynchronous}
    with LLM("demo", use_tqdm=False, **options) as own:
        part, expected = part_of(own), say(own, structured_outputs=YES)
        fill = part._fill

        def failing(_: Any) -> Any:
            raise MemoryError("no room for masks")

        monkeypatch.setattr(part, "_fill", failing)
        with pytest.raises(StepFailed, match="no room for masks"):
            say(own, structured_outputs=YES)
        monkeypatch.setattr(part, "_fill", fill)
        assert say(own, structured_outputs=YES) == expected
        assert not part.constraints
        assert not part._in_flight
        assert_idle(own)


def test_a_request_that_was_made_needs_no_cache(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    part, params = part_of(llm), SamplingParams(seed=1, max_tokens=30, structured_outputs=YES, n=2)
    requests = [llm.engine.make_request("def f", params) for _ in range(2)]
    monkeypatch.setattr(part.grammars, "matcher", None)  # as if others had been asked for since
    for request in requests:
        llm.engine.submit(request)
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert all(own.text in YES["choice"] for request in requests for own in request.output().outputs)


def test_masks_reach_another_process_when_they_are_filled(llm: LLM) -> None:
    engine, plans = llm.engine, []
    launch = engine.executor.launch

    def launching(plan: StepPlan) -> Any:
        plans.append(pickle.loads(pickle.dumps(plan)))
        return launch(plan)

    engine.executor.launch = launching  # type: ignore[method-assign]
    try:
        expected = say(llm, structured_outputs=YES)
    finally:
        engine.executor.launch = launch  # type: ignore[method-assign]
    masks = [plan.extras[MASKS] for plan in plans if MASKS in plan.extras]
    assert len(masks) >= 2
    first = masks[0].wait()
    [(_, count)] = masks[0].rows
    assert first.shape == (count, -(-llm.engine.vocab_size // 32))
    token = expected.token_ids[0]
    assert first.view("uint32")[0, token // 32] >> (token % 32) & 1


def test_an_abort_between_steps_leaves_nothing(llm: LLM) -> None:
    engine, part = llm.engine, part_of(llm)
    request = engine.make_request(
        "def f", SamplingParams(n=3, max_tokens=30, structured_outputs={"regex": "[a-z]{100}"})
    )
    engine.submit(request)
    for _ in range(3):
        engine.step()
    assert len(part.constraints) == 3
    engine.abort(request.request_id)
    assert not part.constraints
    assert_idle(llm)
