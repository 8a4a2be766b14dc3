"""Beam search: the search alone against slow references, and its beams in lockstep in the engine."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.engine.beam_search import BeamRequest, BeamSearch
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.messages import StepPlan, StepResult
from nanoengine.engine.request import Request
from nanoengine.errors import InvalidSamplingParams
from nanoengine.outputs import RequestOutput, TokenLogprob, TokenLogprobs
from nanoengine.sampling_params import BeamSearchParams, SamplingParams
from tests.engine.engine_toys import assert_idle, make_engine, run
from tests.engine.toys import FAST, ToyModel, continuation, runs_of, sampled_rows, watch

EOS = 0
VOCAB = 6
Tokens = tuple[int, ...]
Language = Callable[[Tokens], list[float]]  # the log probability of every token after these


def log_softmax(logits: list[float]) -> list[float]:
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def random_language(seed: int, vocab_size: int = VOCAB) -> Language:
    """One where end of text is about as likely as anything else."""

    def next_logprobs(tokens: Tokens) -> list[float]:
        source = random.Random(f"{seed} {tokens}")
        return log_softmax([source.gauss(0, 1.5) for _ in range(vocab_size)])

    return next_logprobs


def likeliest(logprobs: list[float], count: int) -> TokenLogprobs:
    """What a model reports: its `count` likeliest next tokens."""
    ranked = sorted(range(len(logprobs)), key=lambda token: -logprobs[token])[:count]
    return {token: TokenLogprob(logprobs[token], rank) for rank, token in enumerate(ranked, start=1)}


def search_through(language: Language, params: BeamSearchParams, eos: Seq[int] = (EOS,)) -> BeamSearch:
    """Search a language to the end."""
    search = BeamSearch(params, eos, params.max_tokens)
    for _ in range(params.max_tokens):
        logprobs = [likeliest(language(tuple(tokens)), search.num_candidates) for tokens in search.outputs]
        if not search.select(logprobs):
            return search
    raise AssertionError("the search goes on behind its last token")


def reference(language: Language, params: BeamSearchParams, eos: Seq[int] = (EOS,)) -> list[tuple[Tokens, float]]:
    """Tokens and log probabilities of the finished beams, best first: every continuation of every beam is looked at."""
    width, penalty = params.beam_width, params.length_penalty
    eos = () if params.ignore_eos else eos
    running: list[tuple[Tokens, float]] = [((), 0.0)]
    finished: list[tuple[float, Tokens, float]] = []
    for length in range(1, params.max_tokens + 1):
        longer = [((*old, t), score + p) for old, score in running for t, p in enumerate(language(old))]
        longer.sort(key=lambda pair: -pair[1])
        longer = longer[: max(2, 1 + len(eos)) * width]
        ends = [tokens[-1] in eos or length == params.max_tokens for tokens, _ in longer]
        finished += [
            (p / length**penalty, tokens, p)
            for (tokens, p), is_end in zip(longer[:width], ends, strict=False)
            if is_end
        ]
        finished = sorted(finished, key=lambda beam: -beam[0])[:width]
        running = [pair for pair, is_end in zip(longer, ends, strict=True) if not is_end][:width]
        if not running:
            break
        if len(finished) == width:
            can_grow = params.early_stopping == "never" and penalty > 0
            attainable = running[0][1] / (params.max_tokens if can_grow else length) ** penalty
            if params.early_stopping is True or attainable <= finished[-1][0]:
                break
    return [(tokens, logprob) for _, tokens, logprob in finished]


def found(search: BeamSearch) -> list[tuple[Tokens, float]]:
    return [(tuple(beam.token_ids), beam.cumulative_logprob) for beam in search.finished]


# ---- the search alone

PENALTIES = [1.0, 0.0, -1.5, 2.0]
WAYS_TO_STOP = [True, False, "never"]


@pytest.mark.parametrize("early_stopping", WAYS_TO_STOP)
@pytest.mark.parametrize("length_penalty", PENALTIES)
def test_it_finds_what_looking_at_every_continuation_finds(length_penalty: float, early_stopping: bool | str) -> None:
    for seed, width, max_tokens in itertools.product(range(12), (1, 2, 3, 5), (1, 2, 7)):
        params = BeamSearchParams(
            beam_width=width, max_tokens=max_tokens, length_penalty=length_penalty, early_stopping=early_stopping
        )
        for eos in ((), (EOS,), (EOS, 3), (EOS, 3, 5)):
            expected = reference(random_language(seed), params, eos)
            assert found(search_through(random_language(seed), params, eos)) == expected, (seed, params, eos)


@pytest.mark.parametrize("length_penalty", PENALTIES)
@pytest.mark.parametrize("seed", range(6))
def test_with_room_for_all_beams_it_finds_the_best_texts_that_there_are(seed: int, length_penalty: float) -> None:
    language = random_language(seed, vocab_size=3)
    texts: list[tuple[float, Tokens]] = []

    def explore(tokens: Tokens, logprob: float) -> None:
        for token, more in enumerate(language(tokens)):
            text = (*tokens, token)
            if token == EOS or len(text) == 3:
                texts.append(((logprob + more) / len(text) ** length_penalty, text))
            else:
                explore(text, logprob + more)

    explore((), 0.0)
    texts.sort(reverse=True)
    params = BeamSearchParams(beam_width=12, max_tokens=3, length_penalty=length_penalty)
    search = search_through(language, params)
    assert [tuple(beam.token_ids) for beam in search.finished] == [text for _, text in texts[:12]]
    assert [beam.score for beam in search.finished] == pytest.approx([score for score, _ in texts[:12]])


@FAST
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 6),
    max_tokens=st.integers(1, 9),
    length_penalty=st.sampled_from([-2.0, 0.0, 0.3, 1.0, 3.0]),
    early_stopping=st.sampled_from(WAYS_TO_STOP),
    ignore_eos=st.booleans(),
)
def test_finished_beams_are_few_different_and_scored_right(seed: int, width: int, max_tokens: int, **how: Any) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, **how)
    language = random_language(seed)
    search = search_through(language, params)
    assert found(search) == reference(language, params)
    beams = search.finished
    assert 1 <= len(beams) <= width
    assert len({tuple(beam.token_ids) for beam in beams}) == len(beams)
    assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)
    for beam in beams:
        tokens = tuple(beam.token_ids)
        logprob = sum(language(tokens[:i])[token] for i, token in enumerate(tokens))
        assert beam.cumulative_logprob == pytest.approx(logprob)
        assert beam.score == pytest.approx(logprob / len(tokens) ** params.length_penalty)
        assert beam.stopped == (not params.ignore_eos and tokens[-1] == EOS)
        assert beam.stopped or len(tokens) == max_tokens
        assert params.ignore_eos or EOS not in tokens[:-1]


def test_choices_say_whom_they_continue_and_the_outputs_follow() -> None:
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=5), (EOS,), 5)
    first = likeliest(log_softmax([-9.0, 2.0, 1.0, 0.0]), 4)
    assert [(choice.parent, choice.token) for choice in search.select([first, first])] == [(0, 1), (0, 2)]
    assert search.outputs == [[1], [2]]
    sure, unsure = likeliest(log_softmax([-9.0, 0.0, 0.0, 9.0]), 4), likeliest(log_softmax([-9.0, 1.0, 0.9, 0.8]), 4)
    assert [(choice.parent, choice.token) for choice in search.select([unsure, sure])] == [(1, 3), (0, 1)]
    assert search.outputs == [[2, 3], [1, 1]]
    assert not search.finished


def test_ends_of_text_among_the_candidates_take_no_ones_place() -> None:
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=5, early_stopping="never"), (0, 1), 5)
    logprobs = likeliest(log_softmax([5.0, 4.0, 3.0, 2.0]), search.num_candidates)
    assert [choice.token for choice in search.select([logprobs, logprobs])] == [2, 3]
    assert [beam.token_ids for beam in search.finished] == [[0], [1]]


def test_an_end_of_text_behind_the_first_places_does_not_finish_a_beam() -> None:
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=5), (EOS,), 5)
    logprobs = likeliest(log_softmax([2.0, 5.0, 4.0, 1.0]), search.num_candidates)
    assert [choice.token for choice in search.select([logprobs, logprobs])] == [1, 2]
    assert not search.finished


def test_the_ways_to_stop_differ() -> None:
    """Two sure ends at once: is a long text still worth the search?"""

    def language(tokens: Tokens) -> list[float]:
        return log_softmax([3.0, 2.0, 2.9, 1.0] if len(tokens) < 2 else [-9.0, 9.0, 0.0, 0.0])

    lengths = {
        how: search_through(
            language, BeamSearchParams(beam_width=2, max_tokens=30, length_penalty=1.0, early_stopping=how)
        ).finished
        for how in WAYS_TO_STOP
    }
    assert max(len(beam.token_ids) for beam in lengths[True]) < 30
    assert max(len(beam.token_ids) for beam in lengths["never"]) == 30


# ---- in the engine


class BeamModel(ToyModel):
    """The toy model with log probabilities, which depend like its tokens on all that it has read."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        for i, (row, token) in enumerate(zip(sampled_rows(plan), result.token_ids, strict=True)):
            count = self.rows[row].sampling.params.logprobs
            if count is not None:
                result.logprobs[i] = likeliest(random_language(token)(()), count)
        return result


