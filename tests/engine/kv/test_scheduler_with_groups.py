"""A scheduler over groups that forget: begun prompts make room for themselves, and where they cannot, the newest does."""

from __future__ import annotations

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.groups import WINDOW, KVSpec
from nanoengine.engine.messages import StepPlan, StepResult
from nanoengine.engine.scheduler import Scheduler
from nanoengine.engine.sequence import Sequence
from nanoengine.sampling_params import SamplingParams

B = 4
PROMPT = list(range(40))


def make(num_blocks: int, *specs: KVSpec) -> Scheduler:
    """Chunks of 8 tokens, two of them in a step."""
    manager = BlockManager(num_blocks, B, specs=specs, most_new_tokens=8)
    return Scheduler(
        manager, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=56, long_prefill_token_threshold=8
    )


def add(scheduler: Scheduler, seq_id: int, prompt: list[int], max_tokens: int = 6) -> Sequence:
    seq = Sequence(seq_id, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    scheduler.add(seq)
    return seq


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.check()
    scheduler.update(plan, StepResult([7] * plan.num_samples))
    scheduler.check()
    return plan


def test_a_prompt_much_longer_than_the_pool_runs_in_a_window() -> None:
    """A window of 8 and chunks of 8 see 15 tokens at once, in at most 5 blocks of 4."""
    scheduler = make(5, KVSpec(WINDOW, 8))
    seq = add(scheduler, 0, PROMPT)
    tables = []
    while scheduler.has_unfinished:
        tables += [entries for entries in step(scheduler).tables if 0 not in entries.block_ids]
    assert seq.output_token_ids == [7] * 6
    assert scheduler.num_preemptions == 0
    assert scheduler.block_manager.stats.groups[0].num_forgotten_blocks == 9, (
        "the last token, 44, sees those from 37 on"
    )
    assert sorted(
        index for entries in tables for index in range(entries.first, entries.first + len(entries.block_ids))
    ) == [*range(5, 12)]


def test_the_newest_gives_way_when_what_a_begun_prompt_has_forgotten_is_still_held_by_others() -> None:
    """The older one counts on its own window's blocks; the newer one shares two of them."""
    scheduler = make(7, KVSpec(WINDOW, 8))
    older = add(scheduler, 0, PROMPT)
    newer = add(scheduler, 1, PROMPT[:8] + [50] * 4)
    step(scheduler)
    assert newer.num_cached_tokens == 8, "what the same step computes"
    assert newer.block_tables[0][:2] == older.block_tables[0][:2]
    assert scheduler.block_manager.pool.num_free == 0
    step(scheduler)
    assert (older.num_computed_tokens, scheduler.num_preemptions) == (16, 0)
    plan = step(scheduler)
    assert scheduler.num_preemptions == newer.num_preemptions == 1
    assert newer in scheduler.waiting
    assert older.num_computed_tokens == 24
    assert {entries.row for entries in plan.tables} == {older.row}
    while scheduler.has_unfinished:
        step(scheduler)
    assert older.output_token_ids == newer.output_token_ids == [7] * 6
    assert scheduler.block_manager.pool.num_free == 7


def test_a_begun_prompt_that_is_the_newest_gives_way_itself_and_comes_back() -> None:
    """It has forgotten what the older one still sees, and finds nothing else."""
    scheduler = make(7, KVSpec(WINDOW, 8))
    older = add(scheduler, 0, PROMPT[:12], max_tokens=40)
    newer = add(scheduler, 1, PROMPT[:8] + list(range(100, 114)))
    step(scheduler)
    assert newer.num_computed_tokens == 16
    assert scheduler.begun == [older, newer]
    assert scheduler.block_manager.pool.num_free == 0
    plan = step(scheduler)
    assert newer in scheduler.waiting
    assert plan.tables == []
    assert older.num_output_tokens == 1
    while scheduler.has_unfinished:
        step(scheduler)
    assert older.num_preemptions == 0, "the oldest always moves"
    assert (older.num_output_tokens, newer.output_token_ids) == (40, [7] * 6)
    assert scheduler.block_manager.pool.num_free == 7


def test_a_prompt_gives_back_what_only_it_has_seen_before_it_is_decoded() -> None:
    """In its last chunk it needed five blocks of its window, then it needs three."""
    scheduler = make(40, KVSpec(), KVSpec(WINDOW, 8))
    seq = add(scheduler, 0, PROMPT)
    while not seq.num_output_tokens:
        step(scheduler)
    assert sum(map(bool, seq.block_tables[1])) == 5
    plan = step(scheduler)
    assert [(entries.group, entries.first, entries.block_ids) for entries in plan.tables] == [(1, 6, [0, 0])]
    assert sum(map(bool, seq.block_tables[1])) == 3


def test_a_plan_tells_of_nobody_whom_it_does_not_compute() -> None:
    """Twenty decodes leave room for one of two prompts: what changes of the other's tables is told with its own next chunk.

    If a plan fails, the executor takes all rows that it tells of for broken, and the scheduler ends those that it computes.
    """
    manager = BlockManager(400, 4, specs=(KVSpec(WINDOW, 8),), most_new_tokens=8)
    scheduler = Scheduler(
        manager,
        max_num_seqs=24,
        max_num_batched_tokens=24,
        max_model_len=80,
        long_prefill_token_threshold=8,
        policy="mixed",
    )
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    family = [Sequence(0, [1] * 18, params)]
    family += [Sequence(i, [1] * 18, params, index=i, fork_of=family[0]) for i in range(1, 20)]
    prompts = [Sequence(100 + i, [2 + i] * 60, params) for i in range(2)]
    for seq in (*family, *prompts):
        scheduler.add(seq)
    told: dict[int, list[list[int]]] = {}
    num_waits = 0
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        computed = {*plan.decodes.rows.tolist(), *(row for chunk in plan.chunks for row in (chunk.row, *chunk.samples))}
        assert {entries.row for entries in plan.tables} <= computed
        for start in plan.started:
            told[start.row] = [list(table) for table in start.tables]
        for row, group, first, block_ids in plan.tables:
            told[row][group][first : first + len(block_ids)] = block_ids
        owners = {seq.row: seq for seq in scheduler.running}
        assert all(told[row] == owners[row].block_tables for row in computed)
        num_waits += len(scheduler.begun) > 0 and not {seq.row for seq in scheduler.begun} <= computed
        scheduler.update(plan, StepResult([7] * plan.num_samples))
        scheduler.check()
    assert num_waits > 0
