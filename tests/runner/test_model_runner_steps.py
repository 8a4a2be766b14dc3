"""Steps of a runner: what they compute and sample, one after the other and over one another."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from nanoengine import SamplingParams
from nanoengine.engine.messages import UNKNOWN, Phase, SampledBatch, SamplingRow, ScheduledBatch
from nanoengine.errors import NotFiniteLogits
from tests.runner.batches import TABLES, chain, decode, execute, prefill
from tests.runner.conftest import MakeRunner
from tests.runner.fake_stream import FakeStream

# ---- one step


def test_a_whole_prompt_samples_one_token(make: MakeRunner) -> None:
    sampled = execute(make(), prefill(5))
    assert len(sampled.token_ids) == 1
    assert 0 <= sampled.token_ids[0] < 300
    assert sampled.logprobs is None


def test_a_chunk_that_samples_nothing_returns_an_empty_batch(make: MakeRunner) -> None:
    sampled = execute(make(), prefill(5, sampled=False))
    assert sampled.token_ids == []
    assert sampled.logprobs is None


def test_a_chunk_that_samples_nothing_still_writes_its_kv(make: MakeRunner) -> None:
    whole, chunked = make(), make()
    params = SamplingParams(temperature=0, logprobs=3)
    batch = prefill(20)
    batch.sampling[0].params = params
    expected = execute(whole, batch)
    execute(chunked, prefill(9, sampled=False))
    rest = prefill(11, computed=9)
    rest.token_ids = batch.token_ids[9:]
    rest.sampling[0].params = params
    sampled = execute(chunked, rest)
    assert sampled.token_ids == expected.token_ids
    assert sampled.logprobs[0] is not None
    assert expected.logprobs[0] is not None
    for token, entry in expected.logprobs[0].items():
        assert sampled.logprobs[0][token].logprob == pytest.approx(entry.logprob, abs=1e-4)


def test_the_position_of_the_sampled_token_addresses_its_randomness(make: MakeRunner) -> None:
    """The same text cut into chunks draws the same token: its position counts, not its row."""
    draws = []
    for first in (0, 4, 16, 19):
        runner = make()
        token_ids = list(range(30, 50))
        if first:
            begin = prefill(first, sampled=False)
            begin.token_ids = token_ids[:first]
            execute(runner, begin)
        rest = prefill(20 - first, computed=first)
        rest.token_ids = token_ids[first:]
        rest.sampled_rows = [0] * 10
        rest.sampled_into = list(range(10))
        rest.sampling = [SamplingRow(SamplingParams(temperature=5.0), seed, ()) for seed in range(10)]
        draws.append(execute(runner, rest).token_ids)
    assert draws[1:] == draws[:1] * 3
    assert len(set(draws[0])) > 5


# ---- one step after the other, or over one another


def test_tokens_pass_from_step_to_step_on_the_device(make: MakeRunner) -> None:
    seen, runner = [{row: 50 + row for row in TABLES}], make(max_num_seqs=6)
    for step in range(8):
        known = decode(*((row, step, seen[-1][row]) for row in TABLES), tables=TABLES, temperature=2.0)
        seen.append(dict(zip(TABLES, execute(runner, known).token_ids, strict=True)))
    assert len({tuple(tokens.values()) for tokens in seen}) > 7
    unknown = make(max_num_seqs=6)
    assert [execute(unknown, batch).token_ids for batch in chain(TABLES, 8, temperature=2.0)] == [
        [*seen[i + 1].values()] for i in range(8)
    ]


def test_a_launched_step_is_done_when_its_result_is_taken(make: MakeRunner) -> None:
    stream = FakeStream()
    right = make(max_num_seqs=6)
    expected = [execute(right, batch).token_ids for batch in chain(TABLES, 5)]
    late = make(max_num_seqs=6, stream=stream)
    steps = [late.launch(batch) for batch in chain(TABLES, 5)]
    assert stream.num_done == 0
    assert stream.num_overlapping == 4
    assert steps[1].result().token_ids == expected[1]
    assert stream.num_done == 2
    assert [step.result().token_ids for step in steps] == expected


def test_a_batch_may_change_when_it_was_launched(make: MakeRunner) -> None:
    """But for what is read with its results: how its tokens were sampled."""
    batch = chain(deepcopy(TABLES), 1)[0]
    expected = execute(make(max_num_seqs=6), batch).token_ids
    step = make(max_num_seqs=6, stream=FakeStream()).launch(batch)
    for column in (batch.rows, batch.token_ids, batch.num_computed_tokens, batch.num_new_tokens, batch.sampled_into):
        column[:] = [1] * len(column)
    for table in batch.block_tables:
        table[:] = [9] * len(table)
    assert step.result().token_ids == expected


def test_an_empty_batch_does_its_transfers_only(make: MakeRunner) -> None:
    assert execute(make(), ScheduledBatch(Phase.DECODE)) == SampledBatch([])


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
    sampled = execute(runner, prefill(5))
    assert sampled.token_ids == [UNKNOWN]
    assert isinstance(sampled.error, NotFiniteLogits)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_blocks": 1, "block_size": 2}, {"max_num_batched_tokens": 3, "max_num_seqs": 2}, {"max_model_len": 2}],
    ids=str,
)
def test_small_steps_that_compile_kernels_leave_nothing_behind(make: MakeRunner, options: dict[str, int]) -> None:
    fresh, compiled = make(**options), make(**options)
    compiled._compile_kernels()
    batch = decode((0, 0, 50), tables={0: [1]})
    assert execute(compiled, batch) == execute(fresh, batch)