def expected_beams(prompt: Seq[int], params: BeamSearchParams, eos: Seq[int] = (EOS,)) -> list[Tokens]:
    def language(tokens: Tokens) -> list[float]:
        return random_language(continuation([*prompt, *tokens], 1)[0])(())

    return [tokens for tokens, _ in reference(language, params, eos)]


def beams_of(output: RequestOutput) -> list[Tokens]:
    return [tuple(completion.token_ids) for completion in output.outputs]


def add_beams(engine: LLMEngine, prompt: Seq[int], params: BeamSearchParams) -> BeamRequest:
    request = engine.make_beam_request(list(prompt), params)
    engine.submit(request)
    return request


PARAMS = BeamSearchParams(beam_width=3, max_tokens=8, early_stopping="never")
ORDINARY = SamplingParams(max_tokens=9, ignore_eos=True)


def test_the_beams_of_a_request_are_those_of_the_search_alone() -> None:
    engine = make_engine(BeamModel())
    for first in range(10):
        prompt = list(range(first, 2 * first + 1))
        [output] = run(engine, add_beams(engine, prompt, PARAMS))
        assert beams_of(output) == expected_beams(prompt, PARAMS)
        assert output.prompt_token_ids == prompt
        assert output.finished


def test_the_prompt_is_computed_once_and_beams_copy_what_they_are_about_to_write() -> None:
    executor = BeamModel()
    engine = make_engine(executor, caching=False, eos=())
    run(engine, add_beams(engine, range(10), BeamSearchParams(beam_width=3, max_tokens=6)))
    assert executor.num_computed == 10 + 3 * 5
    assert engine.scheduler.num_forks == 2
    assert engine.scheduler.block_manager.stats.num_copied_blocks >= 2


