"""The runner, plan by plan: what a failed one leaves, and what is cleared before it is written."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import EngineClosed
from nanoengine.core.messages import RowSampling, Run, Started, StepPlan
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.startup import Startup

DEMO = str(Path(__file__).parents[2] / "nanoengine" / "demo")
GREEDY = RowSampling(CoreSamplingParams(temperature=0.0), 0, 3)


@pytest.fixture
def runner() -> Any:
    engine = Startup(EngineConfig(model=DEMO, dtype="float32", num_kv_blocks=8, max_model_len=64)).build()
    yield engine.executor
    engine.close()


def begin(row: int, block: int, epoch: int = 0, **more: Any) -> StepPlan:
    started = [Started(row, [5 + row, 6, 7], [[block]], GREEDY)]
    return StepPlan(epoch=epoch, started=started, runs=[Run(row, 0, 3, True)], **more)


def decode(row: int, start: int, epoch: int = 0) -> StepPlan:
    return StepPlan(epoch=epoch, decode_rows=np.array([row], np.int32), decode_starts=np.array([start], np.int32))


def test_behind_a_plan_that_failed_none_of_its_epoch_is_carried_out(runner: Any) -> None:
    right = [runner.launch(plan)().token_ids for plan in (begin(0, 1), decode(0, 3))]
    forward, calls = runner.model.forward, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("injected")
        return forward(*args)

    runner.model.forward = failing
    with pytest.raises(RuntimeError, match="injected"):
        runner.launch(begin(1, 2))()
    assert runner.launch(decode(0, 4))().token_ids == []
    assert len(calls) == 1
    again = [runner.launch(plan)().token_ids for plan in (begin(0, 3, epoch=1), decode(0, 3, epoch=1))]
    assert again == right


def test_blocks_are_cleared_before_the_step_writes_to_them(runner: Any) -> None:
    right = runner.launch(begin(0, 1))().token_ids
    for place in runner.kv_cache.pool_layers:
        for tensor in place:
            tensor[2:4] = torch.nan
    assert runner.launch(begin(0, 2, zeroed=[2]))().token_ids == right
    for place in runner.kv_cache.pool_layers:
        for tensor in place:
            assert not tensor[2].isnan().any()
            assert torch.equal(tensor[2], tensor[1])
            assert tensor[3].isnan().all()


def test_a_step_whose_hidden_states_are_read_is_not_replayed(runner: Any) -> None:
    class Recorder:
        asked = 0

        def logits(self, plan: StepPlan) -> None:
            self.asked += 1

    runner.recorder = Recorder()
    runner.launch(begin(0, 1, needs_hidden=True))()
    assert runner.recorder.asked == 0
    runner.launch(decode(0, 3))()
    assert runner.recorder.asked == 1


def test_a_closed_runner_says_so_and_holds_no_memory(runner: Any) -> None:
    held = [weakref.ref(own) for own in (runner.model, runner.kv_cache, runner.rows)]
    runner.close()
    runner.close()
    gc.collect()
    assert [own() for own in held] == [None] * 3
    with pytest.raises(EngineClosed):
        runner.launch(begin(0, 1))
