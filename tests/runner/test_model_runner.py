"""Steps of a runner: what they compute and sample, one after the other and over one another."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import fields

import pytest
import torch

from nanoengine.engine.messages import UNKNOWN, Chunk, Drafted, Entries, Place, StepPlan, StepResult, Tier, Transfer
from nanoengine.errors import EngineClosed, NotFiniteLogits
from nanoengine.runner.model_runner import drop_runs
from tests.runner.conftest import MakeRunner
from tests.runner.fake_stream import FakeStream
from tests.runner.plans import TABLES, chain, decodes, execute, prefill, start

# ---- one step


def test_a_whole_prompt_samples_one_token(make: MakeRunner) -> None:
    result = execute(make(), prefill(5))
    assert len(result.token_ids) == 1
    assert 0 <= result.token_ids[0] < 300
    assert result == StepResult(result.token_ids)


def test_a_chunk_that_samples_nothing_has_an_empty_result(make: MakeRunner) -> None:
    assert execute(make(), prefill(5, sampled=False)) == StepResult([])


def test_a_chunk_that_samples_nothing_still_writes_its_kv(make: MakeRunner) -> None:
    plan = StepPlan(started=[start(0, range(10, 30), [1, 2], logprobs=3)], chunks=[Chunk(0, 0, 20, (0,))])
    expected = execute(make(), plan)
    chunked = make()
    execute(chunked, StepPlan(started=plan.started, chunks=[Chunk(0, 0, 9, ())]))
    result = execute(chunked, StepPlan(chunks=[Chunk(0, 9, 11, (0,))]))
    assert result.token_ids == expected.token_ids
    assert result.logprobs[0].keys() == expected.logprobs[0].keys()
    for token, entry in expected.logprobs[0].items():
        assert result.logprobs[0][token].logprob == pytest.approx(entry.logprob, abs=1e-4)


def test_the_position_of_the_sampled_token_addresses_its_randomness(make: MakeRunner) -> None:
    """The same text cut into chunks draws the same token: its position counts, not its row."""
    draws = []
    for first in (0, 4, 16, 19):
        runner = make()
        started = [start(row, range(30, 50), [1, 2], temperature=5.0) for row in range(10)]
        if first:
            execute(runner, StepPlan(started=started[:1], chunks=[Chunk(0, 0, first, ())]))
        rest = Chunk(0, first, 20 - first, tuple(range(10)))
        draws.append(execute(runner, StepPlan(started=started[bool(first) :], chunks=[rest])).token_ids)
    assert draws[1:] == draws[:1] * 3
    assert len(set(draws[0])) > 5


def test_a_fork_decodes_what_it_sampled_itself(make: MakeRunner) -> None:
    """Prompt and blocks are its parent's; the block that both would write is copied first."""
    prompt, rows = range(30, 50), (0, 3, 1)
    right = {}
    for row in rows:
        alone = make()
        begun = start(row, prompt, [1, 2], temperature=3.0)
        tokens = execute(alone, StepPlan(started=[begun], chunks=[Chunk(row, 0, 20, (row,))])).token_ids
        for step in range(6):
            tokens += execute(alone, StepPlan(decodes=decodes((row, 20 + step)))).token_ids
        right[row] = tokens
    assert len({*map(tuple, right.values())}) == 3
    runner = make()
    started = [start(row, prompt, [1, 2], temperature=3.0) for row in rows]
    firsts = execute(runner, StepPlan(started=started, chunks=[Chunk(0, 0, 20, rows)])).token_ids
    found = {row: [token] for row, token in zip(rows, firsts, strict=True)}
    for step in range(6):
        plan = StepPlan(decodes=decodes(*((row, 20 + step) for row in rows)))
        if not step:
            for row, block in ((3, 7), (1, 8)):
                plan.tables.append(Entries(row, 0, 1, [block]))
                plan.transfers.append(Transfer(Place(Tier.DEVICE, 2), Place(Tier.DEVICE, block)))
        for row, token in zip(rows, execute(runner, plan).token_ids, strict=True):
            found[row].append(token)
    assert found == right


# ---- one step after the other, or over one another


