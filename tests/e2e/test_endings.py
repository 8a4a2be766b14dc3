"""Close, use after close, and Ctrl-C at any moment."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from nanoengine import LLM, SamplingParams
from nanoengine.builder import build_engine, read_config
from nanoengine.errors import (
    EngineClosed,
    InvalidConfig,
)
from nanoengine.serve.aio.async_llm_engine import AsyncLLMEngine
from tests.e2e.small_engine import (
    GREEDY,
    PROMPTS,
    assert_idle,
    generate,
    open_llm,
    raise_at,
    sabotage,
    submit,
)
from tests.support import fill_kv_with_nan, model_runner, tiny_checkpoint

# ---- the end of an engine


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.generate("hello", use_tqdm=False),
        lambda llm: llm.stream("hello"),
        lambda llm: submit(llm, "hello"),
        lambda llm: llm.engine.step(),
    ],
)
def test_a_closed_engine_says_so(llm: LLM, use: Callable[[LLM], object]) -> None:
    llm.close()
    with pytest.raises(EngineClosed, match="closed"):
        use(llm)


def test_leaving_the_context_closes_also_after_an_error(tiny: Path) -> None:
    with pytest.raises(KeyError), open_llm(tiny) as llm:
        raise KeyError
    with pytest.raises(EngineClosed):
        llm.generate("hello", use_tqdm=False)


def test_closing_ends_what_runs(llm: LLM) -> None:
    stream = llm.stream("hello", GREEDY)
    next(stream)
    request = submit(llm, "other", GREEDY)
    llm.close()
    assert request.finished
    assert request.output().outputs[0].finish_reason == "abort"
    assert_idle(llm)


def test_two_engines_live_side_by_side(make: Callable[..., LLM], right: list[list[int]]) -> None:
    one, two = make(), make(block_size=4, num_kv_blocks=100)
    streams = [llm.stream(PROMPTS[i], GREEDY) for i, llm in enumerate((one, two))]
    texts = [next(stream) for stream in streams]
    for i, stream in enumerate(streams):
        texts[i] += "".join(stream)
    assert texts == [one.tokenizer.decode(right[0]), two.tokenizer.decode(right[1])]
    one.close()
    assert generate(two, PROMPTS) == right


def test_a_refused_engine_leaves_room_for_a_right_one(tiny: Path, right: list[list[int]]) -> None:
    with pytest.raises(InvalidConfig):
        open_llm(tiny, num_kv_blocks=1)
    with open_llm(tiny) as llm:
        assert generate(llm, PROMPTS) == right


def in_a_loop(folder: Path, **options: Any) -> None:
    """An engine that steps in a thread of its own."""
    config = read_config(str(folder), {"max_model_len": 64, "num_kv_blocks": 40, "device": "cpu", **options})
    engine = AsyncLLMEngine.of(lambda: build_engine(config, use_tqdm=False))

    async def ask() -> None:
        async for _ in engine.generate([5] * 20, SamplingParams(max_tokens=2, structured_outputs={"regex": "[a-z]*"})):
            pass

    asyncio.run(ask())
    engine.close()


def in_this_thread(folder: Path, **options: Any) -> None:
    with open_llm(folder, **options) as llm:
        if "pooling" in options:
            llm.embed([[5] * 20], use_tqdm=False)
            return
        llm.listen_to_kv_events(lambda _: None)
        grammar = None if options else {"regex": "[a-z]*"}
        params = [SamplingParams(max_tokens=2, logprobs=2, structured_outputs=own) for own in (grammar, None)]
        llm.generate([[5] * 20, [6] * 20], params, use_tqdm=False)


def left_behind() -> dict[str, int]:
    """Child processes, threads and descriptors of this process, and its memory in MiB."""
    gc.collect()
    children = [Path(f"/proc/self/task/{own}/children").read_text().split() for own in os.listdir("/proc/self/task")]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "children": sum(map(len, children)),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "memory": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
    }


@pytest.mark.skipif(sys.platform != "linux", reason="it counts in /proc")
def test_fifty_engines_leave_no_more_behind_than_the_first(tiny: Path, tmp_path: Path) -> None:
    kinds: list[tuple[Callable[..., None], dict[str, Any]]] = [
        (in_this_thread, {}),
        (in_this_thread, {"kv_host_memory": 1 << 20, "async_scheduling": True}),
        (in_this_thread, {"kv_disk_path": str(tmp_path / "kv"), "speculation": "ngram", "fair_shares": True}),
        (in_this_thread, {"speculation": f"model:{tiny}", "enforce_eager": True}),
        (in_this_thread, {"enable_lora": True, "enforce_eager": True}),
        (in_this_thread, {"pooling": "mean", "enforce_eager": True}),
        (in_a_loop, {}),
    ]
    counts = []
    for number in range(50):
        make, options = kinds[number % len(kinds)]
        make(tiny, **options)
        if number % len(kinds) == 1:
            counts.append(left_behind())
    first = counts[1]  # by then all kinds have been there, and all threads that stay
    for name in ("children", "threads", "descriptors"):
        assert [own[name] for own in counts[1:]] == [first[name]] * len(counts[1:]), name
    assert counts[-1]["memory"] - counts[2]["memory"] <= 16, [own["memory"] for own in counts]


# ---- Ctrl-C


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    ("where", "overlap"),
    [("forward", True), ("schedule", False), ("commit", True), ("submit", False), ("decode", True)],
)
def test_ctrl_c_frees_everything_wherever_it_comes(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, right: list[list[int]], where: str, overlap: bool
) -> None:
    llm = make(max_num_seqs=2, async_scheduling=overlap)  # two run, two wait
    owner, name = {
        "forward": (model_runner(llm).model, "forward"),
        "schedule": (llm.engine.scheduler.blocks, "admit"),
        "commit": (llm.engine.scheduler, "commit"),
        "submit": (llm.engine.scheduler, "add"),
        "decode": (llm.tokenizer, "decode"),
    }[where]
    original, calls = getattr(owner, name), 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert calls >= 2
    assert_idle(llm)
    fill_kv_with_nan(llm)
    assert llm.engine.scheduler.blocks.reset()
    assert generate(llm, PROMPTS) == right
    assert_idle(llm)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("where", ["finish", "close"])
def test_ctrl_c_while_closing_waits_until_all_is_gone(llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    requests = [submit(llm, prompt, GREEDY) for prompt in PROMPTS]
    llm.engine.step()
    owner = llm.engine.scheduler if where == "finish" else model_runner(llm)
    original = getattr(owner, where)

    def interrupted(*args: Any) -> None:
        original(*args)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.close()
    assert [request.output().outputs[0].finish_reason for request in requests] == ["abort"] * len(requests)
    assert not hasattr(model_runner(llm), "kv_cache")
    assert_idle(llm)
    llm.close()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_stream_and_frees_everything(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(llm, monkeypatch, raise_at(3, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream("hello", GREEDY))
    assert_idle(llm)


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never ends by itself: its end of text, and what has no text, have no chance against the others."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("talkative"), max_position_embeddings=100_000)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][256:] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@contextmanager
def running(folder: Path, *arguments: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The command that generates, which does not outlive the test."""
    command = [sys.executable, "-m", "nanoengine", "generate", "--model", str(folder), "--temperature", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
def test_ctrl_c_ends_the_command_quickly_and_quietly(talkative: Path) -> None:
    def as_in_a_terminal() -> None:
        """A shell that starts pytest in the background ignores SIGINT for it and its children."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with running(talkative, "--max-tokens", "90000", "hello", preexec_fn=as_in_a_terminal) as process:
        assert process.stdout is not None
        assert process.stdout.read(5)  # it is generating
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=5)
    assert process.returncode == 130
    assert b"nanoengine: interrupted" in errors
    assert b"Traceback" not in errors


@pytest.mark.skipif(os.name != "posix", reason="pipes are those of POSIX")
def test_a_reader_that_has_enough_ends_the_command_quietly(talkative: Path) -> None:
    """As in `nanoengine generate ... | head -c 5`. A batch is printed at its end, when the reader may be gone already."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with running(talkative, "--max-tokens", "5", "hello", "world", env=buffered) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors.decode()
    assert b"Traceback" not in errors
    assert b"BrokenPipe" not in errors
