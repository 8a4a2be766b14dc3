"""What drawn schedules cannot reach: bad arguments, many completions that end at once, a part that is broken at the end."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine.core.errors import EngineClosed, InvalidPrompt, InvalidRequest, InvalidSamplingParams
from nanoengine.core.messages import StepResult
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Sequence

from .toys import EOS, check, check_idle, make_engine, run


def test_the_end_of_a_waiting_sequence_looks_at_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort of n completions behind m waiting ones takes n log m looks, and not n times m."""
    engine = make_engine(max_num_seqs=1)
    ahead = [engine.make_request([1, 2, 3], CoreSamplingParams(n=500, max_tokens=1)) for _ in range(4)]
    last = engine.make_request([4, 5, 6], CoreSamplingParams(n=500), "last")
    for request in (*ahead, last):
        engine.submit(request)
    num_looks = 0

    def order(seq: Sequence) -> tuple[int, int]:
        nonlocal num_looks
        num_looks += 1
        return seq.order

    monkeypatch.setattr("nanoengine.core.scheduler._order", order)
    assert engine.abort("last")
    assert num_looks < 500 * 20
    assert last.finished
    check(engine.scheduler)
    assert len(engine.scheduler.waiting) == 4 * 500
    assert not any(request.num_finished for request in ahead)


def test_the_executor_is_closed_though_an_abort_raises() -> None:
    def raising(*_: object) -> None:
        raise LookupError("broken policy")

    engine = make_engine()
    engine.submit(engine.make_request([1, 2, 3]))
    engine.scheduler.finish = raising  # type: ignore[method-assign]
    with pytest.raises(LookupError):
        engine.close()
    assert engine.executor.is_closed
    engine.close()
    with pytest.raises(EngineClosed):
        engine.step()


def test_a_common_beginning_is_computed_once_and_found_as_soon_as_its_chunk_is_done() -> None:
    engine = make_engine(max_num_batched_tokens=20, max_chunk=10)
    for prompt in ([1] * 30, [1] * 8 + [2] * 3):
        engine.submit(engine.make_request(prompt, CoreSamplingParams(max_tokens=1)))
    engine.step()
    assert len(engine.scheduler.running) == 1, "the second waits for what the first computes"
    engine.step()
    assert engine.executor.num_computed == 10 + 10 + 3, "it goes on behind two blocks of the first chunk"
    run(engine, [])


def test_a_chunk_that_was_launched_before_a_preemption_publishes_nothing_of_the_next_life() -> None:
    class Preempting(PolicyPart):
        def preemption_victims(self, running: Any, waiting: Any) -> Any:
            return running.copy()

    engine = make_engine(max_chunk=4, parts=[Preempting()])
    scheduler = engine.scheduler
    engine.submit(engine.make_request([1] * 12))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [step.runs[0].seq_id for step in (first, second)] == [0, 0]
    scheduler.commit(StepResult([]))
    assert not scheduler.blocks.index[0]
    scheduler.commit(StepResult([]))
    assert len(scheduler.blocks.index[0]) == 1


@pytest.mark.parametrize(
    "prompt", [[], (), [True], [1.0], ["a"], [50], [-1], [1] * 60, "", None, 5, {1: 2}, [1, None]], ids=str
)
def test_a_bad_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidPrompt):
        make_engine().make_request(prompt)


