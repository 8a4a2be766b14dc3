"""Decodes and chunks in one step: what each run computes is what it would compute in a step of its own."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.engine.messages import Chunk, StepPlan
from nanoengine.kernels.native_operations import unsupported_reason
from nanoengine.kernels.torch_kernels import TorchKernels
from tests.runner.conftest import MakeRunner
from tests.runner.fake_stream import FakeStream
from tests.runner.plans import assert_same, decodes, execute, fill_with_nan, kv_of, start
from tests.runner.random_plans import RandomPlans
from tests.runner.texts import BLOCK_SIZE, MAX_LEN, NUM_BLOCKS, NUM_ROWS, Texts


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, native_folder: Path) -> dict[str, Any]:
    """Options of a runner whose kernels and attention are of one kind."""
    reason = unsupported_reason(torch.device("cpu"), torch.float32) if request.param == "native" else None
    if reason is not None:
        pytest.skip(f"no native kernels: {reason}")
    return {"at": native_folder, "kernels": request.param, "attention_backend": request.param}


# ---- one step


def test_a_mixed_step_is_its_runs_one_after_the_other(make: MakeRunner, path: dict[str, Any]) -> None:
    """Native kernels promise the same bits, however many rows are computed together; torch's own do not."""
    wishes = {"temperature": 1.5, "logprobs": 3}
    begin = [
        StepPlan(started=[start(0, range(1, 22), [1, 2], **wishes)], chunks=[Chunk(0, 0, 21, (0,))]),
        StepPlan(started=[start(2, range(30, 36), [3], **wishes)], chunks=[Chunk(2, 0, 6, (2,))]),
        StepPlan(started=[start(5, range(60, 100), [5, 4, 6], prompt_logprobs=2)], chunks=[Chunk(5, 0, 11, ())]),
    ]
    fresh = [
        start(3, range(40, 60), [8, 7], **wishes, frequency_penalty=1.0),
        start(1, range(40, 60), [8, 7], **wishes),
        start(4, [7], [9]),
    ]
    runs = [decodes((2, 6)), decodes((0, 21))]
    chunks = [Chunk(5, 11, 22, ()), Chunk(3, 0, 20, (3, 1)), Chunk(4, 0, 1, (4,))]
    mixed, apart = (fill_with_nan(make(max_num_seqs=6, **path)) for _ in range(2))
    for plan in begin:
        assert_same(execute(mixed, plan), execute(apart, plan), within=0)
    together = execute(mixed, StepPlan(started=fresh, decodes=decodes((2, 6), (0, 21)), chunks=chunks))
    execute(apart, StepPlan(started=fresh))
    alone = [execute(apart, StepPlan(decodes=run)) for run in runs]
    alone += [execute(apart, StepPlan(chunks=[chunk])) for chunk in chunks]
    exact = path["kernels"] == "native"
    assert together.token_ids == [token for result in alone for token in result.token_ids]
    assert len(together.token_ids) == 5
    expected_kv, found_kv = kv_of(apart), kv_of(mixed)
    assert torch.equal(found_kv.isnan(), expected_kv.isnan()), "the same slots are written"
    if exact:
        assert torch.equal(found_kv.view(torch.int32), expected_kv.view(torch.int32))
    torch.testing.assert_close(found_kv, expected_kv, rtol=0, atol=1e-5, equal_nan=True)
    alone[0].logprobs |= {1: alone[1].logprobs[0], 2: alone[3].logprobs[0], 3: alone[3].logprobs[1]}
    alone[0].token_ids, alone[0].prompt_logprobs = together.token_ids, alone[2].prompt_logprobs
    assert_same(together, alone[0], within=0 if exact else 1e-5)
    assert [(part.row, part.start, len(part.entries)) for part in together.prompt_logprobs] == [(5, 12, 22)]
    for row, before in ((2, 7), (0, 22), (3, 20), (1, 20), (4, 1)):
        if row in (3, 1):
            continue  # they share a block that one of them would have to copy
        plan = StepPlan(decodes=decodes((row, before)))
        assert_same(execute(mixed, plan), execute(apart, plan), within=0 if exact else 1e-5)


def test_sequences_of_one_mixed_step_may_share_blocks_that_it_writes(make: MakeRunner, path: dict[str, Any]) -> None:
    """K and V of the whole batch are written before any of its attention reads."""
    text = list(range(50, 90))
    right = fill_with_nan(make(max_num_seqs=6, **path))
    plan = StepPlan(started=[start(0, text, [1, 2, 3])], chunks=[Chunk(0, 0, 40, (0,))])
    expected = execute(right, plan).token_ids
    runner = fill_with_nan(make(max_num_seqs=6, **path))
    execute(runner, StepPlan(started=[start(1, text[:20], [9, 8])], chunks=[Chunk(1, 0, 20, (1,))]))
    writer, reader = start(2, text, [1, 2, 4]), start(3, text, [1, 2, 3])
    chunks = [Chunk(2, 0, 34, ()), Chunk(3, 32, 8, (3,))]
    result = execute(runner, StepPlan(started=[writer, reader], decodes=decodes((1, 20)), chunks=chunks))
    assert result.token_ids[1:] == expected


# ---- any steps


@settings(
    max_examples=20,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(rng=st.randoms(use_true_random=True), depth=st.integers(1, 3))
@pytest.mark.parametrize("kind", ["native", "torch", "recorded"])
def test_tokens_do_not_depend_on_what_shares_their_steps(
    make: MakeRunner,
    monkeypatch: pytest.MonkeyPatch,
    native_folder: Path,
    texts: Texts,
    kind: str,
    rng: random.Random,
    depth: int,
) -> None:
    """Nor on how many are in flight, how prompts are cut, who forks, shares blocks, gives them back and begins anew."""
    if kind == "native" and unsupported_reason(torch.device("cpu"), torch.float32) is not None:
        pytest.skip("no native kernels")
    with monkeypatch.context() as patch:
        patch.setattr(TorchKernels, "capturable", True)
        patch.setattr(TorchAttention, "capturable", True)
        stream = FakeStream(seed=rng.randrange(100), can_record=kind == "recorded")
        kernels = "torch" if kind == "recorded" else kind
        runner = fill_with_nan(make(at=native_folder, stream=stream, kernels=kernels, **Texts.options))
    plans = RandomPlans(
        rng,
        num_rows=NUM_ROWS,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_len=MAX_LEN,
        continuation=texts,
        params=Texts.params,
    )
    flight: deque[Any] = deque()
    for _ in range(25):
        plan = plans.next()
        flight.append((runner.launch(plan), plans.expected))
        if len(flight) == depth:
            step, expected = flight.popleft()
            assert step.result().token_ids == expected
    for step, expected in flight:
        assert step.result().token_ids == expected
    runner.close()
