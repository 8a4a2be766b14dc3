"""The composition root: what reaches which part."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine import LLM
from nanoengine.builder import build_engine, read_config
from nanoengine.core.model_runner import ModelRunner
from nanoengine.errors import InvalidConfig
from nanoengine.features.speculation.drafter import Drafter
from nanoengine.models import placement


def test_what_is_asked_for_reaches_the_parts() -> None:
    options: dict[str, Any] = {
        "device": "cpu",
        "max_num_seqs": 5,
        "num_kv_blocks": 20,
        "block_size": 32,
        "max_model_len": 64,
        "max_num_batched_tokens": 100,
        "long_prefill_token_threshold": 7,
        "scheduling_policy": "mixed",
        "enable_prefix_caching": False,
        "async_scheduling": True,
    }
    built = build_engine(read_config("demo", options), use_tqdm=False)
    engine, scheduler, runner = built.engine, built.engine.scheduler, built.engine.executor
    assert isinstance(runner, ModelRunner)
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_chunk) == (5, 100, 7)
    assert scheduler.policy == "mixed"
    assert (scheduler.blocks.num_blocks, scheduler.blocks.block_size) == (20, runner.block_size) == (20, 32)
    assert not scheduler.blocks.enable_prefix_caching
    assert (engine.depth, engine.max_model_len) == (2, 64)
    assert engine.vocab_size == built.models.model_config.vocab_size == 4096
    assert engine.eos_token_ids == (0,)
    assert runner.rows.padding_row == 5
    engine.close()


def test_nothing_is_added_unless_it_is_asked_for() -> None:
    engine = build_engine(read_config("demo", {"num_kv_blocks": 20, "max_model_len": 64}), use_tqdm=False).engine
    assert all(part.is_idle for part in engine.scheduler.parts if isinstance(part, Drafter))
    assert isinstance(engine.executor, ModelRunner)
    metrics = LLM("demo", num_kv_blocks=20, max_model_len=64, use_tqdm=False).metrics
    assert (metrics.offload, metrics.speculation) == (None, None)


def test_weights_that_ram_has_no_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "available_ram", lambda: 1 << 20)
    with pytest.raises(InvalidConfig, match=r"the weights take [\d.]+ MiB, but 1 MiB of RAM"):
        LLM("demo", device="cpu", dtype="float32", use_tqdm=False)
