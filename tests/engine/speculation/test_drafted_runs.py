"""Drafts change nothing but the number of steps: an engine with any guesser says what one without says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine import SamplingParams
from nanoengine.engine.kv.groups import KVSpec
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.messages import UNKNOWN, Drafted, StepPlan, StepResult
from nanoengine.engine.scheduler import Scheduler
from nanoengine.engine.speculation.speculation import Speculation
from nanoengine.engine.speculation.step_costs import StepCosts
from nanoengine.outputs import TokenLogprob
from tests.engine.engine_toys import make_engine
from tests.engine.late_model import LateModel
from tests.engine.plan_mirror import PlanMirror
from tests.engine.speculation.guessers import HOSTILE, Say, Scripted, by_chance, right, speculation, wrong
from tests.engine.toys import (
    FAST,
    ToyModel,
    add,
    answer,
    assert_idle,
    continuation,
    drain,
    make_scheduler,
    make_sequence,
    step,
)

NOW_AND_THEN = 40
"""Tokens of the longest output here."""


def drafting(**options: Any) -> tuple[Scheduler, Speculation]:
    own = speculation(**{key: options.pop(key) for key in ("say", "num_drafts", "costs") if key in options})
    return make_scheduler(speculation=own, **options), own


def finish(engine: LLMEngine, requests: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    """What became of the completions of some requests, and of the engine's blocks: all must be back."""
    live = [
        engine.make_request(prompt, params, priority=-(i % 3), client="ab"[i % 2])
        for i, (prompt, params) in enumerate(requests)
    ]
    for request in live:
        engine.submit(request)
    for _ in range(3000):
        if not engine.has_unfinished:
            break
        engine.step()
        engine.scheduler.check()
    assert not engine.has_unfinished
    assert engine.scheduler.block_manager.pool.usage == 0
    outputs = [output for request in live for output in request.output().outputs]
    return [(o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs) for o in outputs]


