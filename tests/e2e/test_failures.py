"""What callers see of steps that raise and of requests that others abort."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from nanoengine import LLM
from nanoengine.errors import StepFailed
from tests.e2e.small_engine import (
    GREEDY,
    NEW,
    POISON,
    PROMPTS,
    Act,
    Broken,
    assert_idle,
    generate,
    raise_at,
    raise_on_poison,
    sabotage,
)
from tests.support import model_runner

POISONED = [POISON] * 16
WITH_POISON = [PROMPTS[0], POISONED, PROMPTS[1], [3] * 15 + [POISON], PROMPTS[2]]


@pytest.mark.parametrize(
    ("max_num_seqs", "prompts", "act", "message", "num_tokens"),
    [
        (1, WITH_POISON, raise_on_poison, r"2 of 5 requests failed.*222", [NEW, 0, NEW, 0, NEW]),
        (8, [PROMPTS[0], POISONED, PROMPTS[1]], raise_on_poison, "3 of 3 requests failed", [0, 0, 0]),
        (2, PROMPTS, raise_at(3, Broken("third"), only="decode"), "2 of 4 requests failed: third", [3, 3, NEW, NEW]),
    ],
    ids=["each alone", "all in one step", "a decode"],
)
def test_a_failed_step_ends_its_own_requests_and_the_error_has_all_outputs(
    make: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    right: list[list[int]],
    max_num_seqs: int,
    prompts: list[list[int]],
    act: Act,
    message: str,
    num_tokens: list[int],
) -> None:
    llm = make(max_num_seqs=max_num_seqs)
    sabotage(llm, monkeypatch, act)
    with pytest.raises(StepFailed, match=message) as raised:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert isinstance(raised.value.__cause__, Broken)
    assert_idle(llm)
    outputs = raised.value.outputs
    assert [output.prompt_token_ids for output in outputs] == prompts
    for output, count in zip(outputs, num_tokens, strict=True):
        assert output.outputs[0].finish_reason == ("length" if count == NEW else "error")
        expected = right[PROMPTS.index(output.prompt_token_ids)] if output.prompt_token_ids in PROMPTS else []
        assert output.outputs[0].token_ids == expected[:count]
    assert generate(llm, PROMPTS) == right


def test_an_error_that_is_kept_does_not_keep_the_kv_pool(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = [weakref.ref(tensor) for layer in model_runner(llm).kv_cache.layers for tensor in layer]
    with monkeypatch.context() as patch:
        sabotage(llm, patch, raise_on_poison)
        with pytest.raises(StepFailed) as raised:
            llm.generate([POISON], GREEDY, use_tqdm=False)
    llm.close()
    gc.collect()
    assert isinstance(raised.value.__cause__, Broken)
    assert [tensor() for tensor in pool] == [None] * len(pool)


def test_a_stream_whose_step_fails_says_so_after_what_it_had(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(llm, monkeypatch, raise_at(4, Broken("fourth step")))
    pieces: list[str] = []
    with pytest.raises(StepFailed, match="fourth step") as raised:
        pieces.extend(llm.stream("hello", GREEDY))
    output = raised.value.outputs[0].outputs[0]
    assert len(output.token_ids) == 3
    assert output.text == "".join(pieces)
    assert_idle(llm)


@pytest.mark.parametrize("aborted", [[0], [1], [0, 1, 2]])
def test_generate_ends_when_its_requests_are_aborted_elsewhere(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, aborted: list[int], right: list[list[int]]
) -> None:
    """No step tells of it."""
    executor, calls = model_runner(llm), 0
    launch, step = executor.launch, llm.engine.step

    def counted_step() -> object:
        nonlocal calls
        calls += 1
        assert calls < 100, "it waits for requests that are gone"
        return step()

    def aborting(plan: Any) -> Any:
        if calls == 3:
            for i in aborted:
                assert llm.engine.abort(f"request-{i}")
        return launch(plan)

    monkeypatch.setattr(llm.engine, "step", counted_step)
    monkeypatch.setattr(executor, "launch", aborting)
    outputs = llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    for i, output in enumerate(outputs):
        completion = output.outputs[0]
        assert completion.finish_reason == ("abort" if i in aborted else "length")
        assert completion.token_ids == (right[i][:2] if i in aborted else right[i])
    assert_idle(llm)