@pytest.mark.parametrize(
    "options",
    [
        {"priority": 2**63},
        {"priority": -(2**63) - 1},
        {"priority": True},
        {"priority": 0.5},
        {"client": "a\nb"},
        {"client": 5},
        {"cache_salt": None},
        {"request_id": [1]},
    ],
    ids=str,
)
def test_other_bad_arguments_of_a_request_are_refused(options: dict[str, Any]) -> None:
    engine = make_engine()
    engine.make_request([1] * 59, priority=2**63 - 1, client="é", cache_salt=" ")
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        engine.make_request([1], **options)
    with pytest.raises(InvalidSamplingParams, match="sampling_params"):
        engine.make_request([1], {"max_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(InvalidSamplingParams, match="stop_token_ids holds 50"):
        engine.make_request([1], CoreSamplingParams(stop_token_ids=[50]))


def test_an_id_is_used_by_one_request_at_a_time_and_a_request_once() -> None:
    engine = make_engine()
    first, second = (engine.make_request([1], CoreSamplingParams(max_tokens=1, seed=1), "same") for _ in range(2))
    engine.submit(first)
    with pytest.raises(InvalidRequest, match="'same' is in use"):
        engine.submit(second)
    run(engine, [])
    with pytest.raises(InvalidRequest, match="was submitted"):
        engine.submit(first)
    run(engine, [second])
    assert second.output().outputs == first.output().outputs
    assert not engine.abort("same")


def test_what_ends_a_text_is_told_and_has_no_text() -> None:
    engine = make_engine()
    requests = [engine.make_request([3], CoreSamplingParams(max_tokens=30, seed=seed)) for seed in range(40)]
    run(engine, requests)
    ended = [own for request in requests for own in request.output().outputs if own.finish_reason == "stop"]
    assert ended
    for own in ended:
        assert own.token_ids[-1] == EOS
        assert own.stop_reason is None, "an end of text is no stop of the request"
        assert len(own.text) == len(own.token_ids) - 1
    run(engine, [plain := engine.make_request([3], CoreSamplingParams(max_tokens=5, seed=1, ignore_eos=True))])
    tokens = plain.output().outputs[0].token_ids
    params = CoreSamplingParams(max_tokens=5, seed=1, stop_token_ids=[tokens[2]])
    run(engine, [stopped := engine.make_request([3], params)])
    own = stopped.output().outputs[0]
    assert (own.token_ids, own.finish_reason, own.stop_reason) == (tokens[:3], "stop", tokens[2])
    assert own.text == plain.output().outputs[0].text[:2]


def test_seeds_are_those_of_the_engine_and_do_not_depend_on_who_has_one() -> None:
    found = []
    for seed in (5, 5, 6):
        engine = make_engine(seed=seed)
        own = CoreSamplingParams(max_tokens=8, ignore_eos=True, seed=1)
        drawn = CoreSamplingParams(max_tokens=8, ignore_eos=True)
        asked = [drawn, drawn] if found else [drawn, own, drawn]
        run(engine, requests := [engine.make_request([3], params) for params in asked])
        outputs = [request.sequences[0].output_token_ids for request in requests]
        found.append([outputs[0], outputs[-1]])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
    assert found[2][0] != found[0][0]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_so_many_steps_are_in_flight_and_a_reset_waits_for_all_requests(depth: int) -> None:
    engine = make_engine(depth=depth)
    engine.submit(engine.make_request([1] * 9, CoreSamplingParams(max_tokens=9, ignore_eos=True)))
    assert not engine.reset_prefix_cache(), "a request that waits counts, too"
    engine.step()
    assert engine.executor.num_launched == depth
    assert len(engine.scheduler.in_flight) == depth - 1
    assert not engine.reset_prefix_cache()
    assert engine.abort("request-0")
    check_idle(engine)
    assert engine.reset_prefix_cache()
    assert not engine.scheduler.blocks.index[0]


def test_a_part_that_is_idle_is_asked_nothing_in_steps() -> None:
    called: set[str] = set()

    class Noting(PolicyPart):
        def __getattribute__(self, name: str) -> Any:
            if callable(getattr(PolicyPart, name, None)) and not name.startswith("__"):
                called.add(name)
            return super().__getattribute__(name)

    part = Noting()
    part.is_idle = True
    engine = make_engine(parts=[part])
    run(engine, [engine.make_request([1] * 9)])
    assert called == {"made", "submitted"}
    engine.submit(request := engine.make_request([2] * 9))
    part.is_idle = False
    while not request.finished:
        engine.step()
    assert called >= {"preemption_victims", "candidates", "complete", "after_step", "finished"}
    part.is_idle = True
    called.clear()
    engine.close()
    assert called == {"close"}