class WithLogprobs(LateModel):
    """Says something of each sample that depends on its place and its token."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        result.logprobs = {i: {token: TokenLogprob(-token / 7, 1)} for i, token in enumerate(result.token_ids)}
        return result


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), min_size=1, max_size=20),
        st.builds(
            SamplingParams,
            max_tokens=st.integers(1, NOW_AND_THEN),
            n=st.sampled_from([1, 1, 1, 3]),
            stop_token_ids=st.sampled_from([(), (), tuple(range(0, 1000, 9))]),
            stop=st.sampled_from([(), (), ("7 1", "33", "8 9"), ("4",)]),
            include_stop_str_in_output=st.booleans(),
            min_tokens=st.sampled_from([0, 1]),
            logprobs=st.sampled_from([None, 1]),
            speculate=st.sampled_from([True, True, True, False]),
        ),
    ),
    min_size=1,
    max_size=5,
)

SPECS = {
    "full": (KVSpec(),),
    "window": (KVSpec("window", 6),),
    "both": (KVSpec(), KVSpec("window", 5)),
    "chunked": (KVSpec("chunked", 6), KVSpec()),
}


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    specs = draw(st.sampled_from([*SPECS.values()]))
    return {
        "specs": specs,
        "num_blocks": draw(st.sampled_from([17, 24, 64])) * len(specs),
        "max_num_seqs": draw(st.integers(1, 6)),
        "budget": draw(st.sampled_from([6, 16, 64])),
        "caching": draw(st.booleans()),
        "policy": draw(st.sampled_from(["prefill_first", "mixed"])),
        "max_chunk": draw(st.sampled_from([None, None, 3])),
        "max_model_len": 64,
    }


@FAST
@given(
    requests=requests,
    shape=shapes(),
    depth=st.integers(1, 2),
    say=st.sampled_from(sorted(HOSTILE)),
    num_drafts=st.integers(1, 15),
)
def test_nothing_changes_but_the_number_of_steps(
    requests: list[tuple[list[int], SamplingParams]], shape: dict[str, Any], depth: int, say: str, num_drafts: int
) -> None:
    specs = shape["specs"]
    plain = make_engine(WithLogprobs(specs=specs), eos=(), max_steps_in_flight=depth, **shape)
    own = speculation(HOSTILE[say], num_drafts=num_drafts)
    drafted = make_engine(WithLogprobs(specs=specs), eos=(), max_steps_in_flight=depth, speculation=own, **shape)
    PlanMirror(drafted.scheduler)
    assert finish(drafted, requests) == finish(plain, requests)
    drafts = drafted.scheduler.drafts
    assert drafts is not None
    assert not drafts.verifying | drafts.postponed
    assert own.stats.num_accepted == sum(own.stats.accepted_at)
    if say in ("wrong", "silent"):
        assert own.stats.num_accepted == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_right_drafts_save_steps(policy: str, depth: int) -> None:
    counts: Counter[bool] = Counter()
    for speculates in (False, True):
        own = speculation(num_drafts=7) if speculates else None
        model = LateModel()
        engine = make_engine(model, eos=(), policy=policy, max_steps_in_flight=depth, speculation=own, num_blocks=99)
        finish(engine, [([1, 2, 3], SamplingParams(max_tokens=41)), ([4], SamplingParams(max_tokens=41))])
        counts[speculates] = len(model.plans)
    assert counts[False] >= 41
    assert counts[True] <= 41 / 8 + 4 + 3 * (depth - 1), "eight tokens a step"


def test_a_plan_says_which_drafts_stand_behind_the_last_token() -> None:
    scheduler, own = drafting(num_drafts=3)
    [seq] = add(scheduler, 5, max_tokens=20)
    prompt = seq.token_ids.copy()
    model = ToyModel()
    scheduler.update(plan := scheduler.schedule(), model.execute(plan))
    tokens = continuation(prompt, 9)
    plan = scheduler.schedule()
    scheduler.check()
    assert plan.drafted == [Drafted(seq.row, 5, tuple(tokens[1:4]))]
    assert (plan.num_new_tokens, plan.num_samples, len(plan.decodes.rows)) == (4, 4, 0)
    assert (seq.num_computed_tokens, seq.num_tokens, seq.num_known_tokens) == (9, 10, 6), (
        "all count while it is on its way"
    )
    assert scheduler.update(plan, model.execute(plan)) == ([seq] * 4, tokens[1:5])
    scheduler.check()
    assert (seq.num_computed_tokens, seq.num_tokens, seq.num_known_tokens) == (9, 10, 10)
    assert (own.stats.num_runs, own.stats.num_drafts, own.stats.num_accepted) == (1, 3, 3)


def test_what_was_rejected_is_taken_back_with_its_blocks() -> None:
    scheduler, own = drafting(say=wrong, num_drafts=6, block_size=2, num_blocks=40)
    [seq] = add(scheduler, 5, max_tokens=20)
    model = ToyModel(block_size=2)
    scheduler.update(plan := scheduler.schedule(), model.execute(plan))
    in_use = scheduler.block_manager.pool.num_blocks - scheduler.block_manager.pool.num_free
    plan = scheduler.schedule()
    assert len(plan.drafted[0].drafts) == 6
    assert len(seq.block_tables[0]) == 6, "room for 12 tokens"
    scheduler.update(plan, model.execute(plan))
    scheduler.check()
    assert (seq.num_computed_tokens, seq.num_tokens) == (6, 7)
    assert len(seq.block_tables[0]) == 4
    assert scheduler.block_manager.pool.num_blocks - scheduler.block_manager.pool.num_free <= in_use + 1
    drain(scheduler, model)
    assert_idle(scheduler)
    assert own.stats.num_accepted == 0


def test_only_accepted_tokens_are_published() -> None:
    """Whoever has the same prompt finds what was said, and nothing of what was only guessed."""
    scheduler, _ = drafting(say=wrong, num_drafts=8, block_size=2, num_blocks=60)
    [seq] = add(scheduler, 4, max_tokens=9)
    model = ToyModel(block_size=2)
    drain(scheduler, model)
    known = {tuple(block.token_ids(2)) for block in scheduler.block_manager.cached_blocks()}
    pieces = {tuple(seq.token_ids[i : i + 2]) for i in range(0, len(seq.token_ids), 2)}
    assert known <= pieces


def test_drafts_end_where_the_sequence_must() -> None:
    """With all accepted, the last sample is the last token: none is computed in vain."""
    for max_tokens in range(1, 9):
        scheduler, _ = drafting(num_drafts=15, max_model_len=64)
        [seq] = add(scheduler, 5, max_tokens=max_tokens)
        prompt = seq.token_ids.copy()
        model = ToyModel()
        drain(scheduler, model)
        assert seq.token_ids == prompt + continuation(prompt, max_tokens)
        assert model.num_computed <= 5 + max_tokens - 1
        assert len(model.plans) <= 2


def test_nobody_gives_way_for_drafts() -> None:
    scheduler, own = drafting(num_drafts=15, block_size=4, num_blocks=16, max_num_seqs=2)
    add(scheduler, 25, 25, max_tokens=7)  # 7 blocks each for the tokens, 8 with all that are to come
    drain(scheduler, ToyModel())
    assert scheduler.num_preemptions == 0
    assert own.stats.num_accepted > 0


def test_a_request_may_go_without() -> None:
    scheduler, own = drafting()
    seqs = [*add(scheduler, 5, max_tokens=20), *add(scheduler, 5, max_tokens=20, speculate=False)]
    model = ToyModel()
    drain(scheduler, model)
    drafted = {run.row for plan in model.plans for run in plan.drafted}
    assert len(drafted) == 1
    assert {len(seq.token_ids) for seq in seqs} == {25}
    assert own.stats.num_accepted >= 10


def test_prompts_come_before_drafts() -> None:
    """In a mixed step with a prompt, what decodes leave of the budget is the prompt's."""
    scheduler, _ = drafting(policy="mixed", budget=8, max_model_len=64)
    add(scheduler, 3, max_tokens=40)
    model = ToyModel()
    for _ in range(2):
        scheduler.update(plan := scheduler.schedule(), model.execute(plan))
    assert model.plans[-1].drafted
    add(scheduler, 30, max_tokens=2)
    scheduler.update(plan := scheduler.schedule(), model.execute(plan))
    assert (len(plan.drafted), plan.num_new_tokens) == (0, 8)


