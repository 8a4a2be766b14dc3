"""A request can hurt only itself: what it asks for is refused at the door, or works, or fails alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM, RequestOutput, SamplingParams
from nanoengine.core.messages import StepPlan
from nanoengine.errors import InvalidSamplingParams, NotFiniteLogits, StepFailed
from nanoengine.sampling.token_logprobs import TokenLogprobs
from tests.e2e.late import late_device
from tests.e2e.small_engine import GREEDY, POISON, assert_idle, open_llm
from tests.support import fill_kv_with_nan, model_runner

PROMPT = [(7 * i + 3) % 200 for i in range(40)]
WITNESS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=20)


def witness(llm: LLM) -> tuple[list[TokenLogprobs] | None, int]:
    """What the engine says behind a prompt, and how much of that it had cached."""
    (output,) = llm.generate([PROMPT], WITNESS, use_tqdm=False)
    assert_idle(llm)
    return output.outputs[0].logprobs, output.num_cached_tokens


@pytest.fixture(params=["two steps", "two late steps"])
def llm(tiny: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with ExitStack() as stack:
        if request.param == "two late steps":
            stack.enter_context(late_device())
        llm = stack.enter_context(open_llm(tiny, async_scheduling=True, block_size=4, kernels="torch"))
        fill_kv_with_nan(llm)
        yield llm


@pytest.mark.parametrize("where", ["rows", "sampler"])
def test_requests_that_raise_while_they_are_launched_leave_what_is_cached_to_the_bit(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Eight of them, each with a step in flight behind the one that raises. That must not write by a table that never came."""
    witness(llm)
    before = witness(llm)
    assert before[1] == 36
    runner = model_runner(llm)
    owner = {"rows": runner.rows, "sampler": runner.sampler}[where]
    original = owner.apply

    def overflowing(plan: StepPlan) -> None:
        if any(POISON in row.token_ids for row in plan.started):
            raise OverflowError("Python int too large to convert to C long")
        original(plan)

    for i in range(8):
        with monkeypatch.context() as patch:
            patch.setattr(owner, "apply", overflowing)
            with pytest.raises(StepFailed, match="too large"):
                llm.generate([[POISON, i, *range(29 + i % 4)]], GREEDY, use_tqdm=False)
        assert_idle(llm)
        assert witness(llm) == before


def test_a_prefix_from_which_nan_came_is_not_found_again_whoever_had_computed_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness(llm)
    before = witness(llm)
    model = model_runner(llm).model
    compute_logits = model.compute_logits
    with monkeypatch.context() as patch:
        patch.setattr(model, "compute_logits", lambda hidden: torch.full_like(compute_logits(hidden), torch.nan))
        with pytest.raises(StepFailed) as raised:
            llm.generate([[*PROMPT[:20], 5]], GREEDY, use_tqdm=False)
        assert isinstance(raised.value.__cause__, NotFiniteLogits)
        assert raised.value.outputs[0].num_cached_tokens == 20
    assert witness(llm)[1] == 0
    logprobs, num_cached = witness(llm)
    assert num_cached == 36
    assert before[0] is not None
    assert logprobs is not None
    for entries, expected in zip(logprobs, before[0], strict=True):
        assert entries.keys() == expected.keys()