def test_a_text_is_cut_before_its_end_and_says_how_it_ended() -> None:
    engine = make_engine(BeamModel())
    outputs = run(engine, *[add_beams(engine, [first, 6], PARAMS) for first in range(4)])
    for output in outputs:
        for i, completion in enumerate(output.outputs):
            stopped = completion.token_ids[-1] == EOS
            assert completion.index == i
            assert completion.finish_reason == ("stop" if stopped else "length")
            text = completion.token_ids[:-1] if stopped else completion.token_ids
            assert completion.text == engine.tokenizer.decode(text)
    assert {completion.finish_reason for output in outputs for completion in output.outputs} == {"stop", "length"}


def test_a_search_ends_where_the_longest_sequence_does() -> None:
    engine = make_engine(BeamModel(), eos=(), max_model_len=16)
    [output] = run(engine, add_beams(engine, range(11), BeamSearchParams(beam_width=2, max_tokens=50)))
    expected = expected_beams(range(11), BeamSearchParams(beam_width=2, max_tokens=5), eos=())
    assert beams_of(output) == expected


def submit_a_crowd(engine: LLMEngine) -> tuple[dict[Tokens, Request], dict[Tokens, BeamRequest]]:
    """Ordinary requests and beams by turns, of prompts that share nothing."""
    ordinary: dict[Tokens, Request] = {}
    beams: dict[Tokens, BeamRequest] = {}
    for i in range(3):
        a, b = (100 + i,) * 3, (200 + i,) * (3 + i)
        ordinary[a] = engine.add_request(list(a), ORDINARY)
        beams[b] = add_beams(engine, b, PARAMS)
    return ordinary, beams


def assert_right(ordinary: dict[Tokens, Request], beams: dict[Tokens, BeamRequest]) -> None:
    """Those of the crowd that did not fail got what they would have got alone."""
    for prompt, request in ordinary.items():
        if request.error is None:
            assert request.output().outputs[0].token_ids == continuation(prompt, 9)
    for prompt, beam_request in beams.items():
        if beam_request.error is None:
            assert beams_of(beam_request.output()) == expected_beams(prompt, PARAMS)


