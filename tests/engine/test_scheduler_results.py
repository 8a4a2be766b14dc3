"""What the executor is told of a sequence, and what comes back besides tokens."""

from __future__ import annotations

from nanoengine.engine.messages import UNKNOWN, PromptLogprobs, StepResult
from nanoengine.outputs import TokenLogprob
from tests.engine.toys import (
    ToyModel,
    add,
    answer,
    continuation,
    drain,
    ids,
    make_scheduler,
    make_sequence,
    ran,
    step,
)

# ---- what the executor is told, once


def test_rows_that_nobody_has_any_more_are_named_once() -> None:
    scheduler = make_scheduler()
    a, b = add(scheduler, 3, 3, max_tokens=4)
    step(scheduler)
    row = a.row
    scheduler.finish(a, "abort")
    assert scheduler.schedule().ended == [row]
    assert scheduler.schedule().ended == []
    assert b.row != row


def test_a_row_that_goes_to_another_at_once_is_started_anew_in_the_plan_that_ends_it() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    a, b = add(scheduler, 3, 3, max_tokens=2)
    step(scheduler)
    step(scheduler)
    assert a.finished
    plan = scheduler.schedule()
    assert plan.ended == [0]
    assert [(start.row, start.token_ids) for start in plan.started] == [(0, b.token_ids)]


def test_a_table_that_grows_is_told_block_by_block() -> None:
    scheduler = make_scheduler()
    [seq] = add(scheduler, 3, max_tokens=12)
    table = step(scheduler).started[0].tables[0].copy()
    num_growths = 0
    while scheduler.has_unfinished:
        for row, group, first, block_ids in step(scheduler).tables:
            assert (row, group, first) == (0, 0, len(table))
            table += block_ids
            num_growths += 1
    assert num_growths == 3, "of 15 tokens, 14 need a slot"
    assert len(table) == 4
    assert seq.num_output_tokens == 12


# ---- one sequence of a step that gets no token


def test_a_sequence_without_a_token_ends_with_an_error_and_the_others_go_on() -> None:
    scheduler = make_scheduler()
    a, b = add(scheduler, 3, 3, max_tokens=4)
    step(scheduler)
    plan = scheduler.schedule()
    assert scheduler.update(plan, StepResult([UNKNOWN, 9], error=ArithmeticError("NaN"))) == ([a, b], [UNKNOWN, 9])
    scheduler.check()
    assert (a.finish_reason, b.finish_reason) == ("error", None)
    assert a.output_token_ids == [7]
    assert ran(scheduler) == ids(b)


# ---- log probabilities


def entry(token: int) -> dict[int, TokenLogprob]:
    return {token: TokenLogprob(-1.0, 1)}


def test_log_probabilities_belong_to_the_samples_that_they_name() -> None:
    scheduler = make_scheduler()
    a, b, c = add(scheduler, 3, 3, 3)
    plan = scheduler.schedule()
    scheduler.finish(c, "abort")
    scheduler.update(plan, StepResult([4, 5, 6], {1: entry(5), 2: entry(6)}))
    assert (a.logprobs, b.logprobs, c.logprobs) == ([], [entry(5)], [])


def test_log_probabilities_of_a_prompt_come_chunk_by_chunk() -> None:
    scheduler = make_scheduler(budget=4)
    seq = make_sequence(0, list(range(10)), prompt_logprobs=1)
    scheduler.add(seq)
    while not seq.num_output_tokens:
        plan = scheduler.schedule()
        [chunk] = plan.chunks
        last = min(chunk.num_computed + chunk.num_new, 9)
        result = answer(plan)
        positions = range(chunk.num_computed + 1, last + 1)
        result.prompt_logprobs = [PromptLogprobs(chunk.row, positions[0], [entry(at) for at in positions])]
        scheduler.update(plan, result)
        scheduler.check()
    assert [list(each) for each in seq.prompt_logprobs] == [[at] for at in range(1, 10)]
    assert seq.sampling.prompt_logprobs is None, "they are there: a restart need not compute them again"


def test_a_prompt_whose_log_probabilities_are_wanted_takes_nothing_from_the_cache_but_gives() -> None:
    scheduler, model = make_scheduler(), ToyModel()
    prompt = list(range(13))
    for seq_id, (wanted, num_cached) in enumerate([(0, 0), (None, 12), (0, 0), (None, 12)]):
        seq = make_sequence(seq_id, prompt, max_tokens=3, prompt_logprobs=wanted)
        scheduler.add(seq)
        drain(scheduler, model)
        assert seq.num_cached_tokens == num_cached
        assert seq.output_token_ids == continuation(prompt, 3)