def test_tokens_pass_from_step_to_step_on_the_device(make: MakeRunner) -> None:
    """Rows that go on compute what rows do that are told all their tokens before every step."""
    texts, told = {row: [50 + row] for row in TABLES}, make(max_num_seqs=6)
    for step in range(8):
        started = [start(row, tokens, TABLES[row], prompt=1, temperature=2.0) for row, tokens in texts.items()]
        plan = StepPlan(started=started, decodes=decodes(*((row, step) for row in texts)))
        for row, token in zip(texts, execute(told, plan).token_ids, strict=True):
            texts[row].append(token)
    assert len({*zip(*texts.values(), strict=True)}) > 7
    runner = make(max_num_seqs=6)
    assert [execute(runner, plan).token_ids for plan in chain(TABLES, 8, temperature=2.0)] == [
        [tokens[step + 1] for tokens in texts.values()] for step in range(8)
    ]


def test_a_launched_step_is_done_when_its_result_is_taken(make: MakeRunner) -> None:
    stream = FakeStream()
    right = make(max_num_seqs=6)
    expected = [execute(right, plan).token_ids for plan in chain(TABLES, 5)]
    late = make(max_num_seqs=6, stream=stream)
    steps = [late.launch(plan) for plan in chain(TABLES, 5)]
    assert stream.num_done == 0
    assert stream.num_overlapping == 4
    assert steps[1].result().token_ids == expected[1]
    assert stream.num_done == 2
    assert [step.result().token_ids for step in steps] == expected


def test_a_plan_is_left_as_it_was(make: MakeRunner) -> None:
    """Whoever made it may keep it, and parts of it may be in others too."""
    for plan in (prefill(20), *chain(deepcopy(TABLES), 2, logprobs=2, frequency_penalty=1.0)):
        before = pickle.dumps(plan)
        runner = make(max_num_seqs=6)
        runner._broken.add(5)  # a row whose runs are dropped
        execute(runner, StepPlan(started=chain(TABLES, 1)[0].started))
        execute(runner, plan)
        assert pickle.dumps(plan) == before


def test_the_bytes_of_a_plan_are_as_good_as_the_plan(make: MakeRunner) -> None:
    """An executor may live in another process."""
    plans = [prefill(20), *chain(TABLES, 4, temperature=1.5, logprobs=3)]
    here, there = make(max_num_seqs=6), make(max_num_seqs=6)
    for plan in plans:
        assert pickle.loads(pickle.dumps(execute(there, pickle.loads(pickle.dumps(plan))))) == execute(here, plan)


def test_an_empty_plan_does_nothing(make: MakeRunner) -> None:
    assert execute(make(), StepPlan()) == StepResult([])


def test_a_plan_without_runs_makes_its_changes_and_does_its_transfers(make: MakeRunner) -> None:
    runner = make(max_num_seqs=6)
    expected = [execute(runner, plan).token_ids for plan in chain(TABLES, 4)][-1]
    moved = {row: [block + 10 for block in table] for row, table in TABLES.items()}
    blocks = [block for table in TABLES.values() for block in table]
    transfers = [Transfer(Place(Tier.DEVICE, block), Place(Tier.DEVICE, block + 10)) for block in blocks]
    other = make(max_num_seqs=6)
    last = [execute(other, plan).token_ids for plan in chain(TABLES, 3)][-1]
    started = [start(row, [0, 0, 0, token], moved[row]) for row, token in zip(moved, last, strict=True)]
    assert execute(other, StepPlan(started=started, transfers=transfers)) == StepResult([])
    assert other.kv_cache is not None
    for layer in other.kv_cache.layers:
        for tensor in layer:
            tensor[blocks] = torch.nan
    assert execute(other, StepPlan(decodes=decodes(*((row, 3) for row in moved)))).token_ids == expected


def test_a_step_that_breaks_says_so_in_its_result_and_the_next_one_works(
    make: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the step broke")

    runner = make(stream=FakeStream())
    expected = execute(make(), prefill(5)).token_ids
    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "forward", broken)
        step = runner.launch(prefill(5))
        with pytest.raises(RuntimeError, match="the step broke"):
            step.result()
    assert execute(runner, prefill(5)).token_ids == expected


def test_logits_that_are_not_finite_come_back_as_an_error(make: MakeRunner) -> None:
    runner = make()
    runner.model.norm.weight.fill_(torch.nan)
    result = execute(runner, prefill(5))
    assert result.token_ids == [UNKNOWN]
    assert isinstance(result.error, NotFiniteLogits)


def test_a_closed_runner_says_so_and_holds_no_memory(make: MakeRunner) -> None:
    runner = make()
    runner.close()
    assert runner.kv_cache is None
    for part in ("model", "mover", "rows", "sampler"):
        assert not hasattr(runner, part)
    with pytest.raises(EngineClosed):
        runner.launch(prefill(5))
    runner.close()


