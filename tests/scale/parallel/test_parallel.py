"""Ranks in processes of their own compute what one process would, whatever happens to them, and leave nothing behind."""

from __future__ import annotations

import os
import selectors
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nanoengine import LLM
from nanoengine.errors import EngineDead, InvalidConfig
from nanoengine.features.kv_groups.options import KVGroupsOptions
from nanoengine.models.decoder import DecoderLayer
from nanoengine.scale.parallel.capability import check_layers
from nanoengine.scale.worker.remote_runner import RemoteRunner
from tests.forks import IS_LINUX, Forked
from tests.models.families import family_checkpoint
from tests.scale.replicas.test_demo import OPTIONS, PARAMS, PROMPTS
from tests.scale.seen import children, is_running, told
from tests.support import threads


def test_two_ranks_compute_the_same_and_a_lost_one_ends_the_other() -> None:
    with LLM("demo", seed=1, **OPTIONS) as llm:
        expected = told(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    with LLM("demo", seed=1, tensor_parallel_size=2, replicas=0, **OPTIONS) as llm:
        assert told(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
        ranks = [process.pid for process in llm.engine.executor.executor.processes]  # type: ignore[attr-defined]
        assert all(map(is_running, ranks))
        os.kill(ranks[1], signal.SIGKILL)
        with pytest.raises(EngineDead, match="the worker process of rank 1 was killed by SIGKILL"):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert not any(map(is_running, ranks))


SCRIPT = """
from nanoengine import LLM
llm = LLM('demo', tensor_parallel_size=2, num_kv_blocks=40, use_tqdm=False)
[replica] = llm.engine.supervisor.current
print(replica.started.process.pid, flush=True)
while True:
    llm.generate([[5] * 300], use_tqdm=False)
"""


@pytest.mark.skipif(not IS_LINUX, reason="it looks for processes in /proc")
def test_nothing_is_left_of_a_process_that_is_ended() -> None:
    """Ctrl-C goes to the whole group of processes: the one with the requests, a replica, and its ranks."""
    shared = Path("/dev/shm")
    before = set(shared.iterdir()) if shared.is_dir() else set()
    null, (said, told_to) = os.open(os.devnull, os.O_RDWR), os.pipe()
    process = Forked(["-c", SCRIPT], streams=(null, told_to, null), own_session=True)
    for own in (null, told_to):
        os.close(own)
    with os.fdopen(said) as output:
        replica = int(output.readline())
    ranks = children(replica, "worker.process")
    assert len(ranks) == 2
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(60)
    deadline = time.monotonic() + 30
    while any(map(is_running, [replica, *ranks])):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert (set(shared.iterdir()) if shared.is_dir() else set()) <= before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0: it must be an integer from 1 to 64"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size is 5, but the model has 4 query heads"),
        ({"tensor_parallel_size": 2, "kv_disk_path": "x"}, "kv_disk_path is not computed by ranks"),
        ({"tensor_parallel_size": 2, "speculation": "model:demo"}, "draft_model is not computed by ranks"),
        ({"worker_step_seconds": 2.2e6}, "worker_step_seconds is 2200000.0: it must be a number above 0 and at most"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        LLM("demo", replicas=0, use_tqdm=False, **options)


def test_each_rank_needs_a_head_of_the_states(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path, "Granite 4")
    message = "tensor_parallel_size is 3, but the model has 2 heads in its layers with states: every rank needs one"
    with pytest.raises(InvalidConfig, match=message):
        LLM(str(folder), tensor_parallel_size=3, replicas=0, use_tqdm=False)


def test_layers_that_nobody_has_shared_out_are_refused() -> None:
    class Recurrence: ...

    layer = SimpleNamespace(mixing=(Recurrence(),), mlp=None)
    with pytest.raises(InvalidConfig, match="tensor_parallel_size is 2, but a layer of the model has a Recurrence"):
        check_layers([cast(DecoderLayer, layer)], 2)


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(runner: RemoteRunner, _: bool) -> None:
        runner._selector = selectors.DefaultSelector()

    monkeypatch.setattr(RemoteRunner, "_start", start)


@pytest.mark.usefixtures("no_process")
def test_ranks_share_the_threads_and_the_bytes_of_the_pool() -> None:
    """Two K/V heads on three ranks: one of them is there twice."""
    options: dict[str, Any] = {"kv_cache_memory": "8MiB", "max_model_len": 256, "num_threads": 7, "use_tqdm": False}
    pools = {}
    for size in (2, 3):
        with threads(1), LLM("demo", tensor_parallel_size=size, replicas=0, **options) as llm:
            pools[size] = llm.engine.scheduler.blocks.num_blocks
            assert llm.engine.executor.executor.config.num_threads == 7 // size  # type: ignore[attr-defined]
    assert pools[3] == (pools[2] + 1) * 2 // 3 - 1


@pytest.mark.usefixtures("no_process")
def test_ranks_have_as_many_snapshots_of_states_as_are_given_out(tmp_path: Path) -> None:
    """Though they would find another amount of free memory."""
    folder = family_checkpoint(tmp_path, "LFM2")
    with LLM(str(folder), tensor_parallel_size=2, replicas=0, **OPTIONS) as llm:
        config = llm.engine.executor.executor.config  # type: ignore[attr-defined]
        assert config.of(KVGroupsOptions).snapshot_memory is not None
        assert config.block_size == 16, "as is counted here, on whatever device it computes"
        slots = llm.built.capabilities["kv_groups"].snapshots.num_slots
        assert slots == OPTIONS["num_kv_blocks"], "as many as there are blocks"
