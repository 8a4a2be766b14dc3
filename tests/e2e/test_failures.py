"""Steps that raise, and requests that are aborted: what they held comes back, and the others go on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.errors import (
    StepFailed,
)
from tests.e2e.small_engine import (
    GREEDY,
    NEW,
    POISON,
    PROMPTS,
    Broken,
    assert_idle,
    generate,
    raise_at,
    raise_on_poison,
    sabotage,
)
from tests.support import fill_kv_with_nan, model_runner

# ---- a step that raises


def test_a_failed_step_ends_its_own_requests_only(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, right: list[list[int]]
) -> None:
    llm = make(max_num_seqs=1)  # each is alone in its steps
    sabotage(llm, monkeypatch, raise_on_poison)
    prompts = [PROMPTS[0], [POISON] * 16, PROMPTS[1], [3] * 15 + [POISON], PROMPTS[2]]
    with pytest.raises(StepFailed, match=r"2 of 5 requests failed.*222") as raised:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert isinstance(raised.value.__cause__, Broken)
    outputs = raised.value.outputs
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length", "error", "length"]
    assert [output.outputs[0].token_ids for output in outputs] == [right[0], [], right[1], [], right[2]]
    assert_idle(llm)


def test_a_failed_step_of_many_fails_all_that_were_in_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, right: list[list[int]]
) -> None:
    sabotage(llm, monkeypatch, raise_on_poison)
    with pytest.raises(StepFailed, match="3 of 3") as raised:
        llm.generate([PROMPTS[0], [POISON], PROMPTS[1]], GREEDY, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in raised.value.outputs] == ["error"] * 3
    assert_idle(llm)
    assert generate(llm, PROMPTS) == right


def test_a_failed_decode_keeps_the_tokens_so_far_and_spares_who_waits(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, right: list[list[int]]
) -> None:
    llm = make(max_num_seqs=2)
    sabotage(llm, monkeypatch, raise_at(3, Broken("third decode"), only="decode"))
    with pytest.raises(StepFailed, match="2 of 4 requests failed: third decode") as raised:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in raised.value.outputs]
    assert tokens == [right[0][:3], right[1][:3], right[2], right[3]]
    assert_idle(llm)


def test_a_chunk_that_fails_ends_its_request(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(max_num_batched_tokens=8)
    sabotage(llm, monkeypatch, raise_on_poison)
    with pytest.raises(StepFailed):
        llm.generate([[5] * 20 + [POISON] + [5] * 20], GREEDY, use_tqdm=False)
    assert_idle(llm)


def test_what_a_failed_step_should_have_written_is_never_served(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, right: list[list[int]]
) -> None:
    """The failed prompt begins like a good one, whose blocks it would have written."""
    with monkeypatch.context() as patch:
        sabotage(llm, patch, raise_on_poison)
        with pytest.raises(StepFailed):
            llm.generate([[*PROMPTS[0], POISON, 1, 2]], GREEDY, use_tqdm=False)
    fill_kv_with_nan(llm)
    output = llm.generate([[*PROMPTS[0], 5]], GREEDY, use_tqdm=False)[0]
    assert output.num_cached_tokens == 0
    assert generate(llm, PROMPTS) == right


def test_the_engine_is_usable_after_a_failed_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, right: list[list[int]]
) -> None:
    sabotage(llm, monkeypatch, raise_on_poison)
    for _ in range(3):
        with pytest.raises(StepFailed):
            llm.generate([POISON], GREEDY, use_tqdm=False)
        assert generate(llm, PROMPTS) == right
        assert_idle(llm)


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


def test_completions_of_one_request_may_end_in_the_same_step(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=NEW, ignore_eos=True)
    output = llm.generate("hello", params, use_tqdm=False)[0]
    assert [len(completion.token_ids) for completion in output.outputs] == [NEW] * 3
    assert_idle(llm)


def test_all_completions_of_a_failed_request_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(llm, monkeypatch, raise_at(2, Broken("second step")))
    params = SamplingParams(n=3, max_tokens=NEW, ignore_eos=True)
    with pytest.raises(StepFailed, match="1 of 1") as raised:
        llm.generate("hello", params, use_tqdm=False)
    assert raised.value.outputs[0].finished
    assert [output.finish_reason for output in raised.value.outputs[0].outputs] == ["error"] * 3
    assert_idle(llm)


def test_a_stream_whose_step_fails_says_so_after_what_it_had(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(llm, monkeypatch, raise_at(4, Broken("fourth step")))
    pieces: list[str] = []
    with pytest.raises(StepFailed, match="fourth step") as raised:
        pieces.extend(llm.stream("hello", GREEDY))
    output = raised.value.outputs[0].outputs[0]
    assert len(output.token_ids) == 3
    assert output.text == "".join(pieces)
    assert_idle(llm)


# ---- aborts


@pytest.mark.parametrize("aborted", [[0], [1], [0, 1, 2]])
def test_generate_ends_when_its_requests_are_aborted_elsewhere(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, aborted: list[int], right: list[list[int]]
) -> None:
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


def test_a_stream_that_was_never_started_leaves_nothing_queued(llm: LLM, right: list[list[int]]) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    assert_idle(llm)
    assert generate(llm, PROMPTS) == right
    stream.close()  # type: ignore[attr-defined]
    assert_idle(llm)
