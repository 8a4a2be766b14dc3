from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from nanoengine.engine.messages import (
    UNKNOWN,
    Chunk,
    Decodes,
    Drafted,
    Entries,
    FileDone,
    FileRead,
    FileWrite,
    Place,
    PromptLogprobs,
    RowSampling,
    Started,
    StepPlan,
    StepResult,
    Tier,
    Transfer,
)
from nanoengine.outputs import TokenLogprob
from nanoengine.sampling_params import SamplingParams
from tests.engine.toys import ToyModel, is_prefill, make_scheduler, make_sequence, run_step, runs_of

BLOCK = Place(Tier.DEVICE, 3)
TWO_DECODES = Decodes(np.array([4, 2], np.int32), np.array([9, 1], np.int32))


def contents(plan: StepPlan) -> dict[str, Any]:
    """A plan as a value that can be compared."""
    found = {field.name: getattr(plan, field.name) for field in fields(plan)}
    found["decodes"] = [(column.dtype, column.tolist()) for column in plan.decodes]
    return found


def test_an_empty_plan_is_false() -> None:
    plan = StepPlan()
    assert not plan
    assert not plan.computes
    assert (plan.num_new_tokens, plan.num_samples) == (0, 0)


@pytest.mark.parametrize(
    "content",
    [
        {"decodes": TWO_DECODES},
        {"drafted": [Drafted(0, 3, (4,))]},
        {"chunks": [Chunk(0, 0, 3, ())]},
        {"transfers": [Transfer(BLOCK, Place(Tier.HOST, 0))]},
        {"reads": [FileRead("file", b"header", 0)]},
        {"writes": [FileWrite("file", b"header", BLOCK)]},
        {"deletes": ["file"]},
        {"wait": True},
    ],
    ids=lambda content: next(iter(content)),
)
def test_a_plan_with_anything_to_do_is_true(content: dict[str, Any]) -> None:
    plan = StepPlan(**content)
    assert plan
    assert plan.computes == bool({"decodes", "drafted", "chunks"} & set(content))


def test_changes_alone_are_no_reason_for_a_step() -> None:
    """They can wait for one that computes: nobody reads a row before."""
    assert not StepPlan(ended=[3], masks=[(1, None)])


def test_decodes_come_first_and_every_run_is_counted() -> None:
    plan = StepPlan(decodes=TWO_DECODES, chunks=[Chunk(0, 0, 5, ()), Chunk(1, 8, 3, (1, 3))])
    assert plan.num_new_tokens == 2 + 5 + 3
    assert plan.num_samples == 2 + 0 + 2


def test_every_token_of_a_run_with_drafts_samples() -> None:
    runs = [Drafted(0, 5, (1, 2, 3)), Drafted(7, 8, (UNKNOWN,))]
    assert [run.num_new for run in runs] == [4, 2]
    plan = StepPlan(decodes=TWO_DECODES, drafted=runs, chunks=[Chunk(1, 8, 3, (1, 3)), Chunk(5, 0, 4, ())])
    assert plan.num_decode_tokens == 2 + 4 + 2
    assert plan.num_new_tokens == 2 + 4 + 2 + 3 + 4
    assert plan.num_samples == 2 + 4 + 2 + 2


def test_plans_share_no_lists() -> None:
    StepPlan().drafted.append(Drafted(0, 1, (2,)))
    StepResult([]).num_accepted.append(1)
    assert (StepPlan().drafted, StepResult([]).num_accepted) == ([], [])
    StepPlan().chunks.append(Chunk(0, 0, 1, ()))
    StepPlan().ended.append(1)
    assert (StepPlan().chunks, StepPlan().ended) == ([], [])
    StepResult([]).logprobs[0] = {}
    assert StepResult([]).logprobs == {}


def test_nobody_can_write_into_the_decodes_that_all_empty_plans_share() -> None:
    decodes = StepPlan().decodes
    assert [len(column) for column in decodes] == [0, 0]


def test_a_plan_survives_pickling() -> None:
    sampling = RowSampling(
        SamplingParams(temperature=0.5, stop="x", logprobs=2, bad_words=["no"]),
        seed=2**64 - 1,
        num_prompt_tokens=3,
        stop_token_ids=(3, 4),
        bad_words=((1, 2), (7,)),
        prompt_logprobs=5,
    )
    plan = StepPlan(
        started=[Started(7, [1, 2, 3], ([4, 5], [6]), sampling)],
        tables=[Entries(1, 0, 2, [8, 9]), Entries(1, 1, 1, [10])],
        ended=[2],
        masks=[(1, b"bits"), (7, None)],
        decodes=TWO_DECODES,
        drafted=[Drafted(3, 9, (5, 6)), Drafted(0, 1, (UNKNOWN, UNKNOWN))],
        chunks=[Chunk(7, 0, 3, (7, 8))],
        transfers=[Transfer(BLOCK, Place(Tier.HOST, 1))],
        reads=[FileRead("file", b"header", 1)],
        writes=[FileWrite("other", b"header", BLOCK)],
        deletes=["third"],
        wait=True,
    )
    again = pickle.loads(pickle.dumps(plan))
    assert contents(again) == contents(plan)


def test_a_result_survives_pickling() -> None:
    result = StepResult(
        [5, UNKNOWN],
        {0: {5: TokenLogprob(-0.25, 1), 9: TokenLogprob(-2.0, 2)}},
        [PromptLogprobs(0, 1, [{4: TokenLogprob(-1.5, 3)}])],
        [FileDone("file"), FileDone("other", "the disk is full")],
        num_accepted=[0, 3],
        error=ArithmeticError("NaN"),
    )
    again = pickle.loads(pickle.dumps(result))
    assert repr(again) == repr(result)
    assert (again.token_ids, again.logprobs, again.files) == (result.token_ids, result.logprobs, result.files)
    assert (again.num_accepted, str(again.error)) == ([0, 3], "NaN")


def test_a_resumed_sequence_is_told_with_its_output() -> None:
    """It begins anew: whoever gets the plan by pickle needs to know nothing of its first life."""
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    model = ToyModel()
    a, b = make_sequence(0, [1] * 6, max_tokens=9), make_sequence(1, [2] * 6, max_tokens=9)
    scheduler.add(a)
    scheduler.add(b)
    while not b.num_preemptions:
        run_step(scheduler, model)
    scheduler.finish(a, "abort")
    plan = pickle.loads(pickle.dumps(scheduler.schedule()))
    assert b.num_output_tokens > 0
    assert is_prefill(plan)
    assert plan.started == [Started(b.row, b.token_ids, (b.block_tables[0],), b.sampling)]
    [(row, cached, new)] = runs_of(plan)
    assert (row, cached + new) == (b.row, b.num_known_tokens)
