"""Recorded decode steps: whatever their rows ask for, they are replayed up to the logits, and sampled as others are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.engine.messages import UNKNOWN, Chunk, StepPlan, StepResult
from nanoengine.errors import NoTokenLeft
from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.runner.graphs import bucket_sizes
from nanoengine.runner.model_runner import ModelRunner
from tests.runner.conftest import MakeRunner, MakeStartup
from tests.runner.fake_stream import FakeStream
from tests.runner.plans import TABLES, assert_same, chain, decodes, execute, prefill, start


def replays(runner: ModelRunner) -> dict[int, int]:
    """{bucket: how often its recording was replayed}, without those that were not."""
    assert runner.graphs is not None
    assert isinstance(runner.stream, FakeStream)
    recordings = zip(runner.graphs.decodes.buckets[::-1], runner.stream.recordings, strict=True)
    return {size: recording.num_replays for size, recording in recordings if recording.num_replays}


def test_every_size_of_a_decode_step_is_recorded(begin: MakeStartup, recordable: dict[str, Any]) -> None:
    startup = begin(**recordable)
    assert startup.uses_graphs
    runner = startup.build()
    assert "4 CUDA graphs" in startup.describe(runner)
    assert runner.graphs is not None
    assert runner.graphs.decodes.buckets == bucket_sizes(6) == [1, 2, 4, 6]
    assert runner.kv_cache is not None
    assert not any(tensor.any() for layer in runner.kv_cache.layers for tensor in layer), "padding writes nothing"
    assert not runner.rows.last_tokens[:-1].any(), "and into no sequence's row"
    runner.close()


@pytest.mark.parametrize("params", [{}, {"temperature": 1.5}, {"temperature": 0.9, "top_k": 9, "top_p": 0.8}], ids=str)
def test_recorded_steps_sample_the_same_tokens(
    make: MakeRunner, recordable: dict[str, Any], params: dict[str, Any]
) -> None:
    right, runner = make(max_num_seqs=6, kernels="torch", enforce_eager=True), make(**recordable)
    chains = [chain({row: TABLES[row] for row in rows}, 6, **params) for rows in ([0], [0, 2], [2, 0, 5])]
    expected = [[execute(right, plan).token_ids for plan in some] for some in chains]
    assert len({tuple(tokens) for some in expected for tokens in some}) > 5
    assert [[execute(runner, plan).token_ids for plan in some] for some in chains] == expected
    assert replays(runner) == {1: 6, 2: 6, 4: 6}


def test_recorded_steps_may_overlap(make: MakeRunner, recordable: dict[str, Any]) -> None:
    """They write their logits to one place: each step must sample from them before the next."""
    right, runner = make(max_num_seqs=6, kernels="torch", enforce_eager=True), make(**recordable)
    expected = [execute(right, plan).token_ids for plan in chain(TABLES, 6)]
    steps = [runner.launch(plan) for plan in chain(TABLES, 6)]
    assert steps[-1].result().token_ids == expected[-1]
    assert [step.result().token_ids for step in steps] == expected
    assert replays(runner) == {4: 6}


def test_padding_of_a_recorded_step_touches_no_sequence(make: MakeRunner, recordable: dict[str, Any]) -> None:
    runner = make(**recordable)
    assert runner.kv_cache is not None
    runner.kv_cache.fill(0.0)
    runner.rows.last_tokens.fill_(7)
    execute(runner, chain({row: TABLES[row] for row in (2, 5, 0)}, 1)[0])
    written = {
        int(block)
        for layer in runner.kv_cache.layers
        for tensor in layer
        for block in tensor.flatten(1).any(1).nonzero()
    }
    assert written == {1, 4, 5}
    assert runner.rows.last_tokens[[1, 3, 4]].tolist() == [7] * 3


EVEN = np.packbits(np.arange(320) % 2 == 0, bitorder="little").tobytes()

WISHES: dict[str, dict[str, Any]] = {
    "log probabilities": {"logprobs": 3},
    "a ban of end tokens": {"min_tokens": 4, "stops": tuple(range(200))},
    "penalties": {"presence_penalty": 2.0, "frequency_penalty": 1.0, "repetition_penalty": 1.5},
    "a bias": {"logit_bias": {7: 100.0}},
    "allowed tokens": {"allowed_token_ids": range(40, 60)},
    "bad words": {"bad_words": tuple((token,) for token in range(0, 300, 2))},
    "a seed and filters": {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "best_of": {"temperature": 1.0, "best_of": 2},
    "all at once": {"temperature": 1.2, "logprobs": 2, "presence_penalty": 1.0, "allowed_token_ids": range(200)},
}


@pytest.mark.parametrize("params", WISHES.values(), ids=WISHES)
def test_no_wish_leaves_the_recordings(make: MakeRunner, recordable: dict[str, Any], params: dict[str, Any]) -> None:
    """Nor does it change what others of the batch get."""
    right, runner, plain = (
        make(max_num_seqs=6, kernels="torch", enforce_eager=True),
        make(**recordable),
        make(max_num_seqs=6, enforce_eager=True),
    )
    plans = chain(TABLES, 6)
    plans[0].started = [
        *(start(row, [50 + row], TABLES[row], **params) for row in (0, 2)),
        start(5, [55], TABLES[5], temperature=1.0),
    ]
    found = [execute(runner, plan) for plan in plans]
    for result, plan in zip(found, plans, strict=True):
        assert_same(result, execute(right, plan))
    assert replays(runner) == {4: 6}, "every decode step"
    reported = {0, 1} if params.keys() & {"logprobs", "best_of"} else set()
    assert all(result.logprobs.keys() == reported for result in found)
    alone = chain({5: TABLES[5]}, 6, temperature=1.0)
    assert [result.token_ids[2] for result in found] == [execute(plain, plan).token_ids[0] for plan in alone]
    greedy = [execute(plain, plan).token_ids for plan in chain(TABLES, 6)]
    if params.keys() != {"logprobs"}:
        assert [result.token_ids[:2] for result in found] != [tokens[:2] for tokens in greedy], "the wish counts"


def test_masks_do_not_leave_the_recordings(make: MakeRunner, recordable: dict[str, Any]) -> None:
    right, runner = make(max_num_seqs=6, kernels="torch", enforce_eager=True), make(**recordable)
    plans = chain(TABLES, 6, temperature=3.0)
    plans[2].masks = [(2, EVEN[: -(-300 // 32) * 4])]
    plans[5].masks = [(2, None)]
    found = [execute(runner, plan).token_ids for plan in plans]
    assert found == [execute(right, plan).token_ids for plan in plans]
    assert replays(runner) == {4: 6}
    assert all(tokens[1] % 2 == 0 for tokens in found[2:5])
    free = [execute(right, plan).token_ids for plan in chain(TABLES, 6, temperature=3.0)]
    assert [tokens[::2] for tokens in found] == [tokens[::2] for tokens in free]
    assert any(tokens[1] % 2 for tokens in free[2:5])


def test_a_row_without_a_token_does_not_leave_the_recordings(make: MakeRunner, recordable: dict[str, Any]) -> None:
    runner = make(**recordable)
    (plan,) = chain(TABLES, 1)
    plan.masks = [(2, bytes(40))]
    result = execute(runner, plan)
    assert [token == UNKNOWN for token in result.token_ids] == [False, True, False]
    assert isinstance(result.error, NoTokenLeft)
    assert replays(runner) == {4: 1}


def test_steps_with_chunks_are_not_recorded_ones(make: MakeRunner, recordable: dict[str, Any]) -> None:
    runner, right = make(**recordable), make(max_num_seqs=6, kernels="torch", enforce_eager=True)
    mixed = StepPlan(started=[start(2, [1, 2, 3], TABLES[2])], decodes=decodes((0, 20)), chunks=[Chunk(2, 0, 3, (2,))])
    for plan in (prefill(20), mixed):
        assert_same(execute(runner, plan), execute(right, plan))
    assert replays(runner) == {}
    for plan in (StepPlan(decodes=decodes((2, 3), (0, 21))), StepPlan(decodes=decodes((0, 22)))):
        assert execute(runner, plan) == execute(right, plan)
    assert replays(runner) == {1: 1, 2: 1}


def test_a_plan_without_runs_replays_nothing(make: MakeRunner, recordable: dict[str, Any]) -> None:
    runner = make(**recordable)
    assert execute(runner, StepPlan(started=[start(0, [5], [1])], ended=[3])) == StepResult([])
    assert replays(runner) == {}


@pytest.mark.parametrize("what", ["stream", "kernels", "attention", "enforce_eager"])
def test_nothing_is_recorded_where_something_cannot_be(
    begin: MakeStartup, recordable: dict[str, Any], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    match what:
        case "stream":
            recordable["stream"] = FakeStream()
        case "kernels":
            monkeypatch.setattr(TorchKernels, "capturable", False)
        case "attention":
            monkeypatch.setattr(TorchAttention, "capturable", False)
        case "enforce_eager":
            recordable["enforce_eager"] = True
    startup = begin(**recordable)
    assert not startup.uses_graphs
    runner = startup.build()
    assert runner.graphs is None
    assert recordable["stream"].recordings == []
    assert "no CUDA graphs" in startup.describe(runner)
    execute(runner, chain(TABLES, 1)[0])
    runner.close()


def test_a_closed_runner_lets_go_of_its_recordings(make: MakeRunner, recordable: dict[str, Any]) -> None:
    runner = make(**recordable)
    runner.close()
    assert runner.graphs is None
    assert not hasattr(runner, "rows")
