"""Policy, copies and files together, over one folder; in all ways of running: tests/e2e/one_number.py."""

from __future__ import annotations

import random
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.core.errors import InvalidConfig
from nanoengine.features.kv_offload.file_thread import FileThread
from nanoengine.features.kv_offload.kv_folder import KVFolder
from nanoengine.kernels.native import operations as native_kernels
from nanoengine.kernels.native.c_functions import c_functions
from tests.e2e.small_engine import open_llm


def open_engine(model: Path, **options: Any) -> LLM:
    return open_llm(model, **{"num_kv_blocks": 16, "block_size": 4, "max_model_len": 60} | options)


def run(llm: LLM) -> list[list[int]]:
    """Answers to prompts that share beginnings."""
    rng = random.Random(0)
    shared = [rng.randrange(250) for _ in range(20)]
    lens = [(rng.choice([0, 8, 13, 20]), rng.randint(1, 20)) for _ in range(12)]
    prompts = [shared[:first] + [rng.randrange(250) for _ in range(rest)] for first, rest in lens]
    params = [SamplingParams(n=1 + i % 2, seed=i, max_tokens=rng.randint(1, 20), ignore_eos=True) for i in range(12)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [own.token_ids for output in outputs for own in output.outputs]


def test_the_engine_survives_a_disk_that_is_dead(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a network file system whose server is gone: no call of it returns. What is in files is computed again."""
    with open_engine(tiny, kv_disk_path=str(tmp_path)) as llm:
        expected = run(llm)
    returns, num_calls = threading.Event(), 0

    def never(*_: object) -> list[str]:
        nonlocal num_calls
        num_calls += 1
        returns.wait()
        return []

    monkeypatch.setattr("nanoengine.features.kv_offload.capability.FileThread", partial(FileThread, limit=0.2))
    for name in ("read", "write", "delete", "clear"):
        monkeypatch.setattr(KVFolder, name, never)
    llm = open_engine(tiny, kv_disk_path=str(tmp_path))
    assert run(llm) == expected
    assert run(llm) == expected, "and goes on"
    llm.close()
    assert num_calls == 1, "nobody waits for it a second time"
    assert "does not answer" in caplog.text
    returns.set()


@pytest.mark.parametrize("path", ["/dev/null", "/proc/none", "a\0b"])
def test_a_path_that_cannot_be_used_is_named(tiny: Path, path: str) -> None:
    with pytest.raises(InvalidConfig, match="kv_disk_path is"):
        open_engine(tiny, kv_disk_path=path)


def test_a_process_without_amx_tiles_does_not_find_what_one_with_them_has_kept(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux may refuse them to a process, whose K/V then has other bits, from the same machine code."""
    for tiles, found in ((1, False), (0, False), (1, True)):
        c = SimpleNamespace(**vars(c_functions()) | {"uses_tiles": lambda tiles=tiles: tiles})
        monkeypatch.setattr(native_kernels, "c_functions", lambda c=c: c)
        with open_engine(tiny, kernels="native", block_size=16, kv_disk_path=str(tmp_path)) as llm:
            [output] = llm.generate([list(range(40))], SamplingParams(max_tokens=1), use_tqdm=False)
            assert (output.num_cached_tokens > 0) == found


def test_without_prefix_caching_nothing_could_be_found(tiny: Path) -> None:
    open_engine(tiny, enable_prefix_caching=False).close()
    with pytest.raises(InvalidConfig, match="enable_prefix_caching is False"):
        open_engine(tiny, enable_prefix_caching=False, preemption_mode="swap")