@FAST
@given(
    num_blocks=st.integers(12, 40),
    max_num_seqs=st.integers(3, 9),
    budget=st.integers(3, 30),
    block_size=st.sampled_from([1, 3, 4]),
    caching=st.booleans(),
)
def test_beams_beside_ordinary_requests_in_any_pool(block_size: int, num_blocks: int, **options: Any) -> None:
    options |= {"num_blocks": num_blocks * 4 // block_size, "block_size": block_size, "max_model_len": 16}
    engine = make_engine(BeamModel(block_size), **options)
    ordinary, beams = submit_a_crowd(engine)
    run(engine, *ordinary.values(), *beams.values())
    assert_right(ordinary, beams)


def test_a_beam_that_is_preempted_while_it_is_held_samples_its_last_token_again() -> None:
    executor = BeamModel()
    engine = make_engine(executor, num_blocks=12, max_model_len=16)
    scheduler = engine.scheduler
    ordinary, beams = submit_a_crowd(engine)
    num_lost = 0
    while engine.has_unfinished:
        held = {seq: seq.num_tokens for seq in scheduler.held}
        rows = {seq.row for seq in held}
        engine.step()
        scheduler.check()
        computed = {row for row, _, _ in runs_of(executor.plans[-1])}
        assert all(seq.num_tokens == count for seq, count in held.items() if seq in scheduler.held), "they wait"
        assert not rows & computed - {start.row for start in executor.plans[-1].started}
        preempted = [seq for seq in held if seq in scheduler.waiting]
        assert all(seq.num_tokens == held[seq] - 1 for seq in preempted)
        num_lost += len(preempted)
    assert num_lost > 0
    assert_right(ordinary, beams)
    assert_idle(engine)


@pytest.mark.parametrize("num_steps", range(0, 22, 3))
def test_beams_can_be_aborted_at_any_time(num_steps: int) -> None:
    engine = make_engine(BeamModel(), num_blocks=12, max_model_len=16)
    ordinary, beams = submit_a_crowd(engine)
    for _ in range(num_steps):
        engine.step()
    prompt, victim = list(beams.items())[1]
    was_finished = victim.finished
    assert engine.abort(victim.request_id) != was_finished
    assert victim.finished
    run(engine)
    assert_right(ordinary, {other: request for other, request in beams.items() if was_finished or other != prompt})


@pytest.mark.parametrize("failing", range(1, 21))
def test_a_failing_step_ends_the_beams_that_were_in_it_and_no_others(failing: int) -> None:
    executor = BeamModel(fail_if=lambda _: len(executor.plans) == failing)
    engine = make_engine(executor, num_blocks=12, max_model_len=16)
    in_plans = watch(engine.scheduler)
    ordinary, beams = submit_a_crowd(engine)
    run(engine)
    assert_right(ordinary, beams)
    in_plan = in_plans[failing - 1]
    for request in (*ordinary.values(), *beams.values()):
        was_in_plan = any(completion.seq.seq_id in in_plan for completion in request.completions)
        assert request.finished
        assert (request.error is not None) == was_in_plan
    ordinary, beams = submit_a_crowd(engine)
    run(engine)
    assert_right(ordinary, beams)


# ---- refusals


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        (BeamSearchParams(beam_width=9), {}, "beam_width is 9.*max_num_seqs is 8"),
        (BeamSearchParams(beam_width=4, max_tokens=28), {"num_blocks": 31}, "32 blocks.*31"),
        (BeamSearchParams(beam_width=4, max_tokens=99), {"num_blocks": 63}, "64 blocks.*63"),
        (BeamSearchParams(beam_width=51), {"max_num_seqs": 60}, "beam_width is 51.*102 candidates.*100"),
        (BeamSearchParams(beam_width=26), {"max_num_seqs": 60, "eos": (0, 1, 2)}, "beam_width is 26.*104 candidates"),
        (SamplingParams(), {}, "BeamSearchParams"),
        (None, {}, "BeamSearchParams"),
    ],
)
def test_beams_that_the_engine_cannot_run_are_refused_by_name(params: Any, options: Any, message: str) -> None:
    engine = make_engine(BeamModel(), **options)
    with pytest.raises(InvalidSamplingParams, match=message):
        engine.make_beam_request([1, 2, 3, 4], params)
    assert_idle(engine)
    [output] = run(engine, add_beams(engine, [1, 2, 3], PARAMS))
    assert beams_of(output) == expected_beams([1, 2, 3], PARAMS, engine.eos_token_ids)


def test_ends_of_text_that_are_ignored_need_no_candidates() -> None:
    engine = make_engine(BeamModel(), max_num_seqs=60, eos=(0, 1, 2), num_blocks=999)
    params = BeamSearchParams(beam_width=26, ignore_eos=True, max_tokens=3)
    [output] = run(engine, add_beams(engine, [1, 2], params))
    assert beams_of(output) == expected_beams([1, 2], params)