def test_a_mask_from_outside_stops_the_guessing() -> None:
    scheduler, _ = drafting()
    [seq] = add(scheduler, 3, max_tokens=40)
    model = ToyModel()
    scheduler.update(plan := scheduler.schedule(), model.execute(plan))
    scheduler.set_mask(seq, bytes(128))
    assert not step(scheduler).drafted
    scheduler.set_mask(seq, None)
    assert step(scheduler).drafted


def test_a_run_without_a_token_ends_its_sequence_behind_what_was_accepted() -> None:
    scheduler, _ = drafting()
    [seq] = add(scheduler, 3, max_tokens=40)
    model = ToyModel()
    scheduler.update(plan := scheduler.schedule(), model.execute(plan))
    known = seq.token_ids.copy()
    plan = scheduler.schedule()
    tokens = list(plan.drafted[0].drafts)
    result = StepResult([*tokens[:2], UNKNOWN, 5, 6], num_accepted=[2], error=ArithmeticError("NaN"))
    assert scheduler.update(plan, result) == ([seq] * 3, [*tokens[:2], UNKNOWN])
    assert (seq.token_ids, seq.finish_reason) == (known + tokens[:2], "error")
    assert_idle(scheduler)


def test_a_plan_that_fails_ends_those_it_verified() -> None:
    scheduler, _ = drafting()
    a, b = add(scheduler, 3, 4, max_tokens=9)
    model = ToyModel()
    scheduler.update(plan := scheduler.schedule(), model.execute(plan))
    assert scheduler.schedule().drafted
    assert set(scheduler.fail()) == {a, b}
    assert_idle(scheduler)


