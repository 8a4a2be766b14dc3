"""Shares of clients: nobody waits for all that another has sent, who alone has everything, and tokens are the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.engine.fair_share import FairShare
from nanoengine.engine.messages import StepPlan
from nanoengine.engine.scheduler import POLICIES, Scheduler
from nanoengine.engine.sequence import Sequence
from tests.engine.toys import (
    FAST,
    ToyModel,
    add_family,
    answer,
    assert_idle,
    continuation,
    drain,
    is_prefill,
    make_scheduler,
    make_sequence,
    members,
    runs_of,
    step,
)

# ---- the books


@FAST
@given(
    share=st.floats(0.01, 1.0),
    budget=st.integers(1, 40),
    wanted=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30)), max_size=12),
    present=st.sets(st.sampled_from("abc"), min_size=1),
)
def test_each_takes_its_share_at_most_and_a_token_at_least(
    share: float, budget: int, wanted: list[tuple[str, int]], present: set[str]
) -> None:
    shares = FairShare(share)
    for client in present:
        shares.add(client)
    for _ in range(2):  # what was taken of one step is forgotten in the next
        shares.begin_step(budget)
        taken: Counter[str] = Counter()
        for client, count in wanted:
            if client in present:
                count = min(count, shares.left(client, budget - taken.total()))
                assert count >= 0
                assert count > 0 or taken[client] or taken.total() == budget, "everybody gets something"
                shares.take(client, count)
                taken[client] += count
        if len(present) > 1:
            assert all(count <= max(1, share * budget) for count in taken.values())
        else:
            assert taken.total() == min(budget, sum(count for client, count in wanted if client in present))


def test_who_has_nothing_left_to_do_takes_nothing_from_the_others() -> None:
    shares = FairShare(0.5)
    for client in ("a", "a", "b"):
        shares.add(client)
    seen = []
    for ended in ("a", "b", "a"):
        shares.begin_step(10)
        seen.append(shares.left("a", 10))
        shares.remove(ended)
    assert seen == [5, 5, 10]
    assert not shares.num_unfinished


# ---- in the scheduler


def tokens_of_clients(scheduler: Scheduler, plan: StepPlan) -> Counter[str]:
    """How many tokens of prompts each client has in a plan that has just been made."""
    owners = {seq.row: seq.client for seq in scheduler.running}
    taken: Counter[str] = Counter()
    for chunk in plan.chunks:
        taken[owners[chunk.row]] += chunk.num_new
    return taken


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("as_one", [True, False], ids=["one prompt", "many prompts"])
def test_nobody_waits_for_all_that_another_has_sent(policy: str, as_one: bool) -> None:
    """One client has 30,000 tokens to be read, which take 60 steps and more; ten others come meanwhile."""
    scheduler = make_scheduler(
        num_blocks=2500, block_size=16, max_model_len=31_000, budget=500, max_num_seqs=400, policy=policy
    )
    lengths = [30_000] if as_one else [200] * 150
    greedy = [make_sequence(i, [i] * n, max_tokens=2, client="greedy") for i, n in enumerate(lengths)]
    for seq in greedy:
        scheduler.add(seq)
    others: dict[Sequence, int] = {}  # in which step each came
    num_steps = 0
    while not all(seq.num_output_tokens for seq in greedy):
        if num_steps and num_steps % 5 == 0 and len(others) < 10:
            seq = make_sequence(1000 + len(others), [700 + len(others)] * 30, max_tokens=20, client=f"{len(others)}")
            scheduler.add(seq)
            others[seq] = num_steps
        before = sum(seq.num_computed_tokens for seq in greedy)
        plan = scheduler.schedule()
        scheduler.update(plan, answer(plan))
        scheduler.check()
        num_steps += 1
        if policy == "mixed" or is_prefill(plan):
            assert sum(seq.num_computed_tokens for seq in greedy) > before, "it moves all the same"
        for seq, came in others.items():
            assert seq.num_output_tokens or num_steps - came < 2, "two steps are enough for anybody"
    assert len(others) == 10
    assert num_steps < 30_000 // 250 + 60, "and it is not kept waiting either"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_ends_its_client_s_share_of_a_step_and_those_behind_it_are_passed_over(policy: str) -> None:
    scheduler = make_scheduler(budget=20, policy=policy)
    seqs = [
        make_sequence(i, [10 * i] * length, client=client, max_tokens=3)
        for i, (length, client) in enumerate([(7, "a"), (8, "a"), (4, "a"), (6, "b"), (9, "b"), (2, "c")])
    ]
    for seq in seqs:
        scheduler.add(seq)
    plan = scheduler.schedule()
    assert runs_of(plan) == [(0, 0, 7), (1, 0, 3), (2, 0, 6), (3, 0, 4)]
    assert members(scheduler, plan) == [0, 1, 3, 4]
    scheduler.update(plan, answer(plan))
    scheduler.check()
    plan = scheduler.schedule()
    chunks = [seq for seq in members(scheduler, plan) if seq in (1, 4, 2, 5)]
    assert chunks == [1, 4, 2, 5], "those that were begun first, and then in the order in which they came"


def test_nobody_is_overtaken_for_want_of_blocks() -> None:
    """Who is passed over has had something of the step; who finds no room has not."""
    scheduler = make_scheduler(num_blocks=10, max_model_len=40, max_num_seqs=4)
    holder, large, small = (
        make_sequence(i, [10 * i] * length, client=client, max_tokens=3)
        for i, (length, client) in enumerate([(20, "a"), (30, "b"), (2, "c")])
    )
    for seq in (holder, large, small):
        scheduler.add(seq)
    step(scheduler)
    assert scheduler.running == [holder]
    assert list(scheduler.waiting) == [large, small]


@pytest.mark.parametrize("policy", POLICIES)
def test_completions_fork_though_others_that_were_passed_over_stand_before_them(policy: str) -> None:
    scheduler, model = make_scheduler(budget=20, caching=False, policy=policy), ToyModel()
    first = [make_sequence(i, [i] * 10, client="a", max_tokens=4) for i in range(3)]
    for seq in first:
        scheduler.add(seq)
    prompt = list(range(9))
    family = add_family(scheduler, prompt, 3, first_id=10, client="b", max_tokens=4)
    drain(scheduler, model)
    assert scheduler.num_forks == 2
    assert model.num_computed == 9 + 3 * 3 + 3 * (10 + 3)
    assert all(seq.output_token_ids == continuation(prompt, 4) for seq in family)
    assert all(seq.output_token_ids == continuation([i] * 10, 4) for i, seq in enumerate(first))


@FAST
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    clients=st.lists(st.sampled_from("aab"), min_size=8, max_size=8),
    options=st.fixed_dictionaries(
        {
            "budget": st.integers(1, 40),
            "max_num_seqs": st.integers(1, 8),
            "num_blocks": st.integers(12, 40),
            "caching": st.booleans(),
            "policy": st.sampled_from(POLICIES),
            "max_chunk": st.sampled_from([None, 1, 7]),
            "max_client_share": st.sampled_from([0.001, 0.3, 0.5, 1.0]),
        }
    ),
)
def test_a_client_takes_no_more_than_its_share_of_any_step_and_all_come_to_their_end(
    lengths: list[int], clients: list[str], options: dict[str, Any]
) -> None:
    scheduler, model = make_scheduler(max_model_len=48, **options), ToyModel()
    seqs = [
        make_sequence(i, [i % 3] * length, client=client, max_tokens=4)
        for i, (length, client) in enumerate(zip(lengths, clients, strict=False))
    ]
    for seq in seqs:
        scheduler.add(seq)
    for _ in range(2000):
        if not scheduler.has_unfinished:
            break
        present = {seq.client for seq in seqs if not seq.finished}
        plan = scheduler.schedule()
        scheduler.check()
        assert plan
        taken = tokens_of_clients(scheduler, plan)
        if len(present) > 1:
            budget = options["budget"] - plan.num_decode_tokens
            assert all(count <= max(1, options["max_client_share"] * budget) for count in taken.values())
        scheduler.update(plan, model.execute(plan))
        scheduler.check()
    assert [seq.output_token_ids for seq in seqs] == [continuation(seq.token_ids[:-4], 4) for seq in seqs]
    assert_idle(scheduler)


def test_with_one_client_nothing_changes() -> None:
    plans = []
    for share, client in ((0.1, "a"), (1.0, "")):
        scheduler = make_scheduler(budget=16, max_client_share=share, num_blocks=20, policy="mixed")
        for i, length in enumerate((30, 5, 9, 40, 2)):
            scheduler.add(make_sequence(i, [i] * length, client=client, max_tokens=12))
        plans.append([runs_of(plan) for plan in drain(scheduler, ToyModel())])
    assert plans[0] == plans[1]
