"""The capability in the core's engine: answers are those of a slow loop over one sequence, however they are scheduled."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from nanoengine.core.errors import NotFiniteLogits, NoTokenLeft
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.messages import StepResult
from nanoengine.core.sampling_params import CoreSamplingParams, ModelFacts
from nanoengine.core.sequence import Request
from nanoengine.features.sampling.collector import MAX_PROMPT_LOGPROBS
from nanoengine.features.sampling.params import SamplingParams
from tests.core.lives import check_lives, draw_requests
from tests.core.toys import VOCAB, ToyTokenizer, run
from tests.features.sampling.toy_engine import SampledToy, adapter_digest, alone, logits_of, make
from tests.features.speculation.toys import Drafted, ToyDrafter


def draw_params(rng: random.Random, number: int) -> SamplingParams:
    wishes: dict[str, Any] = {
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "repetition_penalty": lambda: rng.uniform(0.1, 2),
        "logit_bias": lambda: {rng.randrange(VOCAB): rng.uniform(-9, 9) for _ in range(4)},
        "allowed_token_ids": lambda: rng.sample(range(VOCAB), 25),
        "min_tokens": lambda: rng.randint(1, 4),
        "logprobs": lambda: rng.randint(0, 5),
        "prompt_logprobs": lambda: rng.randint(0, 3),
        "n": lambda: rng.randint(2, 3),
        "top_k": lambda: rng.randint(2, 9),
        "stop_token_ids": lambda: rng.sample(range(VOCAB), 3),
    }
    found = {name: wishes[name]() for name in rng.sample(sorted(wishes), rng.randint(0, 6))}
    if number % 3 == 0:  # of few tokens come counts above one
        found |= {"allowed_token_ids": rng.sample(range(VOCAB), 3)}
    temperature, max_tokens = rng.choice([0, 0.7, 2.0]), rng.randint(4, 20)
    return SamplingParams(temperature=temperature, seed=number, max_tokens=max_tokens, **found)


class Sampled(Drafted):
    """Params of all kinds, and log probabilities, which are told with the tokens."""

    rare = ("preemptions", "cached", "failed", "aborted", "accepted", "rejected")

    def plain_engine(self) -> LLMEngine:
        return make()

    def engine(self, way: dict[str, Any], failing: list[int]) -> LLMEngine:
        return make(SampledToy(4, failing=failing), self.parts(), **way)

    def requests(self, engine: LLMEngine) -> list[Request]:
        return draw_requests(engine, self.seed, draw_params)

    def answers(self, requests: list[Request]) -> list[Any]:
        return [
            (own.token_ids, own.finish_reason, own.logprobs, own.cumulative_logprob)
            for request in requests
            for own in request.output().outputs
        ]

    def after_round(self, engine: LLMEngine, requests: list[Request]) -> None:
        for seq in [seq for request in requests for seq in request.sequences if seq.logprobs is not None]:
            assert len(seq.logprobs) == len(seq.output_token_ids)
        for own, plain in zip(requests, self.plain, strict=True):
            if not {"error", "abort"} & {seq.finish_reason for seq in own.sequences}:
                assert own.output().prompt_logprobs == plain.output().prompt_logprobs


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_of_a_slow_loop_in_every_way_of_running(seed: int) -> None:
    plug = Sampled(seed)
    check_lives(plug, 12)
    for seq in [seq for request in plug.plain for seq in request.sequences]:
        tokens, logprobs = alone(seq)
        assert seq.output_token_ids == tokens
        if seq.logprobs is not None:
            assert [list(entry) for entry in seq.logprobs] == [list(entry) for entry in logprobs]
            for entry, expected in zip(seq.logprobs, logprobs, strict=True):
                assert [own.rank for own in entry.values()] == [rank for _, rank in expected.values()]
                assert [own.logprob for own in entry.values()] == pytest.approx([own for own, _ in expected.values()])
    for request in plug.plain:
        check_prompt_logprobs(request)


def check_prompt_logprobs(request: Request) -> None:
    params, prompt, found = request.params, request.prompt_token_ids, request.output().prompt_logprobs
    assert isinstance(params, SamplingParams)
    if params.prompt_logprobs is None:
        assert found is None
        return
    assert found is not None
    assert found[0] is None
    assert len(found) == len(prompt)
    for position in range(1, len(prompt)):
        expected = logits_of(torch.tensor([adapter_digest(prompt[:position])]))[0].log_softmax(-1)
        token, entry = prompt[position], found[position]
        top = expected.topk(params.prompt_logprobs).indices.tolist()
        assert list(entry) == list(dict.fromkeys([token, *top]))
        assert [own.logprob for own in entry.values()] == pytest.approx([float(expected[own]) for own in entry])


def test_a_step_tells_of_a_bounded_number_of_tokens_of_prompts() -> None:
    """Each takes about as long as all layers of a small model: who comes meanwhile waits for the step."""
    engine = make(max_model_len=4 * MAX_PROMPT_LOGPROBS, num_blocks=400)
    told: list[int] = []
    launch = engine.executor.launch

    def counted(plan: Any) -> Any:
        told.append(sum(count for _, count, _ in plan.extras.get("prompt_logprobs", ())))
        return launch(plan)

    engine.executor.launch = counted  # type: ignore[method-assign]
    prompts = [[(i * i + j) % VOCAB for i in range(2 * MAX_PROMPT_LOGPROBS)] for j in range(3)]
    requests = [engine.make_request(own, SamplingParams(prompt_logprobs=1, max_tokens=1)) for own in prompts]
    run(engine, requests)
    assert max(told) <= MAX_PROMPT_LOGPROBS
    assert sum(told) == 3 * (2 * MAX_PROMPT_LOGPROBS - 1)


def test_prompt_logprobs_are_computed_once_and_other_completions_read_the_cache() -> None:
    model = SampledToy(4)
    engine = make(model)
    prompt = [(3 * i) % VOCAB for i in range(32)]
    run(engine, [engine.make_request(prompt, SamplingParams(max_tokens=1))])
    asked = [0]
    after_forward = model.part.after_forward

    def watched(plan: Any, *rest: Any) -> Any:
        asked[0] += sum(count for _, count, _ in plan.extras.get("prompt_logprobs", ()))
        return after_forward(plan, *rest)

    model.part.after_forward = watched  # type: ignore[method-assign]
    request = engine.make_request(prompt, SamplingParams(n=3, prompt_logprobs=1, max_tokens=3, ignore_eos=True))
    engine.submit(request)
    engine.step()
    while engine.scheduler.running:
        engine.scheduler._preempt_last()
    assert request.sequences[0].reads_cache, "its log probabilities are there"
    assert engine.scheduler.blocks.reset(), "all that it had is computed again"
    run(engine, [])
    check_prompt_logprobs(request)
    assert asked == [31]
    assert [seq.num_cached_tokens for seq in request.sequences] == [0, 28, 28]


def test_what_a_dropped_step_says_of_a_prompt_counts_for_nothing() -> None:
    """It was computed behind a step that has failed."""
    engine = make()
    engine.submit(request := engine.make_request([1, 2, 3], SamplingParams(prompt_logprobs=1)))
    step = engine.scheduler.schedule()
    assert step is not None
    result = StepResult([], extras={"prompt_logprobs": [(0, ["garbage"] * 2)]})
    for step.is_dropped, found in ((True, [None] * 3), (False, [None, "garbage", "garbage"])):
        engine.scheduler.parts[0].after_step(step, result, [])
        assert request.prompt_logprobs == found


def test_a_stop_string_ends_the_log_probabilities_too() -> None:
    engine = make()
    first = engine.make_request([1], SamplingParams(seed=1, max_tokens=9, ignore_eos=True))
    run(engine, [first])
    text = first.output().outputs[0].text
    truth = {1: first.sequences[0].token_ids}
    engine = make(parts=[ToyDrafter(truth | {0: truth[1]}, random.Random(1))])
    params = SamplingParams(seed=1, max_tokens=9, ignore_eos=True, stop=text[4], logprobs=0)
    request = engine.make_request([1], params)
    run(engine, [request])
    [output] = request.output().outputs
    end = text.index(text[4])
    assert (output.text, output.token_ids) == (text[:end], truth[1][1 : end + 2])
    assert output.logprobs is not None
    assert [next(iter(entry)) for entry in output.logprobs] == output.token_ids
    assert output.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True))
    )


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_stop_wins_over_the_length_and_is_shown_if_that_is_wanted(is_shown: bool) -> None:
    """No string ends a text before min_tokens. Params of the core are sampled like others."""
    engine = make()
    wishes: dict[str, Any] = {"seed": 1, "ignore_eos": True, "include_stop_str_in_output": is_shown}
    run(engine, [first := engine.make_request([1], CoreSamplingParams(seed=1, max_tokens=9, ignore_eos=True))])
    text, tokens = first.output().outputs[0].text, first.output().outputs[0].token_ids
    assert first.output().outputs[0].logprobs is None
    place = next(place for place in range(4, 9) if text[place] not in text[:place])
    for stop in ({"stop": [text[1], text[place]], "min_tokens": 4}, {"stop_token_ids": [tokens[place]]}):
        params = SamplingParams(max_tokens=place + 1, **wishes, **stop)
        run(engine, [request := engine.make_request([1], params)])
        own = request.output().outputs[0]
        assert own.token_ids == tokens[: place + 1]
        assert own.text == text[: place + is_shown]
        assert own.finish_reason == "stop"
        assert own.stop_reason == (text[place] if "stop" in stop else tokens[place])


# ---- rows without a token


class Forbidding(SamplingParams):
    """Nothing is left to sample, and nobody has checked it, as where a grammar and other rules leave nothing."""

    def for_model(self, model: ModelFacts) -> SamplingParams:
        return self


def forbidding(**more: Any) -> SamplingParams:
    return Forbidding(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=3, temperature=0, **more)


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_forbids_everything_costs_nobody_else_anything(policy: str, depth: int) -> None:
    engine = make(policy=policy, depth=depth)
    shared = [(7 * i) % VOCAB for i in range(24)]
    run(engine, [engine.make_request(shared, SamplingParams(max_tokens=1))])
    hostile = engine.make_request([*shared, 1], forbidding(max_tokens=9))
    neighbour = engine.make_request([*shared, 2], SamplingParams(max_tokens=9, ignore_eos=True))
    run(engine, [hostile, neighbour])
    assert isinstance(hostile.error, NoTokenLeft)
    assert hostile.output().outputs[0].token_ids == []
    assert neighbour.error is None
    again = engine.make_request([*shared, 3], SamplingParams(max_tokens=1))
    longer = engine.make_request(neighbour.sequences[0].token_ids, SamplingParams(max_tokens=1))
    run(engine, [again, longer])
    assert again.output().num_cached_tokens == 24
    assert longer.output().num_cached_tokens == 32, "the neighbour's own blocks can be found"
    for request in (engine.make_request([*shared, 1], forbidding()), last := engine.make_request([*shared, 4])):
        run(engine, [request])
    assert last.output().num_cached_tokens == 24, "though no neighbour has computed it again"


class HalfCharacters(ToyTokenizer):
    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        pieces = [[b"\xe2", b"\x82\xac", b"a", b" b", b"\xc3\xa9", b""][token * token % 6] for token in token_ids]
        return b"".join(pieces).decode(errors="replace")


@pytest.mark.parametrize("seed", range(4))
def test_a_text_is_the_same_whenever_it_is_read(seed: int) -> None:
    """One engine is asked for all texts behind each step, the other for few; stops, ends and aborts come in between."""
    rng, depth = random.Random(seed), 1 + seed % 2
    engines = [make(depth=depth, num_blocks=200, max_model_len=200) for _ in range(2)]
    common: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "n": rng.randint(1, 2)}
    wishes: list[dict[str, Any]] = [
        {"max_tokens": rng.randint(1, 120), "allowed_token_ids": rng.sample(range(1, VOCAB), 30)} for _ in range(6)
    ]
    wishes[0] |= {"stop": ["a€"], "min_tokens": 5}
    wishes[1] |= {"stop_token_ids": wishes[1]["allowed_token_ids"][:1], "include_stop_str_in_output": True}
    wishes[2] |= {"stop_token_ids": wishes[2]["allowed_token_ids"][:1]}
    for engine in engines:
        engine.tokenizer = HalfCharacters()
    pairs = [
        [engine.make_request([1, number], SamplingParams(seed=number, **common, **wish)) for engine in engines]
        for number, wish in enumerate(wishes)
    ]
    for pair in pairs:
        for engine, request in zip(engines, pair, strict=True):
            engine.submit(request)
    num_late = 0
    while any(engine.has_unfinished for engine in engines):
        for engine in engines:
            engine.step()
        for read, late in pairs:
            expected = read.output().outputs
            num_late += any(own.detokenizer.num_tokens < len(own.token_ids) for own in late.sequences)
            if rng.random() < 0.02 or late.finished:
                assert late.output().outputs == expected
        if rng.random() < 0.01:
            number = rng.randrange(6)
            assert len({engine.abort(f"request-{number}") for engine in engines}) == 1
    assert num_late > 20
    assert {seq.finish_reason for pair in pairs for request in pair for seq in request.sequences} >= {"stop", "length"}


def test_each_failing_request_is_told_its_own_reason() -> None:
    model = SampledToy(4, broken=[(9, 0)])
    engine = make(model)
    broken = engine.make_request([9, 1], SamplingParams(allowed_token_ids=[5, 6]))
    hostile = engine.make_request([8, 1], forbidding())
    other = engine.make_request([8, 2], forbidding())
    run(engine, [broken, hostile, other])
    assert isinstance(broken.error, NotFiniteLogits)
    assert isinstance(hostile.error, NoTokenLeft)
    assert isinstance(other.error, NoTokenLeft)
    assert hostile.error is not other.error


def test_best_of_ranks_a_completion_that_failed_behind_those_that_did_not() -> None:
    """Its log probability is 0 if it failed without a token, and no other's is above."""
    engine = make()
    params = SamplingParams(n=2, best_of=4, seed=3, max_tokens=5, ignore_eos=True)
    request = engine.make_request([1, 2], params)
    engine.submit(request)
    engine.scheduler.finish(request.sequences[0], "error")
    engine._make_text(request.sequences[0])
    run(engine, [])
    assert request.sequences[0].finish_reason == "error"
    outputs = request.output().outputs
    assert [output.index for output in outputs] == [0, 1]
    assert [output.finish_reason for output in outputs] == ["length", "length"]
    scores = [output.cumulative_logprob or 0.0 for output in outputs]
    lengths = [
        sum(e[t].logprob for e, t in zip(s.logprobs or [], s.output_token_ids, strict=True))
        for s in request.sequences[1:]
    ]
    assert scores == sorted(lengths, reverse=True)[:2]
    assert outputs[0].logprobs is None, "they were not asked for"