def test_one_who_is_preempted_meanwhile_keeps_what_was_accepted() -> None:
    scheduler, _ = drafting(num_blocks=16, block_size=4)
    [seq] = add(scheduler, 3, max_tokens=40)
    prompt = seq.token_ids.copy()
    model = LateModel()
    scheduler.update(plan := scheduler.schedule(), model.launch(plan).result())
    launched = model.launch(plan := scheduler.schedule())
    scheduler._preempt_last()
    scheduler.check()
    assert not scheduler.schedule(), "its tokens are on their way"
    scheduler.update(plan, launched.result())
    scheduler.check()
    assert seq.token_ids == prompt + continuation(prompt, 6)
    while scheduler.has_unfinished:
        scheduler.update(plan := scheduler.schedule(), model.launch(plan).result())
    assert seq.token_ids == prompt + continuation(prompt, 40)


def test_one_stream_shares_nothing_with_itself() -> None:
    scheduler, _ = drafting(num_drafts=9, block_size=2, num_blocks=60)
    PlanMirror(scheduler)
    add(scheduler, 9, max_tokens=40)
    model = ToyModel(block_size=2)
    drain(scheduler, model)
    assert not any(any(plan.num_common_blocks) for plan in model.plans)


def test_streams_of_one_prompt_share_it_while_drafts_are_verified() -> None:
    scheduler, _ = drafting(num_drafts=3, block_size=2, num_blocks=60)
    PlanMirror(scheduler)
    for seq_id in range(3):
        scheduler.add(make_sequence(seq_id, [5] * 9, max_tokens=20))
    model = ToyModel(block_size=2)
    drain(scheduler, model)
    assert any(plan.drafted and plan.num_common_blocks == [4] for plan in model.plans)


@pytest.mark.parametrize("say", [right, wrong])
def test_who_is_left_out_of_a_plan_that_fails_has_lost_nothing_with_it(say: Say) -> None:
    """Forks write into blocks of their own, which a plan copies: whoever is given one is in that plan."""
    prompt = [3, 3, 3, 3, 3]
    for failing in range(2, 9):
        model = LateModel(fail_if=lambda _, at=failing: len(model.plans) == at)  # noqa: B023
        engine = make_engine(model, eos=(), max_steps_in_flight=2, speculation=speculation(say), num_blocks=64)
        PlanMirror(engine.scheduler)
        request = engine.add_request(prompt, SamplingParams(n=3, max_tokens=20))
        for _ in range(200):
            if engine.has_unfinished:
                engine.step()
        for output in request.output().outputs:
            assert output.token_ids == continuation(prompt, 20)[: len(output.token_ids)]
            assert output.finish_reason == "error" or len(output.token_ids) == 20


def test_blocks_of_what_has_no_finite_logits_are_wiped() -> None:
    scheduler, _ = drafting(num_drafts=9, block_size=2, num_blocks=60)
    [seq] = add(scheduler, 3, max_tokens=40)
    model = ToyModel(block_size=2)
    scheduler.update(plan := scheduler.schedule(), model.execute(plan))
    plan = scheduler.schedule()
    written = set(seq.block_tables[0])
    scheduler.update(plan, StepResult([UNKNOWN] * 10, num_accepted=[0], error=ArithmeticError("NaN")))
    assert not scheduler.has_unfinished
    assert written <= scheduler.block_manager._spoilt
    [seq] = add(scheduler, 3, max_tokens=40)
    scheduler.update(plan := scheduler.schedule(), model.execute(plan))
    plan = scheduler.schedule()
    lookahead = set(seq.block_tables[0][3:])
    tokens = continuation(seq.token_ids, 1)
    scheduler.update(plan, StepResult([tokens[0], *[UNKNOWN] * 9], num_accepted=[0]))
    assert lookahead <= scheduler.block_manager._spoilt, "of a draft that was rejected, too"
    assert seq.finish_reason is None


