"""Searches on an engine: the beams are those of the search alone, whatever runs beside them, and whatever fails."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import pytest

from nanoengine.core.errors import InvalidPrompt, InvalidSamplingParams, StepFailed
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.outputs import RequestOutput
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Sequence
from nanoengine.features.beam_search.params import BeamSearchParams
from nanoengine.features.beam_search.search import Search, beam_search
from tests.core.toys import EOS, VOCAB, ToyModel, check, make_engine, run

from .test_beams import Tokens, likeliest, random_language, reference

LANGUAGE = random_language(1, VOCAB)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(CoreSamplingParams):
    logprobs: int | None = None


class LogprobListener(PolicyPart):
    """Log probabilities that depend on all tokens of a sequence."""

    def after_step(self, step: object, result: object, seqs: list[Sequence]) -> None:
        for seq in seqs:
            count = getattr(seq.params, "logprobs", None)
            if count is not None and seq.finish_reason != "error":
                seq.logprobs = [likeliest(LANGUAGE(tuple(seq.token_ids[:-1])), count)]


def beam_engine(**options: Any) -> LLMEngine:
    return make_engine(parts=[LogprobListener()], **options)


def expected_beams(prompt: Seq[int], params: BeamSearchParams) -> list[Tokens]:
    return [tokens for tokens, _ in reference(lambda tokens: LANGUAGE((*prompt, *tokens)), params, (EOS,))]


def beams_of(output: RequestOutput) -> list[Tokens]:
    return [tuple(completion.token_ids) for completion in output.outputs]


PARAMS = BeamSearchParams(beam_width=3, max_tokens=8)
PROMPTS = [[i] * (3 + 4 * i) for i in range(1, 8)]


@pytest.mark.parametrize("seed", range(8))
def test_the_beams_are_those_of_the_search_alone_however_the_engine_runs(seed: int) -> None:
    """Many prompts at once, beside ordinary requests: chunks, preemptions, rows for one sequence, steps in flight."""
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "num_blocks": rng.choice([15, 25, 400]),
        "max_num_seqs": rng.choice([1, 2, 100]),
        "max_num_batched_tokens": rng.choice([3, 20, 8192]),
        "policy": rng.choice(["prefill_first", "mixed"]),
        "depth": rng.choice([1, 2]),
        "enable_prefix_caching": rng.random() < 0.7,
    }
    width, ignore_eos = rng.choice([1, 2, 4]), rng.random() < 0.3
    params = BeamSearchParams(beam_width=width, max_tokens=rng.randint(1, 9), ignore_eos=ignore_eos)
    engine = beam_engine(**options)
    beside = [engine.make_request([9] * 5, CoreSamplingParams(max_tokens=30, ignore_eos=True, seed=1), "beside")]
    engine.submit(beside[0])
    outputs = beam_search(engine, PROMPTS, params, SamplingParams, after_step=lambda _: check(engine.scheduler))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert beams_of(output) == expected_beams(prompt, params)
        assert output.finished
    run(engine, [])
    alone = make_engine()
    again = [alone.make_request([9] * 5, CoreSamplingParams(max_tokens=30, ignore_eos=True, seed=1))]
    run(alone, again)
    assert beside[0].output().outputs == again[0].output().outputs
    assert engine.requests == {}


def test_the_prompt_is_computed_once_and_each_step_computes_the_last_block_of_a_beam() -> None:
    model = ToyModel(4)
    engine = beam_engine(model=model)
    beam_search(engine, [[1] * 40], BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True), SamplingParams)
    assert model.num_computed <= 40 + 3 * 5 * 4


def test_a_search_ends_where_the_longest_sequence_does() -> None:
    engine = beam_engine(max_model_len=16)
    (output,) = beam_search(engine, [[1] * 11], BeamSearchParams(beam_width=2, max_tokens=50), SamplingParams)
    assert beams_of(output) == expected_beams([1] * 11, BeamSearchParams(beam_width=2, max_tokens=5))


@pytest.mark.parametrize("failing", range(1, 12))
def test_a_failing_step_ends_the_searches_that_were_in_it_and_no_others(failing: int) -> None:
    engine = beam_engine(model=ToyModel(4, failing=[failing]), max_num_seqs=5)
    with pytest.raises(StepFailed, match="injected") as failure:
        beam_search(engine, PROMPTS, PARAMS, SamplingParams)
    outputs = failure.value.outputs
    failed = [not output.outputs for output in outputs]
    assert 1 <= sum(failed) <= 5
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert not output.outputs or beams_of(output) == expected_beams(prompt, PARAMS)
    (output,) = beam_search(engine, [[1, 2, 3]], PARAMS, SamplingParams)
    assert beams_of(output) == expected_beams([1, 2, 3], PARAMS)


def test_a_tokenizer_that_fails_ends_one_search() -> None:
    engine = beam_engine()
    decode = engine.tokenizer.decode
    victim = list(PROMPTS[2][-8:])

    def broken(token_ids: Seq[int], **options: Any) -> str:
        if list(token_ids[: len(victim)]) == victim:
            raise ValueError("no such token")
        return decode(token_ids, **options)

    engine.tokenizer.decode = broken  # type: ignore[method-assign]
    with pytest.raises(StepFailed, match="no such token") as failure:
        beam_search(engine, PROMPTS, PARAMS, SamplingParams)
    assert [bool(output.outputs) for output in failure.value.outputs] == [i != 2 for i in range(len(PROMPTS))]


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_after_an_interrupt_no_request_is_left(num_steps: int) -> None:
    engine = beam_engine(max_num_seqs=4)
    count = 0

    def interrupt(_: list[Search]) -> None:
        nonlocal count
        count += 1
        if count > num_steps:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        beam_search(engine, PROMPTS, PARAMS, SamplingParams, after_step=interrupt)
    assert engine.requests == {}
    run(engine, [])


def test_a_search_whose_requests_are_aborted_ends_with_what_it_has() -> None:
    engine = beam_engine()

    def abort(searches: list[Search]) -> None:
        if len(searches[0].requests) > 1:
            engine.abort(searches[0].requests[0].request_id)

    first, second = beam_search(engine, PROMPTS[:2], PARAMS, SamplingParams, after_step=abort)
    assert len(first.outputs) < 3
    assert beams_of(second) == expected_beams(PROMPTS[1], PARAMS)


@pytest.mark.parametrize(
    ("prompts", "params", "error", "message"),
    [
        ([[1], []], PARAMS, InvalidPrompt, "empty"),
        ([[1], [2]], BeamSearchParams(beam_width=51), InvalidSamplingParams, "beam_width is 51.*102 candidates.*100"),
        ([[1]], None, InvalidSamplingParams, "BeamSearchParams"),
        ([[1]], CoreSamplingParams(), InvalidSamplingParams, "BeamSearchParams"),
    ],
)
def test_if_anything_is_bad_nothing_runs(prompts: Any, params: Any, error: type[Exception], message: str) -> None:
    engine = beam_engine()
    with pytest.raises(error, match=message):
        beam_search(engine, prompts, params, SamplingParams)
    assert not engine.has_unfinished
    assert engine.executor.num_launched == 0
