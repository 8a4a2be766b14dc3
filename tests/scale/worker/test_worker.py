"""A worker process computes what this process would, whatever happens to it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM, AsyncLLMEngine, SamplingParams
from nanoengine.builder import build_engine, read_config
from nanoengine.core.messages import StepPlan
from nanoengine.core.outputs import RequestOutput
from nanoengine.errors import EngineDead, InvalidConfig, StepFailed
from nanoengine.features.kv_groups.options import KVGroupsOptions
from nanoengine.scale.worker import remote_runner
from nanoengine.scale.worker.child import portable, start_child
from nanoengine.scale.worker.remote_runner import RemoteRunner
from tests.models.families import family_checkpoint

OPTIONS: dict[str, Any] = {"num_kv_blocks": 40, "max_num_batched_tokens": 48, "max_model_len": 256, "use_tqdm": False}
PROMPTS = ["Once upon a time", "The king said to the queen that", [5, 6, 7, 8] * 12]
PARAMS = [
    SamplingParams(temperature=1.0, seed=3, max_tokens=40, n=2, logprobs=2, presence_penalty=0.3, ignore_eos=True),
    SamplingParams(
        temperature=0.8, seed=4, max_tokens=30, structured_outputs={"regex": "[a-z]{4,9}( [a-z]{2,7}){3,9}"}
    ),
    SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, stop=["zzz"]),
]


@pytest.mark.parametrize("module", ["nanoengine.scale.worker.process", "nanoengine.scale.replicas.process"])
def test_a_child_runs_nothing_that_lies_in_the_working_folder(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the folder of a model, or a user's own, with files that have the names of modules."""
    mark = tmp_path / "mark"
    for name in ("queue", "logging", "json", "torch", "nanoengine"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\nraise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep)  # an empty entry is the working folder, too
    process, own = start_child(module)
    own.close()  # whoever finds that nobody speaks to it ends
    assert process.wait(60) != 7
    assert not mark.exists()