def test_what_was_accepted_behind_an_end_is_nobodys() -> None:
    """Whoever computes the steps may guess an end, and what it thinks comes after."""
    scheduler, _ = drafting()
    [seq] = add(scheduler, 3, max_tokens=40, stop_token_ids=[77], logprobs=0)
    model = ToyModel()
    first = model.execute(plan := scheduler.schedule())
    first.logprobs = {0: {first.token_ids[0]: TokenLogprob(-1.0, 1)}}
    scheduler.update(plan, first)
    plan = scheduler.schedule()
    entries = {i: {token: TokenLogprob(-1.0, 1)} for i, token in enumerate([8, 77, 9, 9, UNKNOWN])}
    scheduler.update(plan, StepResult([8, 77, 9, 9, UNKNOWN], entries, num_accepted=[4]))
    assert seq.output_token_ids[1:] == [8, 77]
    assert (seq.finish_reason, len(seq.logprobs)) == ("stop", 3)
    assert scheduler.block_manager.cached_blocks(), "nothing was condemned"
    assert_idle(scheduler)


def test_an_end_in_the_middle_of_a_run_is_the_end() -> None:
    prompt = [1, 1, 1]
    tokens = continuation(prompt, 12)
    for end in range(12):
        engine = make_engine(ToyModel(), eos=(), speculation=speculation(num_drafts=15))
        [own] = finish(engine, [(prompt, SamplingParams(max_tokens=30, stop_token_ids=[tokens[end]]))])
        first = tokens.index(tokens[end])
        assert own[0] == tokens[: first + 1]
        assert own[2:4] == ("stop", tokens[end])


def test_a_stop_string_in_the_middle_of_a_run_is_the_end() -> None:
    prompt = [1, 1, 1]
    tokens = continuation(prompt, 12)
    for end in range(2, 12):
        engine = make_engine(ToyModel(), eos=(), speculation=speculation(num_drafts=15))
        word = f" {tokens[end]} "
        [own] = finish(engine, [(prompt, SamplingParams(max_tokens=13, stop=[word]))])
        first = next(i for i in range(1, 13) if tokens[i] == tokens[end])
        assert own[0] == tokens[: first + 1]
        assert own[1] == " ".join(map(str, tokens[:first]))
        assert own[2:4] == ("stop", word)


def test_a_proposer_that_cannot_even_begin_harms_nobody() -> None:
    class Broken(Scripted):
        def begin(self, num_prompt_tokens: int, cache_salt: bytes) -> Scripted:
            raise RuntimeError("not today")

    scheduler, own = drafting()
    own.proposer = Broken(right)
    [seq] = add(scheduler, 5, max_tokens=9)
    prompt = seq.token_ids.copy()
    drain(scheduler, ToyModel())
    assert seq.token_ids == prompt + continuation(prompt, 9)
    assert (own.stats.num_errors, own.stats.num_runs) == (1, 0)


def test_in_a_full_batch_nobody_is_asked() -> None:
    scheduler, own = drafting(costs=StepCosts([(2, 1.0)]))
    add(scheduler, 3, 4, 5, max_tokens=9)
    model = ToyModel()
    drain(scheduler, model)
    proposer = own.proposer
    assert isinstance(proposer, Scripted)
    assert proposer.num_begun == 0
    assert own.stats.num_full > 0
    assert not any(plan.drafted for plan in model.plans)


def test_statistics_say_what_became_of_guesses() -> None:
    scheduler, own = drafting(say=by_chance, num_drafts=6)
    add(scheduler, 3, 4, 5, max_tokens=30)
    drain(scheduler, ToyModel())
    stats = own.snapshot()
    assert stats.num_runs > 0
    assert stats.num_accepted == sum(stats.accepted_at) < stats.num_drafts
    assert stats.tried_at[0] == stats.num_runs
    assert stats.tried_at[1:] == stats.accepted_at[:-1] or stats.tried_at[1] <= stats.accepted_at[0]
    assert 0.5 < stats.acceptance_by_place[0] < 1
    assert 0 < stats.acceptance_rate < 1
    assert answer(StepPlan(drafted=[Drafted(0, 3, (7, 7, 8))])).num_accepted == [2]


def test_right_is_right() -> None:
    assert right([1, 2], 3) == continuation([1, 2], 3) != wrong([1, 2], 3)