HUGE: list[Any] = [2**31, 2**32 + 5, 2**63, 2**64, 10**400]
NO_NUMBERS: list[Any] = [float("nan"), float("inf"), -float("inf"), 1e308, 10**400, "1", True]
NO_INTEGERS: list[Any] = [True, 1.5, "1", []]
REFUSED: list[dict[str, Any]] = [
    *({field: value} for field in ("top_k", "max_tokens", "min_tokens", "n", "best_of") for value in HUGE),
    *({field: value} for field in ("logprobs", "prompt_logprobs") for value in (21, *HUGE)),
    *({field: [5, value]} for field in ("stop_token_ids", "allowed_token_ids") for value in (300, *HUGE)),
    *({"logit_bias": {value: 1.0}} for value in (300, *HUGE)),
    *({"seed": value} for value in (2**64, -(2**63) - 1, 10**400)),
    *({field: value} for field in ("top_k", "min_tokens", "n", "logprobs", "seed") for value in NO_INTEGERS),
    *(
        {field: value}
        for field in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        for value in NO_NUMBERS
    ),
    *({"logit_bias": {5: value}} for value in (float("nan"), float("inf"), 1e308)),
    {"repetition_penalty": 0.0},
    {"repetition_penalty": 1e-300},
    {"logit_bias": {-1: 1.0}},
    {"logit_bias": dict.fromkeys(range(100_000), 1.0)},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [7], "min_tokens": 2, "stop_token_ids": [7]},
    {"bad_words": [chr(i) for i in range(256, 10_000)]},
    {"bad_words": ["x" * 100_000]},
    {"bad_words": ["\ud800"]},
    {"bad_words": [""]},
    {"stop": [""]},
    {"min_tokens": 64},
    {"min_tokens": 10, "max_tokens": 9},
]


@pytest.fixture(scope="module")
def open_door(tiny: Path) -> Iterator[LLM]:
    with open_llm(tiny, async_scheduling=True) as llm:
        witness(llm)
        yield llm


@pytest.mark.parametrize("asked", REFUSED, ids=lambda asked: str(asked)[:60])
def test_what_no_layer_could_hold_is_refused_at_the_door(open_door: LLM, asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidSamplingParams, match=next(iter(asked))):
        open_door.generate([[1, 2, 3]], SamplingParams(**asked), use_tqdm=False)
    assert not open_door.engine.has_unfinished


EXTREME: list[dict[str, Any]] = [
    {"top_k": 2**31 - 1},
    {"top_k": 1},
    {"seed": 2**64 - 1},
    {"seed": -(2**63)},
    {"temperature": 100.0},
    {"temperature": 1e-300},
    {"top_p": 1e-300},
    {"min_p": 1.0},
    {"max_tokens": 2**31 - 1},
    {"min_tokens": 60, "max_tokens": None},
    {"presence_penalty": 2.0, "frequency_penalty": -2.0, "repetition_penalty": 2.0},
    {"repetition_penalty": 0.01},
    {"logit_bias": {i: 100.0 * (-1) ** i for i in range(300)}},
    {"allowed_token_ids": [299]},
    {"allowed_token_ids": range(300)},
    {"stop_token_ids": range(300)},
    {"logprobs": 20, "prompt_logprobs": 20},
    {"bad_words": [chr(i) for i in range(97, 123)]},
    {"n": 7, "best_of": 9},
]


def test_the_most_and_the_least_that_pass_the_door_work_side_by_side(open_door: LLM) -> None:
    before = witness(open_door)
    assert before[1] == 32
    common = {"temperature": 0.9, "max_tokens": 4, "ignore_eos": True}
    params = [SamplingParams(**{"seed": i} | common | asked) for i, asked in enumerate(EXTREME)]
    prompts = [[i, 5, 9, POISON] for i in range(len(params))]
    together = open_door.generate(prompts, params, use_tqdm=False)
    for prompt, own, output in zip(prompts, params, together, strict=True):
        (alone,) = open_door.generate([prompt], own, use_tqdm=False)
        assert tokens(alone) == tokens(output)
        for completion in output.outputs:
            most = 60 if own.max_tokens is None or own.max_tokens > 60 else own.max_tokens
            assert len(completion.token_ids) == (1 if len(own.stop_token_ids) == 300 else most)
            assert all(0 <= token < 300 for token in completion.token_ids)
    assert witness(open_door) == before


def tokens(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def test_a_witness_notices_a_change_of_its_kv(llm: LLM) -> None:
    """The inverse: without it, all of the above could pass by not looking."""
    witness(llm)
    before = witness(llm)
    for layer in model_runner(llm).kv_cache.layers:
        layer[1].mul_(1.001)
    assert witness(llm) != before