def told(outputs: list[RequestOutput]) -> list[Any]:
    """All that callers see, to the bit."""
    return [(o.index, o.text, o.token_ids, o.logprobs, o.finish_reason) for output in outputs for o in output.outputs]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with LLM("demo", **OPTIONS) as llm:
        return told(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", worker_process=True, worker_step_seconds=3.0, **OPTIONS) as llm:
        yield llm


def remote(llm: LLM) -> RemoteRunner:
    runner = llm.engine.executor.executor  # type: ignore[attr-defined] # behind what lets Ctrl-C through
    assert isinstance(runner, RemoteRunner)
    return runner


def run(llm: LLM, steps: set[int], number: signal.Signals) -> list[Any]:
    """Run all requests, and send a signal to the worker behind some steps."""
    count = 0

    def after_step(_: object) -> None:
        nonlocal count
        count += 1
        if count in steps:
            os.kill(remote(llm).processes[0].pid, number)

    return told(llm.run(llm.make_requests(PROMPTS, PARAMS), after_step))


def test_it_computes_the_same_and_so_does_another_one_when_it_is_killed(llm: LLM, expected: list[Any]) -> None:
    assert told(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    starts = remote(llm).num_starts
    assert run(llm, {1, 9, 31}, signal.SIGKILL) == expected
    assert remote(llm).num_starts == starts + 3


def test_it_is_killed_when_it_hangs(llm: LLM, expected: list[Any]) -> None:
    starts = remote(llm).num_starts
    assert run(llm, {5}, signal.SIGSTOP) == expected
    assert remote(llm).num_starts == starts + 1


def test_it_is_started_again_when_its_successors_are_killed_while_they_start(
    llm: LLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    delays, starts = [0.0, 0.2], remote(llm).num_starts

    def start_and_kill(*what: Any) -> tuple[subprocess.Popen[bytes], socket.socket]:
        process, own = start_child(*what)
        if delays:
            threading.Timer(delays.pop(0), process.kill).start()
        return process, own

    monkeypatch.setattr(remote_runner, "start_child", start_and_kill)
    monkeypatch.setattr(remote_runner, "RETRY_SECONDS", (0.0,))
    assert run(llm, {5}, signal.SIGKILL) == expected
    assert remote(llm).num_starts == starts + 3


def test_answers_that_nobody_waits_for_are_dropped(llm: LLM, expected: list[Any]) -> None:
    """As after Ctrl-C."""
    for _ in range(3):
        remote(llm).launch(StepPlan())
    assert told(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected


def test_what_kills_every_worker_ends_and_others_go_on(
    llm: LLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, start = remote(llm), RemoteRunner.start

    def start_and_kill(runner: RemoteRunner) -> None:
        start(runner)
        os.kill(runner.processes[0].pid, signal.SIGKILL)

    os.kill(own.processes[0].pid, signal.SIGKILL)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteRunner, "start", start_and_kill)
        request = llm.make_requests(PROMPTS[0], PARAMS[0])[0]
        llm.engine.submit(request)
        for _ in range(2):
            llm.engine.step()
            assert not request.finished
        patch.setattr(RemoteRunner, "start", start)
        llm.engine.step()
    assert isinstance(request.error, EngineDead)
    assert "was killed by SIGKILL; 3 were lost at the same step" in str(request.error)
    assert told(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected


def test_a_stream_goes_on_where_it_was(expected: list[Any]) -> None:
    async def stream(engine: AsyncLLMEngine, runner: RemoteRunner) -> tuple[list[int], str]:
        tokens: list[int] = []
        text = ""
        async for delta in engine.generate(PROMPTS[2], PARAMS[2]):
            tokens, text = tokens + delta.token_ids, text + delta.text
            if len(tokens) in (2, 20):
                os.kill(runner.processes[0].pid, signal.SIGKILL)
        return tokens, text

    options = {name: value for name, value in OPTIONS.items() if name != "use_tqdm"}
    config = read_config("demo", {**options, "worker_process": True})
    engine = AsyncLLMEngine(lambda: build_engine(config, use_tqdm=False).engine)
    try:
        runner = engine.engine.executor
        assert isinstance(runner, RemoteRunner)
        tokens, text = asyncio.run(stream(engine, runner))
        assert runner.num_starts == 3
    finally:
        engine.close()
    assert (text, tokens) == expected[-1][1:3]


def test_it_may_die_while_the_last_request_is_aborted(expected: list[Any]) -> None:
    """Its step is in flight, and `abort` waits for it."""
    with LLM("demo", worker_process=True, async_scheduling=True, **OPTIONS) as llm:
        [request] = llm.make_requests([PROMPTS[0]], PARAMS[0])
        llm.engine.submit(request)
        for _ in range(4):
            llm.engine.step()
        remote(llm).processes[0].kill()
        assert llm.engine.abort(request.request_id)
        assert told(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
        assert remote(llm).num_starts == 2


def test_it_has_as_many_snapshots_of_states_as_are_given_out(tmp_path: Path) -> None:
    """Though it would find another amount of free memory."""
    with LLM(str(family_checkpoint(tmp_path, "LFM2")), worker_process=True, **OPTIONS) as llm:
        slots = llm.built.capabilities["kv_groups"].snapshots.num_slots  # type: ignore[attr-defined]
        own = remote(llm).config.of(KVGroupsOptions).snapshot_memory
        assert own is not None
        assert remote(llm).config.block_size == 16, "as is counted here, on whatever device it computes"
        assert slots == OPTIONS["num_kv_blocks"], "as many as there are blocks"


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_start_that_takes_too_long_is_an_error() -> None:
    with pytest.raises(EngineDead, match=r"the worker process was not ready within worker_start_seconds=0\.01"):
        LLM("demo", worker_process=True, worker_start_seconds=0.01, **OPTIONS)
    with pytest.raises(InvalidConfig, match="worker_start_seconds is 0: it must be a number above 0"):
        LLM("demo", worker_start_seconds=0)


def test_no_worker_is_left_behind() -> None:
    """By close, and by a process that is killed in the middle of a request."""
    with LLM("demo", worker_process=True, **OPTIONS) as llm:
        pid = remote(llm).processes[0].pid
        assert is_running(pid)
    assert not is_running(pid)
    script = (
        "import os, signal; from nanoengine import LLM, SamplingParams\n"
        "llm = LLM('demo', worker_process=True, num_kv_blocks=40, use_tqdm=False)\n"
        "print(llm.engine.executor.executor.processes[0].pid, flush=True)\n"
        "llm.run(llm.make_requests('a', None), lambda _: os.kill(os.getpid(), signal.SIGKILL))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 30
    while is_running(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_its_start_up_raises_arrives_by_name() -> None:
    with pytest.raises(InvalidConfig, match=r"a KV pool of \d+ blocks takes"):
        LLM("demo", worker_process=True, kv_cache_memory="75TiB", use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"worker_process": 1}, "worker_process is 1: it must be True or False"),
        ({"worker_step_seconds": 0}, "worker_step_seconds is 0: it must be a number above 0"),
        (
            {"worker_step_seconds": 2.2e6},
            "worker_step_seconds is 2200000.0: it must be a number above 0 and at most 2000000",
        ),
        ({"worker_silence_seconds": -1}, "worker_silence_seconds is -1: it must be a number above 0"),
        ({"worker_start_attempts": 0}, "worker_start_attempts is 0: it must be an integer from 1"),
        ({"worker_start_seconds": float("inf")}, "worker_start_seconds is inf: it must be a number above 0"),
        ({"worker_process": True, "preemption_mode": "swap"}, "preemption_mode is not computed by a worker process"),
        ({"worker_process": True, "kv_disk_path": "x"}, "kv_disk_path is not computed by a worker process"),
        ({"worker_process": True, "speculation": "model:demo"}, "draft_model is not computed by a worker process"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        LLM("demo", use_tqdm=False, **options)


def test_errors_that_cannot_be_sent_say_what_they_said() -> None:
    error = StepFailed("it went wrong", [])
    error.outputs = lambda: None  # type: ignore[assignment]
    assert "StepFailed: it went wrong" in str(portable(error))
    assert type(portable(ValueError("plain"))) is ValueError
