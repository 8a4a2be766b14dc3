"""What becomes of the blocks of a victim, mode by mode: the tokens are the same, only the work to resume differs."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.disk_tier import DiskTier
from nanoengine.engine.kv.host_tier import HostTier
from nanoengine.engine.messages import StepPlan, Tier
from nanoengine.engine.preemption import Preemption
from nanoengine.engine.scheduler import Scheduler
from nanoengine.engine.sequence import Sequence
from nanoengine.errors import InvalidPrompt
from tests.engine.engine_toys import make_engine
from tests.engine.toys import (
    ToyModel,
    assert_idle,
    continuation,
    drain,
    is_decode,
    is_prefill,
    make_scheduler,
    make_sequence,
    members,
    run_step,
    runs_of,
)

B = 4
BYTES = 8


def make(
    mode: str, host: int, disk: Path | None = None, *, num_blocks: int = 6, caching: bool = True, rate: float = 100.0
) -> Scheduler:
    manager = BlockManager(
        num_blocks,
        B,
        caching,
        host=HostTier(host) if host else None,
        disk=None if disk is None else DiskTier(disk, "model", BYTES, 1 << 20),
    )
    return Scheduler(
        manager,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=24,
        preemption=Preemption(mode, copy_bytes_per_second=100.0, block_bytes=4, prefill_rate=lambda: rate),
    )


MODES = [("recompute", 0), ("recompute", 8), ("swap", 0), ("swap", 1), ("swap", 3), ("swap", 100), ("auto", 8)]


def run_rivals(scheduler: Scheduler, model: ToyModel | None = None) -> tuple[ToyModel, list[Sequence]]:
    """Four sequences that do not fit together; each gets its right tokens."""
    model = model or ToyModel()
    seqs = [make_sequence(i, [i] * 9, max_tokens=12) for i in range(4)]
    for seq in seqs:
        scheduler.add(seq)
    drain(scheduler, model)
    assert [seq.output_token_ids for seq in seqs] == [continuation([i] * 9, 12) for i in range(4)]
    finish_copies(scheduler, model)
    assert_idle(scheduler)
    return model, seqs


def finish_copies(scheduler: Scheduler, model: ToyModel) -> None:
    """The last sequences that gave way for nobody may have left copies to make."""
    while plan := scheduler.schedule():
        scheduler.update(plan, model.execute(plan))


def moves(model: ToyModel, source: Tier, target: Tier) -> int:
    return sum(
        (move.source.tier, move.target.tier) == (source, target) for plan in model.plans for move in plan.transfers
    )


# ---- the same tokens


@pytest.mark.parametrize(
    ("mode", "host", "with_disk"), [(*mode, disk) for mode in MODES for disk in (False, True) if mode[1] or not disk]
)
@pytest.mark.parametrize("caching", [False, True])
def test_tokens_are_those_of_a_large_pool(mode: str, host: int, with_disk: bool, caching: bool, tmp_path: Path) -> None:
    scheduler = make(mode, host, tmp_path if with_disk else None, num_blocks=8, caching=caching)
    run_rivals(scheduler)
    assert scheduler.num_preemptions > 0
    choice = scheduler.preemption
    assert choice.num_swaps + choice.num_recomputes == scheduler.num_preemptions


@pytest.mark.parametrize("host", [1, 3, 8, 100])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_counts_of_saves_and_loads_are_those_of_the_transfers(mode: str, host: int) -> None:
    scheduler = make(mode, host)
    model, _ = run_rivals(scheduler)
    stats = scheduler.block_manager.stats
    assert stats.num_saved_blocks == moves(model, Tier.DEVICE, Tier.HOST) > 0
    assert stats.num_loaded_blocks == moves(model, Tier.HOST, Tier.DEVICE)
    assert stats.hits_by_tier[Tier.HOST] == stats.num_loaded_blocks * B
    assert sum(stats.hits_by_tier.values()) == stats.num_hit_tokens + stats.num_resumed_hit_tokens


def test_swap_computes_no_full_block_twice() -> None:
    scheduler = make("swap", 100)
    model, seqs = run_rivals(scheduler)
    needed = sum(seq.num_tokens - 1 for seq in seqs)
    assert scheduler.num_preemptions > 0
    assert model.num_computed <= needed + scheduler.num_preemptions * B, "at most the half-full block of each victim"
    assert scheduler.block_manager.stats.num_loaded_blocks > 0


def test_recompute_without_tiers_moves_nothing_and_computes_more_than_swap() -> None:
    recompute, swap = make("recompute", 0), make("swap", 100)
    dropped, _ = run_rivals(recompute)
    kept, _ = run_rivals(swap)
    assert all(plan.transfers == [] for plan in dropped.plans)
    assert dropped.num_computed > kept.num_computed


def test_swap_saves_all_full_blocks_of_a_victim_in_the_plan_that_preempts_it() -> None:
    scheduler, model = make("swap", 100), ToyModel()
    for i in range(3):
        scheduler.add(make_sequence(i, [i] * 7, max_tokens=12))
    while not scheduler.num_preemptions:
        computed = {seq.seq_id: seq.num_computed_tokens for seq in scheduler.running}
        plan = run_step(scheduler, model)
    victims = [seq for seq in scheduler.waiting if seq.num_preemptions]
    saved = [move for move in plan.transfers if move.target.tier is Tier.HOST]
    assert len(saved) == sum(computed[seq.seq_id] // B for seq in victims) > 0


def test_swap_with_a_disk_finds_in_files_what_host_memory_had_no_room_for(tmp_path: Path) -> None:
    scheduler = make("swap", 4, tmp_path)
    model, _ = run_rivals(scheduler)
    for i in range(4):
        scheduler.add(make_sequence(i, [10 + i] * 20, max_tokens=1))
    drain(scheduler, model)
    run_rivals(scheduler, model)
    stats = scheduler.block_manager.stats
    assert stats.num_written_files == sum(len(plan.writes) for plan in model.plans) > 0
    assert stats.num_read_files == sum(len(plan.reads) for plan in model.plans) > 0
    assert stats.hits_by_tier[Tier.DISK] > 0


@pytest.mark.parametrize(("rate", "swaps"), [(1.0, True), (1e9, False)])
def test_auto_swaps_where_computing_is_slow(rate: float, swaps: bool) -> None:
    scheduler = make("auto", 100, rate=rate)
    run_rivals(scheduler)
    choice = scheduler.preemption
    assert (choice.num_swaps > 0) == swaps
    assert (choice.num_recomputes > 0) == (not swaps)


@pytest.mark.parametrize(("mode", "host"), MODES)
def test_a_step_that_fails_while_it_swaps_serves_nobody_its_garbage(mode: str, host: int) -> None:
    scheduler, model = make(mode, host), ToyModel()
    seqs = [make_sequence(i, [i] * 7, max_tokens=12) for i in range(4)]
    for seq in seqs:
        scheduler.add(seq)
    for _ in range(200):
        if not scheduler.has_unfinished:
            break
        count = scheduler.num_preemptions
        plan = scheduler.schedule()
        model.fail_if = (lambda _: True) if scheduler.num_preemptions > count == 0 else (lambda _: False)
        try:
            result = model.execute(plan)
        except RuntimeError:
            assert scheduler.fail()
        else:
            scheduler.update(plan, result)
        scheduler.check()
    assert_idle(scheduler)
    assert {seq.finish_reason for seq in seqs} == {"error", "length"}
    for i, seq in enumerate(seqs):
        assert seq.output_token_ids == continuation([i] * 7, 12)[: seq.num_output_tokens]


# ---- the storm


@pytest.mark.parametrize(
    ("mode", "host", "with_disk"),
    [
        ("recompute", 0, False),
        *itertools.product(["recompute"], [8], [False, True]),
        *itertools.product(["swap"], [4, 64], [False, True]),
        *itertools.product(["auto"], [8], [False, True]),
    ],
)
def test_a_storm_of_a_thousand_requests_ends_and_the_oldest_always_moves(
    mode: str, host: int, with_disk: bool, tmp_path: Path
) -> None:
    scheduler = make(mode, host, tmp_path if with_disk else None)
    model, draw = ToyModel(), random.Random(0)
    wanted: list[tuple[Sequence, list[int]]] = []
    for seq_id in range(1000):
        prompt = [draw.randint(0, 3)] * draw.randint(1, 12)
        seq = make_sequence(seq_id, prompt, max_tokens=draw.randint(1, 10))
        wanted.append((seq, prompt))
        scheduler.add(seq)
    for _ in range(20_000):
        if not scheduler.has_unfinished:
            break
        running, preemptions = len(scheduler.running), scheduler.num_preemptions
        plan = scheduler.schedule()
        if is_decode(plan):
            assert scheduler.num_preemptions - preemptions < running, "somebody is left"
            oldest = scheduler.running[0]
            assert oldest.seq_id in members(scheduler, plan)
            length = oldest.num_known_tokens
            scheduler.update(plan, model.execute(plan))
            assert oldest.num_known_tokens == length + 1
        else:
            assert scheduler.num_preemptions == preemptions
            scheduler.update(plan, model.execute(plan))
    scheduler.check()
    assert_idle(scheduler)
    assert 0 < scheduler.num_preemptions < 1000, "fewer than one for each request"
    expected: dict[tuple[int, ...], list[int]] = {}
    for seq, prompt in wanted:
        key = tuple(prompt)
        if key not in expected:
            expected[key] = continuation(prompt, 10)
        assert seq.output_token_ids == expected[key][: seq.params.max_tokens]


# ---- the choice


def test_recompute_never_swaps_and_swap_always_does() -> None:
    never, always = Preemption("recompute"), Preemption("swap")
    assert [never.prefers_swap(count, count) for count in (0, 1, 10_000)] == [False] * 3
    assert [always.prefers_swap(count, count) for count in (0, 1, 10_000)] == [True] * 3
    assert (never.num_swaps, never.num_recomputes) == (0, 3)
    assert (always.num_swaps, always.num_recomputes) == (3, 0)


@pytest.mark.parametrize(
    ("copy_rate", "prefill_rate", "swaps"),
    [(1000.0, 10.0, True), (1000.0, 49.0, True), (1000.0, 50.0, False), (1000.0, 100.0, False), (1000.0, 0.0, False)],
)
def test_auto_compares_the_way_there_and_back_with_computing_again(
    copy_rate: float, prefill_rate: float, swaps: bool
) -> None:
    """A block of 40 bytes for four tokens: there and back takes a fiftieth of a second for each token."""
    choice = Preemption("auto", copy_rate, 40, lambda: prefill_rate)
    assert choice.prefers_swap(100, 25) is swaps
    assert (choice.num_swaps, choice.num_recomputes) == (int(swaps), int(not swaps))


def test_auto_looks_at_the_rate_anew_each_time() -> None:
    rates = iter([10.0, 1000.0, 10.0])
    choice = Preemption("auto", 1000.0, 40, lambda: next(rates))
    assert [choice.prefers_swap(8, 2) for _ in range(3)] == [True, False, True]


# ---- what other engines got wrong


@pytest.mark.parametrize(("mode", "host"), MODES)
def test_a_preempted_sequence_that_hits_its_own_blocks_is_scheduled_for_exactly_what_is_not_cached(
    mode: str, host: int
) -> None:
    scheduler, model = make(mode, host), ToyModel()
    seqs = {i: make_sequence(i, [i] * 7, max_tokens=12) for i in range(3)}
    for seq in seqs.values():
        scheduler.add(seq)
    num_hits = 0
    while scheduler.has_unfinished:
        lengths = {i: seq.num_tokens for i, seq in seqs.items()}
        plan = scheduler.schedule()
        if is_prefill(plan):
            for seq_id, (_, cached, count) in zip(members(scheduler, plan), runs_of(plan), strict=True):
                assert count == lengths[seq_id] - cached
                num_hits += seqs[seq_id].num_preemptions > 0 and cached > 0
        scheduler.update(plan, model.execute(plan))
        scheduler.check()
    assert num_hits > 0
    assert all(seq.output_token_ids == continuation([i] * 7, 12) for i, seq in seqs.items())


@pytest.mark.parametrize("num_full", [1, 2, 3])
@pytest.mark.parametrize("evict", [False, True])
def test_a_prompt_of_full_blocks_that_is_cached_whole_still_computes_its_last_block_wherever_the_others_are(
    num_full: int, evict: bool
) -> None:
    scheduler, model = make("swap", 20), ToyModel()
    prompt = [5] * (num_full * B)
    plans: list[StepPlan] = []
    for seq_id in range(2):
        seq = make_sequence(seq_id, prompt, max_tokens=6)
        scheduler.add(seq)
        plans = drain(scheduler, model)
        assert seq.output_token_ids == continuation(prompt, 6)
        if evict:
            other = make_sequence(50 + seq_id, [8 + seq_id] * 23, max_tokens=1)
            scheduler.add(other)
            drain(scheduler, model)
    [chunk] = plans[0].chunks
    assert (chunk.num_computed, chunk.num_new) == (len(prompt) - B, B)


def test_two_requests_in_one_step_on_a_full_pool_and_the_failed_admission_keeps_all_reference_counts() -> None:
    scheduler, model = make_scheduler(num_blocks=6, max_model_len=24), ToyModel()
    first = make_sequence(0, [1] * 9, max_tokens=2)
    scheduler.add(first)
    drain(scheduler, model)
    # Both want the two cached blocks; the first takes them and all the others.
    rivals = [
        make_sequence(1, [*[1] * 8, *[2] * 12], max_tokens=2),
        make_sequence(2, [*[1] * 8, *[3] * 8], max_tokens=2),
    ]
    for seq in rivals:
        scheduler.add(seq)
    plan = run_step(scheduler, model)
    pool = scheduler.block_manager.pool
    assert members(scheduler, plan) == [1]
    assert pool.ref_counts == [0, *[1] * 6]
    assert list(scheduler.waiting) == [rivals[1]]
    drain(scheduler, model)
    assert rivals[1].output_token_ids == continuation([*[1] * 8, *[3] * 8], 2)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_abort_between_chunks_and_the_same_prompt_again_never_serves_unwritten_blocks(mode: str) -> None:
    for num_steps in range(1, 5):
        scheduler, model = make(mode, 8), ToyModel()
        scheduler.max_num_batched_tokens = 6
        prompt = list(range(20))
        scheduler.add(make_sequence(0, prompt, max_tokens=3))
        for _ in range(num_steps):
            run_step(scheduler, model)
        scheduler.finish(scheduler.running[0], "abort")
        again = make_sequence(1, prompt, max_tokens=3)
        scheduler.add(again)
        drain(scheduler, model)
        assert again.num_cached_tokens == min(6 * num_steps, 19) // B * B
        assert again.output_token_ids == continuation(prompt, 3)


@pytest.mark.parametrize("length", [16, 17, 500])
def test_a_request_larger_than_the_pool_never_hangs_it_is_refused(length: int) -> None:
    engine = make_engine(ToyModel(), num_blocks=4, max_model_len=16)
    with pytest.raises(InvalidPrompt, match="max_model_len is 16"):
        engine.add_request([1] * length)
    assert not engine.has_unfinished


@pytest.mark.parametrize(("mode", "host"), MODES)
def test_a_request_that_wants_more_than_the_pool_never_hangs_it_ends_at_the_models_length(mode: str, host: int) -> None:
    scheduler, model = make(mode, host), ToyModel()
    seqs = [make_sequence(i, [i] * length, max_tokens=1000) for i, length in enumerate((23, 1, 22, 23))]
    for seq in seqs:
        scheduler.add(seq)
    drain(scheduler, model, limit=200)
    assert [(seq.num_tokens, seq.finish_reason) for seq in seqs] == [(24, "length")] * 4
    assert_idle(scheduler)
