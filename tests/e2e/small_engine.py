"""A small engine to make mistakes with, and ways to sabotage it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.core.attention import AttentionMetadata
from nanoengine.core.sequence import Request
from tests.core.toys import check
from tests.support import model_runner

VOCAB_SIZE = 300
MAX_LEN = 64
POISON = 222  # a prompt with it makes the model raise, in the tests that say so
NEW = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
PROMPTS = [[(37 * i + 11 * j) % 200 for j in range(16)] for i in range(4)]


Kind = Literal["prefill", "decode", "mixed"]
Act = Callable[[torch.Tensor, Kind], None]
"""Called with the token ids and the kind of a step."""


class Broken(Exception):
    """What the sabotaged model raises."""


def open_llm(folder: Path, **options: Any) -> LLM:
    defaults = {"max_model_len": MAX_LEN, "num_kv_blocks": 40, "dtype": "float32", "device": "cpu"}
    return LLM(str(folder), use_tqdm=False, **defaults | options)


def submit(llm: LLM, prompt: str | list[int], params: SamplingParams | None = None, **place: Any) -> Request:
    """Queue a request; who calls this steps the engine."""
    request = llm.engine.make_request(prompt, params, **place)
    llm.engine.submit(request)
    return request


def step(llm: LLM, count: int = 1) -> None:
    for _ in range(count):
        llm.engine.step()
        check(llm.engine.scheduler)


def finish(llm: LLM) -> None:
    """Step until nothing is left."""
    while llm.engine.has_unfinished:
        step(llm)
    assert_idle(llm)


def generate(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def assert_idle(llm: LLM) -> None:
    """Nothing runs, waits or is in flight, and every block is back."""
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_unfinished
    assert not llm.engine.requests
    assert not scheduler.in_flight
    check(scheduler)
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks


def kind_of(metadata: AttentionMetadata) -> Kind:
    num_runs = len(metadata.query_lens_list)
    return "prefill" if not metadata.num_decodes else "decode" if metadata.num_decodes == num_runs else "mixed"


def sabotage(llm: LLM, monkeypatch: pytest.MonkeyPatch, act: Act) -> None:
    """Call `act` before the model computes a step."""
    model = model_runner(llm).model
    forward = model.forward

    def sabotaged(input_ids: torch.Tensor, positions: torch.Tensor, metadata: list[AttentionMetadata]) -> torch.Tensor:
        act(input_ids, kind_of(metadata[0]))
        return forward(input_ids, positions, metadata)

    monkeypatch.setattr(model, "forward", sabotaged)


def raise_on_poison(input_ids: torch.Tensor, kind: Kind) -> None:
    if POISON in input_ids.tolist():
        raise Broken(f"{POISON} is in the {kind}")


def raise_at(call: int, error: BaseException, only: Kind | None = None) -> Act:
    """Raise at the n-th step (of one kind), once."""
    calls = 0

    def act(input_ids: torch.Tensor, kind: Kind) -> None:  # noqa: ARG001
        nonlocal calls
        calls += only in (None, kind)
        if calls == call and only in (None, kind):
            raise error

    return act
