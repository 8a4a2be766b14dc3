"""Ranks in processes of their own compute what one process would, whatever happens to them, and leave nothing behind."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.builder import read_config
from nanoengine.core.messages import StepPlan
from nanoengine.core.qwen3 import DenseLayer
from nanoengine.errors import InvalidConfig
from nanoengine.scale.parallel.capability import check_layers
from nanoengine.scale.worker import remote_runner
from nanoengine.scale.worker.options import WorkerOptions
from nanoengine.scale.worker.remote_runner import RemoteRunner, WorkerLost
from tests.models.families import family_checkpoint
from tests.scale.worker.peers import Peer, silent
from tests.scale.worker.test_worker import OPTIONS, PARAMS, PROMPTS, is_running, remote, told
from tests.support import threads

SIZE, SECONDS = 2, 1.5


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with LLM("demo", **OPTIONS) as llm:
        return told(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", tensor_parallel_size=SIZE, worker_step_seconds=SECONDS, **OPTIONS) as llm:
        yield llm


def run(llm: LLM, behind: dict[int, tuple[int, signal.Signals]], reasons: list[str]) -> list[Any]:
    """Run all requests, and send signals to ranks behind some steps; notes why groups were lost."""
    count, lose = 0, RemoteRunner._lose

    def after_step(_: object) -> None:
        nonlocal count
        count += 1
        if count in behind:
            rank, number = behind[count]
            os.kill(remote(llm).processes[rank].pid, number)

    def noted(runner: RemoteRunner, reason: str) -> None:
        reasons.append(reason)
        lose(runner, reason)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteRunner, "_lose", noted)
        return told(llm.run(llm.make_requests(PROMPTS, PARAMS), after_step))


def test_two_ranks_compute_the_same_and_so_do_others_when_one_is_killed(llm: LLM, expected: list[Any]) -> None:
    assert told(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    runner, reasons = remote(llm), []
    first, starts = [own.pid for own in runner.processes], runner.num_starts
    kills = {7: (1, signal.SIGKILL), 14: (0, signal.SIGTERM), 20: (0, signal.SIGKILL)}
    assert run(llm, kills, reasons) == expected
    assert runner.num_starts == starts + 2
    assert reasons == [
        "the worker process of rank 1 was killed by SIGKILL",
        "the worker process of rank 0 was killed by SIGKILL",
    ]
    assert not any(map(is_running, first)), "the others of a lost group are ended"


def test_a_rank_that_hangs_is_named_and_all_go_on(llm: LLM, expected: list[Any]) -> None:
    reasons: list[str] = []
    rank = 1
    start = time.monotonic()
    assert run(llm, {5: (rank, signal.SIGSTOP)}, reasons) == expected
    assert len(reasons) == 1
    assert reasons[0].startswith(f"rank {rank} of 2 did not come to rank {1 - rank} within worker_step_seconds=1.5")
    assert time.monotonic() - start > SECONDS


def test_ranks_that_have_some_tokens_each_compute_the_same(expected: list[Any]) -> None:
    options = OPTIONS | {"block_size": 512, "decode_context_parallel_size": SIZE}
    with LLM("demo", tensor_parallel_size=SIZE, **options) as llm:
        assert told(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected


def test_ranks_with_states_go_on_when_one_is_killed(tmp_path: Path) -> None:
    """Snapshots are gone with them, and taken anew."""
    folder = family_checkpoint(tmp_path, "Qwen3-Next", head_dim=32)
    prompts = [[(i * i + 3 * j) % 250 for i in range(40 + 8 * j)] for j in range(2)] * 2
    params = [SamplingParams(temperature=1.0, seed=j, max_tokens=24, logprobs=1, ignore_eos=True) for j in range(4)]
    with LLM(str(folder), **OPTIONS) as alone:
        right = told(alone.generate(prompts, params, use_tqdm=False))
    count = 0
    with LLM(str(folder), tensor_parallel_size=SIZE, **OPTIONS) as llm:

        def kill_one(_: object) -> None:
            nonlocal count
            count += 1
            if count == 12:
                os.kill(remote(llm).processes[1].pid, signal.SIGKILL)

        assert told(llm.run(llm.make_requests(prompts, params), kill_one)) == right
        assert remote(llm).num_starts == 2
        restored = llm.built.capabilities["kv_groups"].snapshots.num_restored
        assert told(llm.generate(prompts, params, use_tqdm=False)) == right
        assert llm.built.capabilities["kv_groups"].snapshots.num_restored > restored


def test_what_fails_in_all_ranks_is_raised_and_in_one_alone_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    failed, well = (2, False, MemoryError("no room")), (2, True, None)

    def runner_of(*answers: Any) -> RemoteRunner:
        """One of a rank for each answer; that of the plan before comes with it."""

        def start_child(*_: Any) -> tuple[Peer, socket.socket]:
            answer = left.pop(0)

            def live(own: Connection) -> None:
                for message in ((0, True, None), (1, True, None), *([answer] if answer else [])):
                    own.recv()
                    own.send(message)
                silent(own)

            peer = Peer(live)
            return peer, peer.socket

        left = list(answers)
        monkeypatch.setattr(remote_runner, "start_child", start_child)
        limits = WorkerOptions(worker_step_seconds=0.3)
        runner = RemoteRunner(read_config("demo", {}), len(answers), limits)
        runner.launch(StepPlan())
        return runner

    monkeypatch.setattr(remote_runner, "MORE_SECONDS", 0.05)
    with pytest.raises(MemoryError, match="no room"):
        runner_of(failed, failed).launch(StepPlan())()
    with pytest.raises(WorkerLost, match=r"failed in rank 1 alone \(MemoryError: no room\)"):
        runner_of(None, failed).launch(StepPlan())()
    with pytest.raises(WorkerLost, match=r"of rank 1 took more than worker_step_seconds=0\.3"):
        runner_of(well, None).launch(StepPlan())()
    with pytest.raises(WorkerLost, match=r"of rank 0, 1 took more than worker_step_seconds=0\.3"):
        runner_of(None, None).launch(StepPlan())()


SCRIPT = """
import os, signal, sys
from nanoengine import LLM, SamplingParams
llm = LLM('demo', tensor_parallel_size=2, num_kv_blocks=40, use_tqdm=False)
print(*(own.pid for own in llm.engine.executor.executor.processes), flush=True)
llm.engine.submit(llm.make_requests([[5] * 300])[0])
while True:
    llm.engine.step()
    if not llm.engine.has_unfinished:
        llm.engine.submit(llm.make_requests([[5] * 300])[0])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_process_that_is_ended(number: signal.Signals) -> None:
    """Ctrl-C goes to the whole group of processes."""
    shared = Path("/dev/shm")
    before = set(shared.iterdir()) if shared.is_dir() else set()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    pids = list(map(int, process.stdout.readline().split()))
    assert len(pids) == 2
    assert all(map(is_running, pids))
    time.sleep(0.2)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert (set(shared.iterdir()) if shared.is_dir() else set()) <= before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0: it must be an integer from 1 to 64"),
        ({"tensor_parallel_size": 65}, "tensor_parallel_size is 65: it must be an integer from 1 to 64"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size is 5, but the model has 4 query heads"),
        ({"tensor_parallel_size": 2, "kv_disk_path": "x"}, "kv_disk_path is not computed by a worker process"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        LLM("demo", use_tqdm=False, **options)


def test_each_rank_needs_a_head_of_the_states(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path, "Granite 4")
    message = "tensor_parallel_size is 3, but the model has 2 heads in its layers with states: every rank needs one"
    with pytest.raises(InvalidConfig, match=message):
        LLM(str(folder), tensor_parallel_size=3, use_tqdm=False)


def test_layers_that_nobody_has_shared_out_are_refused() -> None:
    class Recurrence: ...

    layer = SimpleNamespace(self_attn=Recurrence(), mlp=None)
    with pytest.raises(InvalidConfig, match="tensor_parallel_size is 2, but a layer of the model has a Recurrence"):
        check_layers([cast(DenseLayer, layer)], 2)


def test_ranks_share_the_threads_and_the_bytes_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two K/V heads on three ranks: one of them is there twice. No process is needed to know that."""

    def start(runner: RemoteRunner) -> None:
        runner._links, runner.processes, runner._selector = [], [], selectors.DefaultSelector()

    monkeypatch.setattr(RemoteRunner, "start", start)
    options: dict[str, Any] = {"kv_cache_memory": "8MiB", "max_model_len": 256, "num_threads": 7, "use_tqdm": False}
    pools = {}
    for size in (2, 3):
        with threads(1), LLM("demo", tensor_parallel_size=size, **options) as llm:
            pools[size], runner = llm.engine.scheduler.blocks.num_blocks, remote(llm)
            assert runner.config.num_threads == 7 // size
    assert pools[3] == (pools[2] + 1) * 2 // 3 - 1
