"""States of real hybrids in host memory and files: found there after the pool has lost them, and after a restart, to the bit."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM
from nanoengine.features.kv_offload.offload import Offload
from tests.e2e.small_engine import submit
from tests.features.kv_groups.states import ask, snapshots_of
from tests.models.families import engine, family_checkpoint

SIZES: dict[str, Any] = {"max_model_len": 400, "block_size": 16, "num_kv_blocks": 60}


def offload_of(llm: LLM) -> Offload:
    offload = llm.built.capabilities["kv_offload"].offload
    assert isinstance(offload, Offload)
    return offload


def prompts_of(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(250) for _ in range(100 + number)] for number in range(count)]


def test_states_come_back_from_host_memory_and_from_files(tmp_path: Path) -> None:
    """Of one family; of the others: tests/e2e/one_number.py."""
    folder, prompts = family_checkpoint(tmp_path, "Qwen3.5"), prompts_of(6)
    with engine(folder, **SIZES) as llm:
        right = [ask(llm, prompt)[1] for prompt in prompts]
        slot_bytes = llm.built.capabilities["kv_groups"]._slot_bytes
    few = SIZES | {"num_kv_blocks": 26, "snapshot_memory": 2 * slot_bytes}
    with engine(folder, **few, kv_host_memory=1 << 24) as llm:
        for again in range(2):
            for prompt, expected in zip(prompts, right, strict=True):
                assert ask(llm, prompt) == (96 * again, expected)
        assert snapshots_of(llm).num_slots == 2
        assert snapshots_of(llm).num_loaded == 6, "the pool has lost all of them"
        assert offload_of(llm).stats.num_saved_blocks > 0
    for again in range(2):
        with engine(folder, **few, kv_disk_path=str(tmp_path / "kv")) as llm:
            for prompt, expected in zip(prompts, right, strict=True):
                assert ask(llm, prompt) == (96 * again, expected)
            assert snapshots_of(llm).num_loaded == 6 * again
            assert not offload_of(llm).stats.num_bad_files
    with engine(folder, **few | {"snapshot_memory": 0}, kv_disk_path=str(tmp_path / "kv")) as llm:
        assert ask(llm, prompts[0]) == (96, right[0]), "a row needs no snapshot in the pool"
    with engine(folder, **few | {"dtype": "bfloat16"}, kv_disk_path=str(tmp_path / "kv")) as llm:
        assert ask(llm, prompts[0])[0] == 0, "those of another dtype are not found"


def test_files_of_states_that_are_damaged_or_gone_are_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is left of a text goes as far as its last state that is whole."""
    folder, [prompt, other] = family_checkpoint(tmp_path, "Qwen3.5"), prompts_of(2)
    options = SIZES | {"kv_disk_path": str(tmp_path / "kv")}
    with engine(folder, **options) as llm:
        expected = ask(llm, prompt)[1]
        assert ask(llm, prompt[:70] + other)[0] == 0, "and it leaves the state behind 64, where the two part"
        count = len(offload_of(llm).state_groups)
        sequence = submit(llm, prompt).sequences[0]
        hashes = [hash.hex() for hash, _ in llm.engine.scheduler.blocks.hit_hashes(sequence)]
        llm.engine.abort(sequence.request.request_id)
    assert count > 1
    [own] = (path.parent for path in (tmp_path / "kv").rglob("hash_seed"))
    states = {end: own / f"{hashes[end // 16 - 1]}-{count}.kv" for end in (32, 64, 96)}  # the last piece of each
    assert [path.exists() for path in states.values()] == [False, True, True]
    whole = {path: path.read_bytes() for path in own.glob("*.kv")}

    flipped = whole[states[96]][:-20] + bytes([whole[states[96]][-20] ^ 1]) + whole[states[96]][-19:]
    foreign = whole[own / f"{hashes[0]}-0.kv"]
    for content, words in ((flipped, "its checksum is wrong"), (foreign, "it holds other tokens"), (None, "")):
        for path, sound in whole.items():
            path.write_bytes(sound)
        states[96].unlink()
        if content is not None:
            states[96].write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "nanoengine"), engine(folder, **options) as llm:
            assert ask(llm, prompt) == (64, expected), "K/V of 96 tokens are there, and a state behind 64"
        assert words in caplog.text