def test_a_plan_may_be_as_large_as_the_options_allow(make: MakeRunner) -> None:
    """Its numbers have one place, which is as large as the largest plan."""
    runner = make(max_num_seqs=4, max_num_batched_tokens=30, block_size=4)
    assert runner.kv_cache is not None
    runner.kv_cache.fill(torch.nan)
    tables = [[1 + 8 * row + i for i in range(7)] for row in range(4)]
    started = [start(row, range(1, 28), tables[row]) for row in range(2)]
    execute(runner, StepPlan(started=started[:1], chunks=[Chunk(0, 0, 26, ())]))
    forks = [start(row, range(1, 28), tables[1]) for row in (2, 3)]
    chunks = [Chunk(1, 0, 27, (1, 2, 3))]
    most = StepPlan(started=[started[1], *forks], decodes=decodes((0, 26)), chunks=chunks)
    tokens = execute(runner, most).token_ids
    assert len(tokens) == 4
    assert len(set(tokens)) == 1, "all of one text"


def test_so_may_one_in_which_every_token_samples(make: MakeRunner) -> None:
    runner = make(max_num_seqs=2, max_num_batched_tokens=30)
    started = [start(row, range(1, 9), [1 + row]) for row in range(2)]
    before = StepPlan(started=started, chunks=[Chunk(row, 0, 8, (row,)) for row in range(2)])
    [[first, _], runs] = execute(runner, before).token_ids, [Drafted(row, 8, (0,) * 7) for row in range(2)]
    most = execute(runner, StepPlan(drafted=[run._replace(drafts=(0,) * 14) for run in runs]))
    assert len(most.token_ids) == 30
    for row, run in enumerate(runs):
        alone = execute(runner, StepPlan(started=[start(row, [*range(1, 9), first], [1 + row])], drafted=[run]))
        assert most.token_ids[15 * row :][: alone.num_accepted[0] + 1] == alone.token_ids[: alone.num_accepted[0] + 1]


# ---- dropping runs


def runs_left(plan: StepPlan, *rows: int) -> tuple[list[tuple[int, int]], list[Chunk], list[int]]:
    """Of a plan without the runs of some rows: its decodes, its chunks, and which samples are left."""
    less, kept = drop_runs(plan, rows)
    for name in {field.name for field in fields(plan)} - {"decodes", "drafted", "chunks"}:
        assert getattr(less, name) is getattr(plan, name), "all else stays"
    assert less.decodes.rows.dtype == less.decodes.num_computed.dtype == plan.decodes.rows.dtype
    assert less.num_samples == len(kept)
    pairs = zip(less.decodes.rows.tolist(), less.decodes.num_computed.tolist(), strict=True)
    return list(pairs), less.chunks, kept


CHUNKS = [Chunk(4, 0, 5, ()), Chunk(1, 2, 3, (1, 6, 7)), Chunk(5, 9, 1, (5,))]
BUSY = StepPlan(started=[start(6, [1], [2])], decodes=decodes((3, 8), (0, 2), (2, 5)), chunks=CHUNKS, ended=[9])


@pytest.mark.parametrize(
    ("rows", "runs", "chunks", "kept"),
    [
        ([], [(3, 8), (0, 2), (2, 5)], CHUNKS, [0, 1, 2, 3, 4, 5, 6]),
        ([8, 9], [(3, 8), (0, 2), (2, 5)], CHUNKS, [0, 1, 2, 3, 4, 5, 6]),
        ([0], [(3, 8), (2, 5)], CHUNKS, [0, 2, 3, 4, 5, 6]),
        ([1], [(3, 8), (0, 2), (2, 5)], [CHUNKS[0], CHUNKS[2]], [0, 1, 2, 6]),
        ([4], [(3, 8), (0, 2), (2, 5)], CHUNKS[1:], [0, 1, 2, 3, 4, 5, 6]),
        ([3, 5, 1], [(0, 2), (2, 5)], CHUNKS[:1], [1, 2]),
        ([0, 2, 3], [], CHUNKS, [3, 4, 5, 6]),
        ([0, 1, 2, 3, 4, 5], [], [], []),
    ],
)
def test_runs_are_dropped_with_their_samples(
    rows: Sequence[int], runs: list[tuple[int, int]], chunks: list[Chunk], kept: list[int]
) -> None:
    assert runs_left(BUSY, *rows) == (runs, chunks, kept)


def test_of_a_plan_without_runs_nothing_is_dropped() -> None:
    assert runs_left(StepPlan(ended=[0]), 0, 1) == ([], [], [])
