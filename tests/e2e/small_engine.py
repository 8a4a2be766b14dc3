"""A small engine to make mistakes with, and ways to sabotage it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.engine.messages import Phase
from tests.support import model_runner

VOCAB_SIZE = 300
MAX_LEN = 64
POISON = 222  # a prompt with it makes the model raise, in the tests that say so
NEW = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
PROMPTS = [[(37 * i + 11 * j) % 200 for j in range(16)] for i in range(4)]


class Broken(Exception):
    """What the sabotaged model raises."""


def open_llm(folder: Path, **options: Any) -> LLM:
    defaults = {"max_model_len": MAX_LEN, "num_kv_blocks": 40, "dtype": "float32", "device": "cpu"}
    return LLM(str(folder), use_tqdm=False, **defaults | options)


def generate(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def assert_idle(llm: LLM) -> None:
    """Nothing runs or waits, and every block is back."""
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_unfinished
    scheduler.check()
    assert scheduler.block_manager.pool.num_free == scheduler.block_manager.pool.num_blocks


def sabotage(llm: LLM, monkeypatch: pytest.MonkeyPatch, act: Callable[[torch.Tensor, Phase], None]) -> None:
    """Call `act` with the token ids and the phase of every step before the model computes it."""
    model = model_runner(llm).model
    forward = model.forward

    def sabotaged(input_ids: torch.Tensor, positions: torch.Tensor, metadata: Any) -> torch.Tensor:
        act(input_ids, metadata.phase)
        return forward(input_ids, positions, metadata)

    monkeypatch.setattr(model, "forward", sabotaged)


def raise_on_poison(input_ids: torch.Tensor, phase: Phase) -> None:
    if POISON in input_ids.tolist():
        raise Broken(f"{POISON} is in the {phase.value}")


def raise_at(call: int, error: BaseException, only: Phase | None = None) -> Callable[[torch.Tensor, Phase], None]:
    """Raise at the n-th step (of one phase), once."""
    calls = 0

    def act(input_ids: torch.Tensor, phase: Phase) -> None:  # noqa: ARG001
        nonlocal calls
        calls += only in (None, phase)
        if calls == call and only in (None, phase):
            raise error

    return act
